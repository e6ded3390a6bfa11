"""`python -m benchmarks.parity`: see `run`."""

import tyro

from benchmarks.parity.run import main

if __name__ == "__main__":
    tyro.cli(main)
