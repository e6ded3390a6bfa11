"""`python -m benchmarks.exits`: see `run`."""

import tyro

from benchmarks.exits.run import measure, show, train

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"train": train, "measure": measure, "show": show})
