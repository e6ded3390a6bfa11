"""A step that raises on one rank, after one whose gradients are still there: what each rank has left of both."""

from __future__ import annotations

import torch
from torch import Tensor

from nwise.runtime.calls import RankError
from ranks.common import RANK, batches, digests, pipeline, write


def fail(gradient: Tensor) -> Tensor:
    """Raise in the middle of the backward passes."""
    raise ArithmeticError("the fault of this test")


def main() -> None:
    """Step, and step again with an error on the last rank."""
    torch.set_num_threads(1)
    pipe = pipeline(2, "end-to-end", 2)
    (x, y), (again, target) = batches(2)
    pipe.step(x, target=y)
    before = [p.grad.tolist() for p in pipe.parameters() if p.grad is not None], digests(pipe)
    if RANK == 1:
        # A hook of a parameter would run after all passes.
        pipe.stages[1][0][0].register_forward_hook(lambda module, given, out: out.register_hook(fail) and None)  # type: ignore[index]
    try:
        pipe.step(again, target=target)
    except RankError as error:
        after = [p.grad.tolist() for p in pipe.parameters() if p.grad is not None], digests(pipe)
        write({"same": after == before, "gradients": len(before[0]), "error": str(error)})


if __name__ == "__main__":
    main()
