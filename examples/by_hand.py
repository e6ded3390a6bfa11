"""Any credit matrix in plain PyTorch, on one device: the whole method in fourteen lines, beside nwise.

python examples/by_hand.py
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import nwise
from nwise.app.data import batch_indices, digits


# The fourteen lines
def backward(stages, heads, loss_fn, x, target, credit):  # noqa: D103
    def add(loss, module):
        parameters = list(module.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
            p.grad = g if p.grad is None else p.grad + g

    losses = []
    for stage, head in zip(stages, [*heads, nn.Identity()], strict=True):
        x = stage(x)
        losses.append(loss_fn(head(x), target))
    for k, stage in enumerate(stages):
        add(sum(credit[j, k] * losses[j] for j in range(k, len(stages)) if credit[j, k]), stage)
    for j in credit[:-1].any(1).nonzero():
        add(losses[j], heads[j])
    return losses


# End of the fourteen lines


def network() -> tuple[list[nn.Module], list[nn.Module]]:
    """Return four stages and three heads."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    return [*stages, nn.Linear(64, 10)], [nn.Linear(64, 10) for _ in range(3)]


def trained(
    step: Callable[[Tensor, Tensor], object], modules: Sequence[nn.Module], steps: int = 200
) -> list[nn.Module]:
    """Train modules with a function that fills their gradients; return them."""
    images, _ = digits()
    optimizer = torch.optim.Adam(nn.ModuleList(modules).parameters(), lr=3e-3)
    for i in range(steps):
        x, y = images.batch(batch_indices(len(images), 64, seed=0, step=i))
        step(x.flatten(1), y)
        optimizer.step()
        optimizer.zero_grad()
    return list(modules)


def main(strategy: str = "2-wise-mean") -> float:
    """Train both ways; return the largest difference of the weights."""
    stages, heads = network()
    pipe = nwise.Pipeline(stages, heads, nn.functional.cross_entropy, strategy)
    ours = trained(lambda x, y: pipe.step(x, target=y), [*stages, *heads])
    plain, others = network()
    theirs = trained(
        lambda x, y: backward(plain, others, nn.functional.cross_entropy, x, y, pipe.credit), [*plain, *others]
    )
    pairs = zip(nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


if __name__ == "__main__":
    print("largest difference of the weights after 200 steps:", main())
