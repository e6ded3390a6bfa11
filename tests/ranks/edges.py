"""What users do that is not the plain loop: each case runs in one process too, and gives the same."""

from __future__ import annotations

import copy
import gc
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nwise
from nets import ZOO
from nwise import exits
from nwise.app.recipes import recipe
from nwise.app.training import evaluate
from nwise.compression import named
from nwise.modes import evaluating
from nwise.training.clip import Clip
from nwise.training.nonfinite import NonFiniteGuard
from ranks import shapes
from ranks.common import RANK, batches, closed, digests, make_optimizer, network, pipeline, trained, write

A = 3
Case = Callable[[], Any]


def state(pipe: nwise.Pipeline) -> dict[str, Any]:
    """Digests of parameters and buffers."""
    buffers = {name: b.tolist() for name, b in pipe.named_buffers() if b.layout is torch.strided and b.numel()}
    return {**digests(pipe), **buffers}


def zoo(name: str, strategy: str, **options: Any) -> Any:
    """A network of the zoo: tuples of tensors, integers, batch norm, stages without parameters; sizes that change."""
    torch.manual_seed(0)
    net = ZOO[name](A)
    data = [net.draw(n) for n in (6, 6, 7, 6, 9, 9)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm under micro-batches
        pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, 2, seed=3, **options)
    trained(pipe, "sgd", data)
    return closed(pipe, state(pipe))


class Transposed(nn.Module):
    """Mixes another dimension than the last, so its output is not contiguous, as in an MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x.transpose(1, 2)).tanh().transpose(1, 2)
        return y


def transposed() -> Any:
    """Regression: messages arrived contiguous, and a sum in another order differs in the last bit."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(35, 3))
    stages = [*(Transposed() for _ in range(A - 1)), nn.Sequential(Transposed(), head)]
    heads = [copy.deepcopy(head) for _ in range(A - 1)]
    pipe = nwise.Pipeline(stages, heads, nn.functional.cross_entropy, "2-wise", 2)
    numbers = torch.Generator().manual_seed(3)
    data = [(torch.randn(4, 7, 5, generator=numbers), torch.randint(3, (4,), generator=numbers)) for _ in range(12)]
    trained(pipe, "adam", data)
    return closed(pipe, digests(pipe))


def evaluation_between() -> Any:
    """Scoring leaves training unchanged, and the scores are those of one process."""
    config = recipe("digits")
    _, test = config.load()
    torch.manual_seed(0)
    net = [
        nn.Sequential(nn.Flatten(), nn.Linear(64, 16)),
        nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.2)),
        nn.Linear(16, 10),
    ]
    heads = [nn.Linear(16, 10), nn.Linear(16, 10)]
    pipe = nwise.Pipeline(net, heads, nn.functional.cross_entropy, "2-wise", seed=0)
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(8, 64, generator=generator), torch.randint(0, 10, (8,), generator=generator)) for _ in range(6)
    ]
    scores = []
    for part in (data[:3], data[3:]):
        trained(pipe, "sgd", part)
        pipe.stages[0].eval()  # a mode that should come back
        found = evaluate(pipe, test, 100)
        scores.append([None if s is None else [s.loss, s.accuracy] for s in found.heads])
        assert not pipe.stages[0].training
        pipe.stages[0].train()
    with evaluating(pipe):
        output = pipe(data[0][0])
    there = A - 1 in pipe.processes.here
    assert (output is not None) == there
    return closed(pipe, {**state(pipe), "scores": scores})


def clipped(by: Any, pipe: nwise.Pipeline | None = None) -> Any:
    """Clipping by groups that lie on several ranks."""
    pipe = pipeline(A, "2-wise", 1) if pipe is None else pipe
    clip = Clip(pipe, 0.05, by)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for x, y in batches(5):
        pipe.step(x, target=y)
        clip()
        update.step()
        update.zero_grad()
    return closed(pipe, state(pipe))


def clipped_and_left_out() -> Any:
    """Both ask for the same groups of stages, of which those outside once knew nothing: they made other groups than the rest."""
    pipe = pipeline(A, "2-wise", 1)
    clip, finite = Clip(pipe, 0.05, "loss"), NonFiniteGuard(pipe, "skip")
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for i, (x, y) in enumerate(batches(5)):
        finite.remember()
        pipe.step(x * torch.inf if i == 2 else x, target=y)
        finite()
        clip()
        update.step()
        update.zero_grad()
    return closed(pipe, state(pipe))


def switched() -> Any:
    """Local first, then end-to-end without heads, with a new optimizer."""
    pipe = pipeline(A, "local", 2)
    update = make_optimizer("adam", pipe)
    for step, (x, y) in enumerate(batches(8)):
        if step == 4:
            pipe.strategy = "end-to-end"
            pipe.discard_heads()
            update = make_optimizer("sgd", pipe)
        pipe.step(x, target=y)
        update.step()
        update.zero_grad()
    return closed(pipe, state(pipe))


def frozen() -> Any:
    """A stage that learns nothing, and heads that only watch."""
    stages, heads = network(A)
    stages[1].requires_grad_(False)
    pipe = nwise.Pipeline(
        stages, heads, nn.functional.cross_entropy, nwise.NWise(2, heads="all"), 2, seed=0, schedule="phase"
    )
    trained(pipe, "sgd", batches(5))
    return closed(pipe, state(pipe))


def built_where_held() -> Any:
    """Functions that make modules are called only in the process that holds them."""
    made = []

    def stage(k: int) -> nn.Module:
        made.append(k)
        return nn.Linear(4, 4)

    pipe = nwise.Pipeline(
        [lambda k=k: stage(k) for k in range(A)],  # type: ignore[misc]
        [lambda k=k: stage(10 + k) for k in range(A - 1)],  # type: ignore[misc]
        nn.functional.mse_loss,
        "2-wise",
        seed=0,
    )
    if pipe.processes.size > 1:
        assert made == [RANK] + ([10 + RANK] if RANK < A - 1 else [])
        with pytest.raises(RuntimeError, match="should be called on rank"):
            pipe.stages[(RANK + 1) % A](torch.zeros(1, 4))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    trained(pipe, "sgd", [(x, x)] * 3)
    return closed(pipe, state(pipe))


def gives_its_parameter() -> Any:
    """What is on its way does not change with the next update, nor with a batch that is filled anew."""

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, self.weight

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return self.inner(x * weight)

    torch.manual_seed(0)
    stages = [Gives(), Takes(), nn.Linear(4, 4)]

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return self.inner(x * weight)

    pipe = nwise.Pipeline(stages, [Head(), nn.Linear(4, 4)], nn.functional.mse_loss, "local", seed=0)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    x = torch.empty(3, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        x.copy_(torch.randn(3, 4, generator=generator))
        pipe.step(x, target=torch.ones(3, 4))
        update.step()
        update.zero_grad()
    return closed(pipe, state(pipe))


def large_and_kept() -> Any:
    """Messages of 196,608 bytes, which no socket takes at once, and half of which a user keeps."""
    pipe = pipeline(A, "2-wise", 2)
    kept: dict[int, list[torch.Tensor]] = {k: [] for k in pipe.processes.here}

    def keep(stage: nn.Module, x: Any) -> None:
        for k, found in kept.items():
            if stage is pipe.stages[k]:  # no copy that the check makes
                found.append(x[0][::2])

    for k in kept:
        pipe.stages[k].register_forward_pre_hook(keep)
    trained(pipe, "sgd", batches(6, sizes=(16384,)))
    digest = {f"kept.{k}": [part.detach().double().sum().item() for part in found] for k, found in kept.items()}
    assert all(len(set(found)) == 12 for found in digest.values())
    return closed(pipe, {**state(pipe), **digest})


def hand_counted_bytes() -> Any:
    """3-wise over three stages, five samples of 6 float32 in two micro-batches: 120 bytes forward, and two messages of as
    much back over the upper boundary, one over the lower."""
    pipe = pipeline(A, "3-wise", 2)
    trained(pipe, "sgd", batches(3, sizes=(5,)))
    if pipe.processes.size > 1:
        sent = pipe.bytes_per_step
        assert sent == {0: [120, 0], 1: [120, 120], 2: [0, 120]}[RANK], sent
    return closed(pipe, state(pipe))


def drained_outside_autocast() -> Any:
    """Regression: the shapes of the last messages were those without autocast."""
    pipe = pipeline(A, "end-to-end-delay-1", 2)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for x, y in batches(3):
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, target=y)
        update.step()
        update.zero_grad()
    while pipe.drain():
        update.step()
        update.zero_grad()
    return closed(pipe, state(pipe))


def compressed_bytes() -> Any:
    """The same in int8: a byte a value, and four for the step of each sample."""
    pipe = pipeline(A, "3-wise", 2, compress=named("int8"))
    trained(pipe, "sgd", batches(3, sizes=(5,)))
    if pipe.processes.size > 1:
        sent = pipe.bytes_per_step
        assert sent == {0: [50, 0], 1: [50, 50], 2: [0, 50]}[RANK], sent
    return closed(pipe, state(pipe))


def refusals() -> Any:
    """What is wrong is said before any tensor is sent, the same on every rank; and the pipeline still works."""
    pipe = pipeline(A, "2-wise", 2)
    (x, y) = batches(1)[0]
    for arguments, message in (
        ((x[:1], y[:1]), "should be at most the 1 samples"),
        ((x, y[:3]), "should have the input's"),
    ):
        with pytest.raises(ValueError, match=message):
            pipe.step(arguments[0], target=arguments[1])
    trained(pipe, "sgd", [(x, y)])
    return closed(pipe, state(pipe))


def late_and_clipped() -> Any:
    """Clipping by one norm, and checks, where the updates of a step are of several mini-batches."""
    pipe = pipeline(A, "hogwild", 1)
    clip, finite = Clip(pipe, 0.05), NonFiniteGuard(pipe)
    update = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for x, y in batches(6):
        finite.remember()
        pipe.step(x, target=y)
        assert not finite()
        clip()
        update.step()
        update.zero_grad()
    return closed(pipe, state(pipe))


def late_and_evaluated() -> Any:
    """Gradients that are on their way during an evaluation, and while batches change their size, arrive all the same."""
    pipe = pipeline(A, "3-wise-mean-delay-2", 2)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches(9, sizes=(8, 8, 5, 8))):
        pipe.step(x, target=y)
        update.step()
        update.zero_grad()
        if i % 2:
            with torch.no_grad():
                pipe.head_outputs(x[:3])
        if i in (5, 8):
            while pipe.drain():
                update.step()
                update.zero_grad()
            pipe.num_microbatches = 3  # regression: the shapes of two micro-batches were looked up for the third
    return closed(pipe, state(pipe))


def named_and_answered() -> Any:
    """Inputs by name, compressed dictionaries between stages, forwards alone and exits."""
    torch.manual_seed(0)
    net = ZOO["names"](A)
    net.stages[-1] = copy.deepcopy(net.heads[-1]) or nn.Identity()  # its output is logits, which an exit needs
    for stage in net.stages:  # regression: with several processes an error, because such a tensor has no storage
        stage.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "2-wise", 2, seed=3, compress="bf16")
    optimizer = make_optimizer("sgd", pipe)
    x, y = net.draw(6)
    for _ in range(2):
        pipe.step({"x": x}, target=y)
        optimizer.step()
        optimizer.zero_grad()
    answers = exits.exit(pipe, x=x, threshold=0.35, confidence="classes")
    with evaluating(pipe):
        output = pipe(x=x)
    everything = exits.exit(pipe, {"x": x}, threshold=float("inf"), confidence="classes").output
    assert output is None or torch.equal(output, everything)
    return closed(pipe, {**state(pipe), "answers": [answers.stage.tolist(), answers.output.tolist()]})


def answered_early() -> Any:
    """Samples leave at different depths, all of them at stage 0 or none, and training goes on as if nobody had asked."""
    pipe = pipeline(A, "2-wise", 1)
    data = batches(3)
    trained(pipe, "sgd", data)
    answers = {}
    for threshold in (0.0, 0.3, 1.0):
        result = exits.exit(pipe, data[0][0], threshold=threshold)
        answers[str(threshold)] = [result.stage.tolist(), result.output.tolist(), result.confidence.tolist()]
    trained(pipe, "sgd", data)
    return closed(pipe, {**state(pipe), "answers": answers})


def leaves_nothing() -> Any:
    """What is closed and dropped takes its model and its groups along; the hook for errors that nobody catches once kept them."""

    def groups() -> int:
        return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0

    before = groups()
    pipe = pipeline(A, "2-wise", 1)
    trained(pipe, "sgd", batches(2))
    kept = weakref.ref(next(iter(pipe.parameters())))
    closed(pipe, None)
    del pipe
    gc.collect()
    assert kept() is None
    assert groups() == before
    return {}


CASES: dict[str, Case] = {
    "tuples": lambda: zoo("tuples", "2-wise-mean"),
    "tokens": lambda: zoo("tokens", "2-wise"),
    "names": lambda: zoo("names", "2-wise-mean"),
    "batch norm": lambda: zoo("convolutional", "end-to-end"),
    "without parameters": lambda: zoo("some_without_parameters", "2-wise"),
    "recomputed": lambda: zoo("perceptron", "3-wise", recompute=True),
    "named and answered": named_and_answered,
    "skips": lambda: zoo("unet", "2-wise-mean-delay-1"),
    "transposed": transposed,
    "evaluation between": evaluation_between,
    "clipped globally": lambda: clipped("global"),
    "clipped by stage": lambda: clipped("stage"),
    "clipped by loss": lambda: clipped("loss"),
    "clipped and left out": clipped_and_left_out,
    "switched": switched,
    "frozen": frozen,
    "built where held": built_where_held,
    "gives its parameter": gives_its_parameter,
    "large and kept": large_and_kept,
    "hand-counted bytes": hand_counted_bytes,
    "compressed to bytes": compressed_bytes,
    "compressed tuples": lambda: zoo("tuples", "2-wise-mean", compress="bf16"),
    "compressed": lambda: zoo("tokens", "end-to-end-delay-1", compress=named("top-20%")),
    "drained outside autocast": drained_outside_autocast,
    "refusals": refusals,
    "late and clipped": late_and_clipped,
    "late and evaluated": late_and_evaluated,
    "answered early": answered_early,
    "leaves nothing": leaves_nothing,
    **shapes.CASES,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        print(name, file=sys.stderr, flush=True)
        found[name] = case()
    write(found)
