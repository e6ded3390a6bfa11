"""`python -m benchmarks.planning`: see `run`."""

import tyro

from benchmarks.planning.run import main

if __name__ == "__main__":
    tyro.cli(main)
