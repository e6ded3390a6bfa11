"""`python -m benchmarks.links`: see `run`."""

import tyro

from benchmarks.links.run import main

if __name__ == "__main__":
    tyro.cli(main)
