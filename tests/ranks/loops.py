"""What a loop does under torchrun as in one process: calls of one rank that need no other, copies, averages, norms."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
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


def clipped(clip: Callable[[nwise.Pipeline], Any], count: int = 4) -> tuple[nwise.Pipeline, nn.Sequential]:
    """Train with a way of clipping."""
    model, heads = network()
    pipe = pipeline(model, heads, seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for x, y in data(count):
        pipe.step(x, target=y)
        clip(pipe)
        update.step()
        update.zero_grad()
    return pipe, model


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


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def gathered() -> dict[str, Any]:
    """Losses of every step and scores on all ranks, with one optimizer of groups and one of heads alone."""
    model, heads = network()
    pipe = pipeline(model, heads, seed=0)
    network_only = torch.optim.SGD(pipe.groups(network={"lr": 0.5}, no_decay=lambda name, p: p.dim() < 2))
    heads_only = torch.optim.AdamW(pipe.groups(heads={"lr": 0.1}))
    losses = []
    for x, y in data(4):
        losses.append(pipe.gather(pipe.step(x, target=y)).tolist())
        for update in (network_only, heads_only):
            update.step()
            update.zero_grad()
    found = {"losses": losses, "scores": pipe.score(data(3), right).tolist(), "here": pipe.here}
    pipe.close()
    return found


def main() -> dict[str, Any]:
    """Ask everything of a trained pipeline."""
    found: dict[str, Any] = {}
    norms: list[float] = []
    pipe, model = clipped(lambda pipe: norms.append(float(nwise.clip_grad_norm_(pipe, 0.05))))
    found["average"] = averaged()
    found["gathered"] = gathered()
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
