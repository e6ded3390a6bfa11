"""Scores of the last head, of every head, and of ensembles of the top n heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nwise._modes import evaluating
from nwise.data import Images, Tokens
from nwise.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Score:
    """Mean cross-entropy in nats and share of correct answers, over samples or tokens."""

    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a test set.

    Args:
        heads: one score per stage's head; None if there is no head or the strategy does not train it. The last is the
            network's own output.
        ensembles: entry n - 1 is the score of the mean probabilities of the last n heads; empty unless requested.
    """

    heads: tuple[Score | None, ...]
    ensembles: tuple[Score, ...] = ()


def evaluate(
    pipe: Pipeline,
    data: Images | Tokens,
    batch_size: int,
    *,
    ensembles: bool = False,
    on_batch: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score every trained head on a whole test set.

    Args:
        pipe: a pipeline whose heads and last stage return logits ``[B, ..., classes]``.
        data: the test set.
        batch_size: samples per batch.
        ensembles: whether to score the ensembles, too; default no.
        on_batch: called after each batch with the number of batches done and of all batches.

    Raises:
        ValueError: ensembles are requested on several processes.
    """
    sums: dict[tuple[str, int], Tensor] = {}
    device = next((p.device for p in pipe.parameters()), torch.device("cpu"))
    starts = range(0, len(data), batch_size)
    scored = pipe.needed_heads(later=False) | {pipe.num_stages - 1}
    if ensembles and pipe.processes.size > 1:
        raise ValueError(
            "Ensembles should be scored in one process, which has all heads' outputs. Found several; use `nwise evaluate RUN`."
        )
    with evaluating(pipe):
        for done, start in enumerate(starts):
            inputs, target = data.batch(torch.arange(start, min(start + batch_size, len(data))))
            outputs = pipe.head_outputs(inputs.to(device), only=scored)
            target = target.to(device).flatten()
            top: Tensor | None = None
            count = 0
            for k in reversed(range(pipe.num_stages)):
                logits = outputs[k]
                if not isinstance(logits, Tensor):
                    continue
                log_p = functional.log_softmax(logits.flatten(0, -2).float(), dim=-1)
                _add(sums, ("head", k), log_p, target)
                if ensembles:
                    count += 1
                    top = log_p if top is None else torch.logaddexp(top, log_p)
                    _add(sums, ("top", count), top - math.log(count), target)
            if on_batch is not None:
                on_batch(done + 1, len(starts))
    _share(pipe, sums)
    heads = tuple(_score(sums[key]) if (key := ("head", k)) in sums else None for k in range(pipe.num_stages))
    tops = tuple(_score(sums["top", n]) for n in range(1, pipe.num_stages + 1) if ("top", n) in sums)
    return Scores(heads, tops)


def _add(sums: dict[tuple[str, int], Tensor], key: tuple[str, int], log_p: Tensor, target: Tensor) -> None:
    loss = functional.nll_loss(log_p, target, reduction="sum")
    right = (log_p.argmax(-1) == target).sum()
    counts = torch.stack([loss.double(), right.double(), torch.tensor(float(len(target)), device=loss.device).double()])
    sums[key] = sums[key] + counts if key in sums else counts


def _share(pipe: Pipeline, sums: dict[tuple[str, int], Tensor]) -> None:
    """Send every process's sums to all processes."""
    here = {k: sums.get(("head", k), torch.zeros(3)).cpu().double() for k in pipe.processes.here}
    for k, total in enumerate(pipe.processes.table(here)):
        if total[2]:
            sums["head", k] = total


def _score(total: Tensor) -> Score:
    loss, right, count = total.tolist()
    return Score(loss / count, right / count)
