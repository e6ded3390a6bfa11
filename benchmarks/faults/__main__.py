"""`python -m benchmarks.faults kills` or ``soak``."""

import tyro

from benchmarks.faults import kills, soak

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"kills": kills.main, "soak": soak.main})
