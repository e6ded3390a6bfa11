"""Six steps of every strategy, with several M, optimizers and orders; writes digests of all parameters."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from nwise.losses import TokenCrossEntropy
from nwise.schedule.named import RULES
from ranks.common import batches, closed, digests, pipeline, trained, write

STRATEGIES = (
    "local",
    "2-wise",
    "3-wise",
    "2-wise-mean",
    "end-to-end",
    "rotating-2",
    "rotating-2-microbatch",
    "local, then 2-wise",
    "2-wise-mean, of some",
)
CASES = [(name, *((1, "sgd"), (4, "adam"))[i % 2], "best") for i, name in enumerate(STRATEGIES)]
CASES += [
    ("2-wise" if order in ("depth-first", "skewed", "phase") else "end-to-end", 4, "adam", order) for order in RULES
]


class OfSome(TokenCrossEntropy):
    """The loss of a random half of the samples, each of one token."""

    def __init__(self) -> None:
        super().__init__(fraction=0.5)

    def forward(self, logits: Any, target: Tensor) -> Tensor:
        return super().forward(logits[:, None], target[:, None])


def case(num_stages: int, strategy: str, num_microbatches: int, optimizer: str, order: Any) -> Any:
    """Digests after six steps, some of whose batches are ragged."""
    first, _, then = strategy.partition(", ")
    loss = OfSome() if then == "of some" else nn.functional.cross_entropy
    pipe = pipeline(num_stages, first, num_microbatches, loss=loss, schedule=order)
    switch = (3, then.removeprefix("then ")) if then.startswith("then ") else None
    trained(pipe, optimizer, batches(6, sizes=(8, 8, 7, 8, 9, 9)), switch)
    return closed(pipe, digests(pipe))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write([case(int(sys.argv[2]), *found) for found in CASES])
