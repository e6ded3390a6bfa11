"""`python -m benchmarks.orders`: see `run`."""

from benchmarks.orders.run import main

if __name__ == "__main__":
    main()
