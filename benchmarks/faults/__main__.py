"""`python -m benchmarks.faults kills`, ``soak`` or ``cost``."""

import tyro

from benchmarks.faults import cost, kills, soak

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"kills": kills.main, "soak": soak.main, "cost": cost.main})
