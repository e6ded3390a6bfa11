"""Where two runs part: the first record that differs, and the weights that differ, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwise.app.training import Run

_OWN = ("seconds",)  # what two equal runs need not share


@dataclass(frozen=True, slots=True)
class Parting:
    """The comparison of two runs.

    Args:
        records: number of records of the same kind and step in both.
        alone: number of records that one of them has alone.
        first: the first record that differs, in words; None if all are equal.
        tensors: number of tensors of both runs' weights.
        apart: the largest difference of every tensor that differs, by name; infinite if its shape does, or one run lacks it.
    """

    records: int
    alone: int
    first: str | None
    tensors: int
    apart: dict[str, float]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self.first is None and not self.apart and not self.alone and self.records + self.tensors > 0


def parting(one: Run, other: Run) -> Parting:
    """Compare the records and the weights of two runs.

    Raises:
        ValueError: a record or a file of weights cannot be read.
    """
    first, second = map(_numbered, (one.metrics(), other.metrics()))
    shared = [key for key in first if key in second]
    apart = next((words for key in shared if (words := _difference(first[key], second[key]))), None)
    weights = [run.weights() if run.weights_file.exists() else {} for run in (one, other)]
    names = {**weights[0], **weights[1]}
    gaps = {name: _gap(weights[0].get(name), weights[1].get(name)) for name in names}
    alone = len(first) + len(second) - 2 * len(shared)
    return Parting(len(shared), alone, apart, len(names), {name: by for name, by in gaps.items() if by})


def _numbered(records: list[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return records by kind, step and number; a step may have several of a kind."""
    counts = Counter[tuple[str, int]]()
    found = {}
    for record in records:
        place = str(record["kind"]), record["step"]
        found[*place, counts[place]] = record
        counts[place] += 1
    return found


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe the first value in which two records differ; an empty text if there is none."""
    for name in [name for name in {**one, **other} if name not in _OWN and one.get(name) != other.get(name)]:
        a, b = one.get(name), other.get(name)
        where = name
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            k, a, b = next((k, x, y) for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            where = f"{name} of stage {k}"
        return f"step {one['step']}, {one['kind']}: {where} is {a} and {b}"
    return ""


def _gap(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return 0.0
    # Two kinds of nan, or of zero, differ in their bits alone.
    return float((a.double() - b.double()).nan_to_num().abs().max()) or float("inf")
