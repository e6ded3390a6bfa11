"""`python -m benchmarks.memory`: see `run`."""

import tyro

from benchmarks.memory.run import measure, show, speed

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "speed": speed, "show": show})
