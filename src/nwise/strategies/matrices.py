"""Credit matrices: the strategies of the paper, and custom ones.

Every synchronous method is one lower-triangular matrix ``C`` of shape ``[A, A]``: ``C[j, k]`` is the
weight of the gradient of loss ``j`` in the update of stage ``k``. Loss ``j`` depends on stage ``k``
only if ``j >= k``, so the matrix is zero above the diagonal.

    4 stages    end-to-end     local          2-wise         2-wise-mean (times 1/2)

    loss 0      .  .  .  .     1  .  .  .     .  .  .  .     1  .  .  .
    loss 1      .  .  .  .     .  1  .  .     1  .  .  .     1  1  .  .
    loss 2      .  .  .  .     .  .  1  .     .  1  .  .     .  1  1  .
    loss 3      1  1  1  1     .  .  .  1     .  .  1  1     .  .  1  2
    stage       0  1  2  3     0  1  2  3     0  1  2  3     0  1  2  3

    A  number of stages, indexed 0 .. A-1 from input to output
    n  window: how many stages a loss's gradient travels through (the paper's N)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nwise.strategies.base import Strategy


def _one_loss_each(losses: list[int]) -> Tensor:
    """Return the credit matrix in which stage ``k`` learns from ``losses[k]`` alone."""
    return torch.tensor([[float(j == loss) for loss in losses] for j in range(len(losses))], dtype=torch.float64)


@dataclass(frozen=True)
class EndToEnd(Strategy):
    """Ordinary training: every stage learns from the last loss, ``C[A-1, k] = 1``.

    >>> EndToEnd().credit(2).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    name = pattern = "end-to-end"
    examples = ("end-to-end",)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return _one_loss_each([num_stages - 1] * num_stages)


@dataclass(frozen=True)
class Local(Strategy):
    """Local (1-wise) training: every stage learns from its own loss, ``C = identity``."""

    name = pattern = "local"
    examples = ("local",)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return torch.eye(num_stages, dtype=torch.float64)


@dataclass(frozen=True)
class NWise(Strategy):
    """Interlocking training (section 3 of the paper): ``C[min(k + n - 1, A - 1), k] = 1``.

    Args:
        n: the window, at least 1. 1 is local; the number of stages or more is end-to-end if `reduce` is ``"last"``.
        reduce: ``"last"`` (default) takes the farthest loss of the window; ``"mean"`` takes half of the stage's own and
            half of the farthest loss (the paper's Transformers), weight 1 if the two coincide.

    >>> NWise(2).credit(3).tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    """

    pattern = r"(\d+)-wise(-mean)?"
    examples = ("2-wise", "3-wise-mean")

    n: int
    reduce: Literal["last", "mean"] = "last"

    def _check(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(
                "`n`, the number of stages a loss's gradient travels through, should be an integer of at least 1 "
                f"(1 is local training). Found `n = {self.n!r}`."
            )
        if self.reduce not in ("last", "mean"):
            raise ValueError(f"`reduce` should be 'last' or 'mean'. Found {self.reduce!r}.")

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> NWise:
        return cls(int(match[1]), "mean" if match[2] else "last", **options)

    @property
    def name(self) -> str:
        return f"{self.n}-wise" + ("-mean" if self.reduce == "mean" else "")

    def caution(self, num_stages: int) -> str | None:
        if self.n <= num_stages:
            return None
        return (
            f"`n = {self.n}` is more than the number of stages, {num_stages}: the farthest loss of every stage is the last "
            f"one, as with `n = {num_stages}`."
        )

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        far = _one_loss_each([min(k + self.n - 1, num_stages - 1) for k in range(num_stages)])
        return far if self.reduce == "last" else (far + torch.eye(num_stages, dtype=torch.float64)) / 2


@dataclass(frozen=True)
class DeepSupervision(Strategy):
    """Every stage learns from the sum of its own and all later losses: ones on and below the diagonal."""

    name = pattern = "deep-supervision"
    examples = ("deep-supervision",)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return torch.ones(num_stages, num_stages, dtype=torch.float64).tril()


@dataclass(frozen=True)
class Geometric(Strategy):
    """Credit that fades with distance: ``C[j, k] = decay ** (j - k)`` for ``j >= k``.

    Args:
        decay: factor per stage of distance, above 0 and at most 1 (1 is deep supervision).
    """

    pattern = r"geometric-(\d*\.?\d+(?:e-?\d+)?)"
    examples = ("geometric-0.5",)

    decay: float

    def _check(self) -> None:
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 < self.decay <= 1:
            raise ValueError(f"`decay` should be above 0 and at most 1. Found `decay = {self.decay!r}`.")
        object.__setattr__(self, "decay", float(self.decay))  # NumPy's numbers have other names

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Geometric:
        return cls(float(match[1]), **options)

    @property
    def name(self) -> str:
        return f"geometric-{self.decay!r}"

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        distance = torch.arange(num_stages)[:, None] - torch.arange(num_stages)[None, :]
        return torch.pow(torch.tensor(self.decay, dtype=torch.float64), distance.clamp(min=0)).tril()


def _check_size(size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1024:
        raise ValueError(
            f"`size`, the stages in a block, should be an integer from 1 to 1024. Found `size = {size!r}`."
        )


def _last_of_block(num_stages: int, size: int, first_border: int) -> list[int]:
    """Return the loss of every stage if blocks of stages end before ``first_border``, ``first_border + size``, ..."""
    # `(first_border - k - 1) % size` is the distance from stage k to the last stage of its block. Six stages, size 3, a border
    # before stage 2: distances 1 0 | 2 1 0 | 2, so the losses are 1 1 | 4 4 4 | 5, where the network ends.
    return [min(k + (first_border - k - 1) % size, num_stages - 1) for k in range(num_stages)]


@dataclass(frozen=True)
class Blocks(Strategy):
    """Disjoint groups of stages, each trained by its last loss ("1-wise double size" is ``Blocks(2)``).

    Args:
        size: stages in a block, at least 1; the last block may be smaller.

    >>> Blocks(2).credit(3).tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    pattern = r"blocks-(\d+)"
    examples = ("blocks-2",)

    size: int

    def _check(self) -> None:
        _check_size(self.size)

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Blocks:
        return cls(int(match[1]), **options)

    @property
    def name(self) -> str:
        return f"blocks-{self.size}"

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return _one_loss_each(_last_of_block(num_stages, self.size, self.size))


@dataclass(frozen=True)
class Rotating(Strategy):
    """Disjoint blocks whose borders move by one stage from turn to turn.

    The paper does not have this strategy. With ``size = 2`` every stage learns from its own and from the next loss in turn. In
    expectation this equals 2-wise-mean, at the work of end-to-end training.

        turn 0    [0 1] [2 3] [4 5]        turn 1    [0] [1 2] [3 4] [5]

    Args:
        size: stages in a block, at least 1; also the length of the cycle.
        every: the borders move with every ``"step"`` (default) or with every ``"microbatch"``.
    """

    pattern = r"rotating-(\d+)(-microbatch)?"
    examples = ("rotating-2", "rotating-2-microbatch")

    size: int
    every: Literal["step", "microbatch"] = "step"

    def _check(self) -> None:
        _check_size(self.size)
        if self.every not in ("step", "microbatch"):
            raise ValueError(f"`every` should be 'step' or 'microbatch'. Found {self.every!r}.")

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Rotating:
        return cls(int(match[1]), "microbatch" if match[2] else "step", **options)

    @property
    def name(self) -> str:
        return f"rotating-{self.size}" + ("-microbatch" if self.every == "microbatch" else "")

    @property
    def turns(self) -> int:
        return self.size

    def turn(self, step: int, microbatch: int) -> int:
        return (step + (microbatch if self.every == "microbatch" else 0)) % self.size

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        return _one_loss_each(_last_of_block(num_stages, self.size, self.size - turn % self.size))


def _as_lists(value: Any) -> Any:
    """Return nested lists of Python's numbers, each exactly the given one, whatever its dtype and layout."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Credit(Strategy):
    """A custom credit matrix.

    Args:
        matrix: ``[A, A]`` real numbers (nested lists, numpy or torch, of any dtype), zero above the diagonal;
            ``matrix[j][k]`` is the weight of loss ``j`` in the update of stage ``k``.

    >>> Credit([[1, 0], [0.5, 1]]).credit(2).tolist()
    [[1.0, 0.0], [0.5, 1.0]]
    """

    pattern = r"credit-([^@]+)"
    examples = ("credit-1,0;1,1",)

    matrix: Any

    def _check(self) -> None:
        try:
            rows = torch.tensor(_as_lists(self.matrix), dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"`matrix` should be rows of numbers, all of one length. Found {self.matrix!r}."
            ) from error
        if rows.ndim != 2 or rows.shape[0] != rows.shape[1] or rows.shape[0] == 0:
            raise ValueError(f"`matrix` should be square, one row per loss. Found shape {tuple(rows.shape)}.")
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("`matrix` should contain finite numbers. Found nan or infinity; use 0 for no credit.")
        if not bool(rows.any()):
            raise ValueError("`matrix` should give at least one stage credit. Found only zeros, which train nothing.")
        above = rows.triu(1).nonzero()
        if len(above):
            j, k = above[0].tolist()
            raise ValueError(
                "`matrix` should be zero above the diagonal, because loss j does not depend on later stages. "
                f"Found matrix[{j}][{k}] = {rows[j, k].item()}; set it to 0."
            )
        # A frozen value should be hashable, and tuples are.
        object.__setattr__(self, "matrix", tuple(map(tuple, rows.tolist())))

    @classmethod
    def from_match(cls, match: re.Match[str], **options: Any) -> Credit:
        try:
            matrix = [[float(value) for value in row.split(",")] for row in match[1].split(";")]
        except ValueError as error:
            raise ValueError(f"`credit-` should be followed by rows like 1,0;0.5,1. Found {match[1]!r}.") from error
        return cls(matrix, **options)

    @property
    def name(self) -> str:
        return "credit-" + ";".join(",".join(f"{value:.17g}" for value in row) for row in self.matrix)

    def credit(self, num_stages: int, turn: int = 0) -> Tensor:
        if num_stages != len(self.matrix):
            raise ValueError(
                f"`matrix` should have one row and column for each of the {num_stages} stages. Found {len(self.matrix)}."
            )
        return torch.tensor(self.matrix, dtype=torch.float64)
