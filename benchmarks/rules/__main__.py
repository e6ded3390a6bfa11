"""`python -m benchmarks.rules`: see `run`."""

import tyro

from benchmarks.rules.run import main

if __name__ == "__main__":
    tyro.cli(main)
