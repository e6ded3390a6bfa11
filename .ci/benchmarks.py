"""Run every benchmark once, as small as it goes, in a copy whose records do not matter: does it still run?

    make benchmarks    or    python .ci/benchmarks.py [names]

Benchmarks use the library's inner names, take hours at full size, and no test runs them whole. This takes 20 minutes, without
`memory speed`, which takes as long by itself.
"""

from __future__ import annotations

import os
import sys

from readme import run_all

SMALL = """
parity
step_cost --case overhead --rounds 3
step_cost.parts --rounds 3
runtime --stages 3 --rounds 1 --mib 0
runtime.command --stages 2 --strategy 2-wise --batches 2 --rounds 1
runtime.targets
rules
wire --ranks 2 --links 20ms --methods local --records steps.jsonl
faults kills --runs 2
faults soak --steps 30
memory show
memory predict --network gpt
memory measure --network convnet --microbatches 2 --remedies plain
planning --rounds 1 --largest 128
planning.devices --networks 2 --measured 1
planning.methods --devices 4 --latencies 0
compression train --data digits --seeds 1
compression show
exits train --data digits --seeds 1
exits measure --data digits --seeds 1 --rounds 1
exits show --data digits
gpu --minutes 10 --device cpu --rehearse
"""


def main(*names: str) -> int:
    """Run the benchmarks of these names, or all; return the number of commands that failed."""
    pairs = []
    for line in SMALL.strip().splitlines():
        module, *options = line.split()
        if not names or module.partition(".")[0] in names:
            pairs.append((f"python -m benchmarks.{line}", [sys.executable, "-m", f"benchmarks.{module}", *options]))
    return run_all(pairs, PYTHONPATH=os.pathsep.join(["{copy}/src", "{copy}"]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
