"""`python -m benchmarks.compression`: see `run`."""

import tyro

from benchmarks.compression.run import show, train

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"train": train, "show": show})
