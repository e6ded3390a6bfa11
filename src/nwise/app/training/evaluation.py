"""Scores of the last head, of every head, and of ensembles of the top n heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nwise.app.data import Images, Tokens, batches
from nwise.losses import AT_ONCE, logits_of
from nwise.modes import evaluating
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
        pipe: a pipeline whose heads and last stage return logits ``[B, ..., classes]``, or their factors.
        data: the test set.
        batch_size: number of samples in a batch.
        ensembles: whether to score the ensembles, too.
        on_batch: called after each batch with the number of batches done and of all batches.

    Raises:
        ValueError: ensembles are requested on several processes.
    """
    if ensembles and pipe.processes.size > 1:
        raise ValueError(
            "Ensembles should be scored in one process, which has all heads' outputs. Found several; use `nwise evaluate RUN`."
        )
    scored = pipe.needed_heads() | {pipe.num_stages - 1}
    # For every head, and for the top n heads: the sum of the losses, the number of right answers, and that of all answers.
    heads, tops = torch.zeros(2, pipe.num_stages, 3, dtype=torch.float64, device=_device(pipe))
    with evaluating(pipe):
        for outputs, target in head_outputs(pipe, data, batch_size, scored, on_batch):
            answers = target.flatten()
            here = [k for k in scored if outputs[k] is not None]
            for some in slices(len(answers), [outputs[k] for k in here]):
                top: Tensor | None = None
                for count, k in enumerate(sorted(here, reverse=True), start=1):
                    log_p = functional.log_softmax(logits_of(outputs[k], some).float(), dim=-1)
                    heads[k] += _sums(log_p, answers[some])
                    if ensembles:
                        top = log_p if top is None else torch.logaddexp(top, log_p)
                        tops[count - 1] += _sums(top - math.log(count), answers[some])
    everywhere = pipe.processes.table({k: heads[k].cpu() for k in pipe.processes.here})
    return Scores(tuple(map(_score, everywhere)), tuple(filter(None, map(_score, tops))))


def head_outputs(
    pipe: Pipeline,
    data: Images | Tokens,
    batch_size: int,
    heads: Collection[int],
    on_batch: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[list[Any], Tensor]]:
    """Yield for each batch of a data set the outputs of some heads, by stage, and the target, on the pipeline's device."""
    device = _device(pipe)
    rows = torch.arange(len(data)).split(batch_size)
    for done, (inputs, target) in enumerate(batches(data, ((some, None) for some in rows)), start=1):
        yield pipe.head_outputs(inputs.to(device), only=heads), target.to(device)
        if on_batch is not None:
            on_batch(done, len(rows))


def slices(num_tokens: int, outputs: Sequence[Any]) -> Iterator[slice]:
    """Cut the samples or tokens so that the logits of outputs that are factors do not take too much memory; else not at all."""
    sizes = [len(output[1]) for output in outputs if isinstance(output, tuple)]
    step = AT_ONCE // max(sizes) if sizes else num_tokens
    return (slice(start, start + step) for start in range(0, num_tokens, step))


def _device(pipe: Pipeline) -> torch.device:
    return next((p.device for p in pipe.parameters()), torch.device("cpu"))


def _sums(log_p: Tensor, target: Tensor) -> Tensor:
    """Return the sum of the losses, the number of right answers, and that of all answers; -100, behind a sentence, is none."""
    loss = functional.nll_loss(log_p, target, reduction="sum")
    right = (log_p.argmax(-1) == target).sum()
    count = (target >= 0).sum()
    return torch.stack([loss.double(), right.double(), count.double()])


def _score(sums: Tensor) -> Score | None:
    loss, right, count = sums.tolist()
    return Score(loss / count, right / count) if count else None
