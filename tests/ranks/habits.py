"""What a script does under torchrun as in one process: calls of one rank that need no other, copies, averages,
torch's clipping. Every rank writes what it was told."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.checkpoint import gather_weights
from nwise.checkpoint.weights import under
from ranks.common import RANK, batches, write


def told(action: Callable[[], Any]) -> str:
    """Warnings and errors of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except (RuntimeError, ValueError) as found:
            return f"{type(found).__name__}: {found}"
    return " ".join(str(one.message) for one in caught)


def network() -> tuple[nn.Sequential, list[nn.Module]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    return model, [nn.Linear(5, 4).double()]


def pipeline(model: nn.Sequential, heads: list[nn.Module], **options: Any) -> nwise.Pipeline:
    return nwise.Pipeline(nwise.split(model, at=["2"]), heads, strategy="2-wise-mean", **options)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in batches(count)]


def clipped(
    clip: Callable[[nwise.Pipeline], Any], count: int = 4, *, set_to_none: bool = True
) -> tuple[nwise.Pipeline, nn.Sequential]:
    """Train with a way of clipping."""
    model, heads = network()
    pipe = pipeline(model, heads, seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for x, y in data(count):
        pipe.step(x, target=y)
        clip(pipe)
        update.step()
        update.zero_grad(set_to_none)
    return pipe, model


def plateau(count: int = 10) -> None:
    """Train with a rate that follows the last loss, which one rank has."""
    pipe = pipeline(*network(), seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(update, patience=1)
    for x, y in data(1) * count:
        losses = pipe.step(x, target=y)
        update.step()
        update.zero_grad()
        scheduler.step(losses.last)
    pipe.close()


def skipping(count: int = 4) -> None:
    """Train, and leave out the update after a last loss that is not finite."""
    pipe = pipeline(*network(), seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.01)
    for x, y in data(1) * count:
        if pipe.step(x, target=y).last.isfinite():
            update.step()
        update.zero_grad()
    pipe.close()


class Normed(torch.optim.Optimizer):
    """Divides by the norm of all gradients that it has."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        graded = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.total(sum(p.grad.square().sum() for p in graded)).sqrt()
        for p in graded:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])

    def total(self, square: Any) -> Tensor:
        return torch.as_tensor(square)


class Summing(Normed):
    """Divides by the norm of the gradients of all processes."""

    def total(self, square: Any) -> Tensor:
        torch.distributed.all_reduce(square)
        return super().total(square)


def updated(kind: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> list[Any]:
    """Train twice with an optimizer; it is made anew, and tried, after steps at which nothing else is looked at."""
    pipe = pipeline(*network(), seed=0)
    for x, y in data(5):
        pipe.step(x, target=y)
        pipe.zero_grad()
    pipe.step(x, target=y)
    optimizer = kind(pipe.parameters())
    said = [told(optimizer.step), told(optimizer.step)]
    pipe.close()
    return said


def unscaled(pipe: nwise.Pipeline) -> None:
    """Divide all gradients by the same number, as a `GradScaler` does, and clip each value."""
    for p in pipe.parameters():
        if p.grad is not None:
            p.grad /= 3
    nn.utils.clip_grad_value_(pipe.parameters(), 1e-3)


def averaged() -> dict[str, Any]:
    """Average the pipeline over three updates."""
    model, heads = network()
    pipe = pipeline(model, heads, seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    average = torch.optim.swa_utils.AveragedModel(pipe)
    for x, y in data(3):
        pipe.step(x, target=y)
        update.step()
        update.zero_grad()
        average.update_parameters(pipe)
    pipe.load_state_dict(average.module.state_dict())
    values = {name: tensor.tolist() for name, tensor in sorted(gather_weights(pipe).items())}
    pipe.close()
    return values


def main() -> dict[str, Any]:
    """Ask everything of a trained pipeline."""
    found: dict[str, Any] = {}
    found["clipped by torch"] = told(
        lambda: clipped(lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters(), 0.05))[0].close()
    )
    found["clipped, then set to zero"] = told(
        lambda: clipped(lambda pipe: nn.utils.clip_grad_norm_(pipe.parameters(), 0.05), set_to_none=False)[0].close()
    )
    found["plateau"], found["skipped"] = told(plateau), told(skipping)
    found["mixed"], found["mixed alike"], found["apart"] = map(updated, (Normed, Summing, torch.optim.SGD))
    found["scaled alike"] = told(lambda: clipped(unscaled)[0].close())
    norms: list[float] = []
    pipe, model = clipped(lambda pipe: norms.append(float(nwise.clip_grad_norm_(pipe, 0.05))))
    found["average"] = averaged()
    found["norms"], x = norms, data(1)[0][0]
    alone = RANK == 0  # what follows needs no other rank
    if alone:
        found["summary"], found["local"] = (
            pipe.summary(),
            [sorted(pipe.needed_heads()), pipe.credit.tolist(), str(pipe)],
        )
        found["averaged"] = told(lambda: torch.optim.swa_utils.AveragedModel(pipe).update_parameters(pipe))
    for name, make in (("copied", copy.deepcopy), ("pickled", lambda pipe: pickle.loads(pickle.dumps(pipe)))):
        twin: nwise.Pipeline = make(pipe)  # type: ignore[no-untyped-call]
        same = zip(pipe.state_dict().items(), twin.state_dict().items(), strict=True)
        here = pipe.processes.here[0]
        hidden = x if here == 0 else torch.ones(2, 5, dtype=torch.float64)
        assert torch.equal(twin.stages[here](hidden), pipe.stages[here](hidden))
        found[name] = [
            all(a == b and torch.equal(s, t) for (a, s), (b, t) in same),
            twin.summary() == pipe.summary(),
            told(lambda twin=twin: twin.step(x, target=data(1)[0][1])),  # type: ignore[misc]
            told(lambda twin=twin: twin(x)),  # type: ignore[misc]
        ]
    weights = gather_weights(pipe)
    if alone:
        model.load_state_dict(under(weights, "model."))
        found["after gathering"] = model(x).tolist()
    pipe.close()
    torch.seed()
    fresh, heads = network()
    torch.seed()
    found["seed"] = told(lambda: pipeline(fresh, heads))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(main())
