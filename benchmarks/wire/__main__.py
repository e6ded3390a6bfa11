"""`python -m benchmarks.wire`: see `run`."""

import tyro

from benchmarks.wire.run import main

if __name__ == "__main__":
    tyro.cli(main)
