"""The whole method on several processes, in plain PyTorch: a process for each stage, any credit matrix, one micro-batch.

    torchrun --nproc-per-node 4 examples/tiny.py

Stage k keeps ``x``, what it received, and ``y``, what it sent. Each loss j sends its gradient down as far as it has credit::

    stage 0         stage 1         stage 2         stage 3
      y ----x---->    y ----x---->    y ----x---->    y          forward: activations
      |               |               |               |
    loss 0          loss 1          loss 2          loss 3       every stage has a loss of its own
      <--- dL1/dx ---  <--- dL2/dx ---  <--- dL3/dx ---          2-wise: each gradient crosses one boundary
                                                                 end-to-end: that of loss 3 crosses all

What nwise adds is in docs/by_hand.md. `examples/by_hand.py` is the same on one device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

WIDTH, CLASSES, BATCH = 16, 4, 8


def stage_and_head(k: int) -> tuple[nn.Sequential, nn.Linear]:
    """Return stage k with its head; that of the last stage is the network's output."""
    torch.manual_seed(k)  # every process makes its own, whatever the others do
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return stage, nn.Linear(WIDTH, CLASSES)


def credit_matrix(name: str, num_stages: int) -> Tensor:
    """Return which loss (row) trains which stage (column)."""
    reach = {"local": 1, "2-wise-mean": 2, "3-wise-mean": 3}.get(name, num_stages)
    matrix = torch.zeros(num_stages, num_stages)
    for j in range(num_stages):
        matrix[j, max(0, j + 1 - reach) : j + 1] = 1
    if name == "end-to-end":
        matrix[:-1] = 0  # the last loss trains all
    return matrix / matrix.sum(0)  # a stage learns from the mean of its losses


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same mini-batches in every process."""
    numbers = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield (
            torch.randn(BATCH, WIDTH, generator=numbers),
            torch.randint(CLASSES, (BATCH,), generator=numbers),
        )


def step(k: int, stage: nn.Module, head: nn.Module, credit: Tensor, x: Tensor, target: Tensor) -> None:
    """Run one mini-batch of stage k and fill its gradients."""
    last = len(credit) - 1
    # Forward: the input comes from the stage before, and the output goes to the next one.
    if k:
        x = torch.empty(BATCH, WIDTH)
        dist.recv(x, k - 1)
        x.requires_grad_()
    y = stage(x)
    if k < last:
        dist.send(y.detach(), k + 1)

    # The loss of this stage, if any stage learns from it.
    cotangents: dict[int, Tensor] = {}  # of y, by loss
    if credit[k].any():
        features = y.detach().requires_grad_()
        functional.cross_entropy(head(features), target).backward()  # which trains the head
        assert features.grad is not None
        cotangents[k] = features.grad

    # Gradients of later losses, of those that still have credit at this stage or before it.
    def passes(j: int, boundary: int) -> bool:
        """Return whether the gradient of loss j crosses the boundary below a stage."""
        return j >= boundary and bool(credit[j, :boundary].any())

    for j in range(k + 1, last + 1):
        if passes(j, k + 1):
            cotangents[j] = torch.empty(BATCH, WIDTH)
            dist.recv(cotangents[j], k + 1)

    # To the stage before: one gradient for each loss that has credit there.
    for j in range(k, last + 1):
        if k and passes(j, k):
            (sent,) = torch.autograd.grad(y, x, cotangents[j], retain_graph=True)
            dist.send(sent, k - 1)

    # To the parameters: all losses at once, each with its credit.
    total = sum(float(credit[j, k]) * cotangent for j, cotangent in cotangents.items() if credit[j, k])
    if isinstance(total, Tensor):
        y.backward(total, inputs=list(stage.parameters()))


def train(name: str, steps: int = 5) -> dict[str, Tensor]:
    """Train this process's stage; return its weights and those of its head."""
    k = dist.get_rank()
    stage, head = stage_and_head(k)
    credit = credit_matrix(name, dist.get_world_size())
    optimizer = torch.optim.SGD([*stage.parameters(), *head.parameters()], lr=0.1)
    for x, target in batches(steps):
        step(k, stage, head, credit, x, target)
        optimizer.step()
        optimizer.zero_grad()
    weight, output = stage[0].weight, head.weight
    assert isinstance(weight, Tensor)
    return {f"stage {k}": weight.detach(), f"head {k}": output.detach()}


def main() -> None:
    """Train by four credit matrices, and print a number for each weight of each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("local", "2-wise-mean", "3-wise-mean", "end-to-end"):
        for what, weight in train(name).items():
            print(name, what, weight.double().square().sum().item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__" and "RANK" in os.environ:
    main()
