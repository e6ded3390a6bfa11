"""`python -m benchmarks.step_cost`: see `run`."""

import tyro

from benchmarks.step_cost.run import main

if __name__ == "__main__":
    tyro.cli(main)
