"""Trains until a fault: an exception, a kill, a stall or another strategy on one rank, after an action or between two steps."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from nwise.schedule import Action
from ranks.common import RANK, batches, pipeline


def fault(kind: str) -> None:
    """What goes wrong, and when."""
    Path(sys.argv[5]).write_text(str(time.time()))
    if kind == "raise":
        raise ValueError("the fault of this test")
    if kind == "leave":
        sys.exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":  # the whole process stands still, its watch too
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind != "differ":
        time.sleep(1000)


def main(num_stages: int, kind: str, rank: int, after: int) -> None:
    """Train; with the action of that number on that rank comes the fault, with -1 between two steps."""
    torch.set_num_threads(1)
    pipe = pipeline(num_stages, "2-wise", 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    count = 0

    def on_action(action: Action) -> None:
        nonlocal count
        del action
        count += 1
        if count == after and rank == RANK:
            fault(kind)
            pipe.strategy = "2-wise-mean"

    pipe.on_action = on_action
    for step, (x, y) in enumerate(batches(400)):
        if step == 3 and after < 0 and rank == RANK:
            fault(kind)
            pipe.strategy = "2-wise-mean"
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit("the fault did not come")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
