"""Some steps with several stages on a rank, delays, strategies and optimizers; writes digests of all parameters."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nwise
from nwise.app.report.interchange import read_csv
from nwise.schedule import best
from nwise.schedule.costs import TYPICAL
from nwise.schedule.named import Order
from ranks.common import batches, closed, digests, make_optimizer, pipeline, write

A = 8
# Stage 1 sends on a gradient that it does not learn from, and is done with its own long before that is there.
SENT_ON = nwise.Hogwild(nwise.Credit([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]))
# Every pair of values of two columns occurs (`tests/test_runtime.py` counts them), but for those of eight ranks.
CASES: list[tuple[int, str | tuple[int, ...], str, int, str, str]] = [
    (2, "contiguous", "end-to-end-delay-1", 4, "sgd", "best"),
    (2, "contiguous", "2-wise-hogwild", 1, "adam", "best"),
    (2, "contiguous", "3-wise-mean-delay-2", 2, "adam", "best"),
    (2, "v", "local-delay-2", 2, "sgd", "best"),
    (2, "v", "3-wise-mean-delay-1", 1, "adam", "best"),
    (2, "contiguous", "hogwild-forward-least", 2, "adam", "best"),
    (2, "interleaved", "rotating-2", 1, "sgd", "best"),
    (2, "interleaved", "local-hogwild", 4, "adam", "best"),
    (2, (0, 1, 1, 0, 1, 0, 0, 1), "hogwild", 2, "sgd", "best"),
    (2, (1, 1, 0, 1, 0, 0, 1, 0), "rotating-2-delay-1", 2, "adam", "phase"),
    (4, "contiguous", "local", 2, "sgd", "best"),
    (4, "contiguous", "rotating-2-delay-2", 1, "adam", "best"),
    (4, "v", "end-to-end", 4, "adam", "csv"),
    (4, "v", "2-wise", 1, "adam", "zb-h1"),
    (4, "v", "rotating-2-hogwild", 4, "adam", "best"),
    (4, "interleaved", "end-to-end", 4, "sgd", "interleaved-1f1b"),
    (4, "interleaved", "2-wise-delay-1", 2, "adam", "best"),
    (4, "interleaved", "end-to-end-delay-2", 1, "adam", "best"),
    (4, "interleaved", "3-wise-mean-hogwild", 4, "sgd", "best"),
    (4, "contiguous", "end-to-end-delay-2", 4, "sgd", "slow links"),
    (4, (3, 2, 1, 0, 0, 1, 2, 3), "local-delay-1", 1, "adam", "best"),
    (4, (2, 0, 1, 1, 3, 0, 2, 3), "3-wise-mean", 4, "adam", "best"),
    (4, (0, 3, 1, 2, 2, 1, 3, 0), "2-wise-delay-2", 4, "sgd", "1f1b"),
    (8, "contiguous", "2-wise-delay-1", 2, "adam", "best"),
    (8, (7, 3, 0, 1, 6, 2, 4, 5), "end-to-end-delay-2", 1, "sgd", "best"),
    (8, "contiguous", "3-wise-mean", 4, "adam", "zero-bubble"),
    (8, "contiguous", "hogwild", 4, "sgd", "best"),
    (8, "contiguous", "local-delay-1", 4, "adam", "best"),
    (8, "contiguous", "rotating-2-delay-2", 1, "adam", "best"),
]
FROZEN: list[tuple[int, str | tuple[int, ...], str | nwise.Strategy, int, str, str]] = [
    (4, "contiguous", "hogwild", 1, "sgd", "best"),
    (4, "contiguous", SENT_ON, 1, "sgd", "best"),
    (4, "contiguous", "3-wise-delay-1", 2, "adam", "best"),
]


def find(
    ranks: int, placement: str | Sequence[int], strategy: str, num_microbatches: int, order: str, csv: str
) -> Order:
    """The order of a case: "csv" is that of a file, "slow links" the best one where a message takes as long as a forward.

    The micro-batches of "slow links" differ in the ages of their messages. The search takes time, so it is done here once;
    in `equality.py` and `edges.py` every rank finds the best order itself.
    """
    if order == "csv":
        return read_csv(csv)
    if order not in ("slow links", "best"):
        return order
    costs = replace(TYPICAL, latency=1) if order == "slow links" else TYPICAL
    return best(
        strategy,
        num_stages=A,
        num_microbatches=num_microbatches,
        costs=costs,
        placement=placement,
        num_ranks=ranks,
    )


def case(
    ranks: int,
    placement: str | Sequence[int],
    strategy: str | nwise.Strategy,
    num_microbatches: int,
    optimizer: str,
    order: Order,
    *,
    num_steps: int,
    frozen: Sequence[int] = (),
    num_stages: int = A,
) -> Any:
    """Digests after all steps, some of whose batches are ragged, and after the last gradients."""
    pipe = pipeline(num_stages, strategy, num_microbatches, schedule=order, placement=placement, frozen=frozen)
    update = make_optimizer(optimizer, pipe)
    for x, y in batches(num_steps, sizes=(8, 8, 7, 8, 9, 9)):
        pipe.step(x, target=y)
        # As a checkpoint does. It changes nothing, except that passes with the weights in memory read those of now.
        if pipe.steps % 4 == 0 and (pipe.processes.size > 1 or not pipe.strategy.stashes):
            pipe.pending_gradients()
        update.step()
        update.zero_grad()
    drained = 0
    while pipe.drain():
        drained += 1
        update.step()
        update.zero_grad()
    return closed(pipe, {"digests": digests(pipe), "drained": drained})


if __name__ == "__main__":
    torch.set_num_threads(1)
    steps = int(sys.argv[4])
    orders = pickle.loads(Path(sys.argv[3]).read_bytes())
    cases = [one for one in CASES if one[0] == int(sys.argv[2])]
    found = [case(*one[:5], order, num_steps=steps) for one, order in zip(cases, orders, strict=True)]
    if sys.argv[2] == "4":
        found += [
            case(*one, num_steps=steps, frozen=(1,) if i != 1 else (), num_stages=4) for i, one in enumerate(FROZEN)
        ]
    write(found)
