"""Three steps of every rule of the zoo; writes digests of all parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import rules
from ranks.common import closed, digests, write


def case(name: str) -> dict[str, str]:
    """Train by a rule."""
    torch.manual_seed(0)
    rule = rules.RULES[name]()
    optimizer = torch.optim.SGD((p for p in rule.pipe.parameters() if p.requires_grad), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, y = torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        rule.step(rule.pipe, x, y)
        optimizer.step()
        optimizer.zero_grad()
        rule.after_update()
    return closed(rule.pipe, digests(rule.pipe))


if __name__ == "__main__":
    write({name: case(name) for name in rules.RULES})
