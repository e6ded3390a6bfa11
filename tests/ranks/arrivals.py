"""A gathered column arrives although no rank waits for it."""

from __future__ import annotations

import time

from nwise.app.training.log import AsyncGather
from nwise.runtime.processes import Processes
from ranks.common import RANK, write


def main() -> None:
    """Rank 1 puts its numbers in later; rank 0 looks now and then, for a minute at most."""
    gather = AsyncGather(Processes(2))
    if RANK:
        time.sleep(0.5)
    gather.put(7, [float(RANK), RANK + 1.0])
    before = [] if RANK else gather.take()
    after = gather.take(wait=RANK == 1)
    end = time.monotonic() + 60
    while not RANK and not after and time.monotonic() < end:
        time.sleep(0.01)
        after = gather.take()
    write({"before": before, "after": [(step, table.tolist()) for step, table in after]})


if __name__ == "__main__":
    main()
