"""`python -m benchmarks.gpu`: see `run`."""

import tyro

from benchmarks.gpu.run import main

if __name__ == "__main__":
    tyro.cli(main)
