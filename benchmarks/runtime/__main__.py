"""`python -m benchmarks.runtime`: see `run`."""

import tyro

from benchmarks.runtime.run import main

if __name__ == "__main__":
    tyro.cli(main)
