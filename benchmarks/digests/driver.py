"""What one checkout of nwise computes, as digests by name: a part of `benchmarks.digests`, which runs it in two checkouts.

    python driver.py PART OUT     writes OUT-<rank>.json; PART is `alone`, `ranks` (under torchrun) or `orders`

It calls what has stayed the same since 8ac1ede2, and adapts what has not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import nwise
from nwise.checkpoint import Checkpoints
from nwise.flow import flows_for
from nwise.schedule import Costs, best
from nwise.schedule.ages import strategy_ages
from nwise.schedule.named import RULES, choose

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS, WIDTH = 5, 6
STRATEGIES = (
    "local", "2-wise", "3-wise-mean", "end-to-end", "deep-supervision", "geometric-0.5", "blocks-2", "rotating-2",
    "rotating-2-microbatch", "end-to-end-delay-1", "2-wise-delay-2", "rotating-2-delay-1", "hogwild", "2-wise-hogwild",
    "hogwild-forward", "hogwild-forward-least",
)  # fmt: skip
VARIANTS = (
    "recompute",
    "recompute, batch norm",
    "autocast",
    "batch norm",
    "deferred",
    "frozen",
    "names",
    "inject",
    "shared head",
    "bf16 messages",
)
PLACEMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "contiguous": lambda size: tuple(k * SIZE // size for k in range(size)),
    "interleaved": lambda size: tuple(k % SIZE for k in range(size)),
    "v": lambda size: tuple(min(k % (2 * SIZE), 2 * SIZE - 1 - k % (2 * SIZE)) for k in range(size)),
}


class Named(nn.Module):
    """A stage that hands its output on by name, with a mask of whole numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"x": self.inner(x), "mask": torch.ones(len(x), dtype=torch.long) if mask is None else mask}


class Unnamed(nn.Module):
    """A head or last stage that takes what `Named` returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.inner(x) * mask[:, None]
        return result


class Balanced(nn.Module):
    """A stage with an auxiliary loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.router = inner, nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return nwise.inject(self.inner(x), 0.1 * self.router(x).softmax(1).square().sum(1).mean())


def network(num_stages: int, variant: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return stages and heads with dropout; the variant says what else they have."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(WIDTH) if "batch norm" in variant or variant == "deferred" else nn.LayerNorm(WIDTH)

    def stage() -> nn.Module:
        fresh = type(norm)(WIDTH)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), fresh, nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    stages: list[nn.Module] = [stage() for _ in range(num_stages - 1)]
    stages.append(nn.Sequential(stage(), nn.Linear(WIDTH, 4)))
    heads: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 4)) for _ in range(num_stages - 1)
    ]
    if variant == "inject":
        stages[:-1] = [Balanced(one) for one in stages[:-1]]
    elif variant == "names":
        stages[:-1] = [Named(one) for one in stages[:-1]]
        stages[-1], heads = Unnamed(stages[-1]), [Unnamed(one) for one in heads]
    elif variant == "shared head":
        heads = [heads[0]] * (num_stages - 1)
    elif variant == "frozen":
        stages[num_stages // 2].requires_grad_(False)
    return stages, heads


def make(strategy: str, num_stages: int, m: int, variant: str, **options: Any) -> nwise.Pipeline:
    """Return a pipeline of `network`."""
    stages, heads = network(num_stages, variant)
    options |= {"recompute": "recompute" in variant} | ({"compress": "bf16"} if variant == "bf16 messages" else {})
    pipe = nwise.Pipeline(stages, heads, nn.functional.cross_entropy, strategy, m, seed=0, **options)
    return nwise.defer_batchnorm(pipe) if variant == "deferred" else pipe


def digest(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """Return the hash of every bit of tensors and of their names."""
    code = hashlib.sha256()
    for name, x in named:
        dense = None if x is None else x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        code.update(repr((name, None if x is None else list(x.shape))).encode() + (dense or b""))
    return code.hexdigest()[:16]


def random_state() -> str:
    """Return the hash of the states of all global generators."""
    states = torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()  # noqa: NPY002
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


def batches(sizes: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over batches of these sizes."""
    draws = torch.Generator().manual_seed(1)
    for size in sizes:
        yield torch.randn(size, WIDTH, generator=draws), torch.randint(0, 4, (size,), generator=draws)


def train(pipe: nwise.Pipeline, sizes: Iterable[int], variant: str = "", resume: Path | None = None) -> dict[str, str]:
    """Train, and drain; return the digests. With `resume`, save after three steps, and go on from the file."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, list[str]] = {"grads": [], "losses": [], "buffers": [], "weights": [], "random": []}

    def note(losses: Tensor | None = None) -> None:
        found["grads"].append(digest((name, p.grad) for name, p in sorted(pipe.named_parameters())))
        found["losses"].append("" if losses is None else digest([("", torch.as_tensor(losses).as_subclass(Tensor))]))
        found["buffers"].append(digest(sorted(pipe.named_buffers())))
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(digest(sorted(pipe.named_parameters())))
        found["random"].append(random_state())

    for i, (x, y) in enumerate(batches(sizes)):
        if resume is not None and i == 3:
            Checkpoints(resume, pipe, optimizer).save()
            copy = make(pipe.strategy.name, pipe.num_stages, pipe.num_microbatches, variant)
            pipe.close()
            pipe, optimizer = copy, torch.optim.SGD(copy.parameters(), lr=0.1, momentum=0.9)
            Checkpoints(resume, pipe, optimizer).resume()
        with torch.autocast("cpu", torch.bfloat16, enabled=variant == "autocast"):
            note(pipe.step(x, target=y))
    while pipe.drain():
        note()
    pipe.close()
    return {kind: " ".join(values) for kind, values in found.items()}


def alone() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Iterate over the cells of one process."""
    for strategy, order, (a, m) in itertools.product(
        STRATEGIES, ("depth-first", "gpipe", "zero-bubble"), ((4, 1), (4, 3), (2, 2), (8, 3))
    ):
        sizes = [7, 7, 7, 5, 7]
        name = f"{strategy}, {order}, A = {a}, M = {m}"
        yield name, lambda s=strategy, o=order, a=a, m=m, b=sizes: train(make(s, a, m, "", schedule=o), b)  # type: ignore[misc]
    for strategy, variant, order in itertools.product(STRATEGIES, VARIANTS, ("depth-first", "zero-bubble")):
        name = f"{strategy}, {variant}, {order}"
        yield name, lambda s=strategy, v=variant, o=order: train(make(s, 4, 2, v, schedule=o), [8] * 5, v)  # type: ignore[misc]
    for strategy, variant in itertools.product(STRATEGIES, ("", "batch norm")):
        yield f"{strategy}, {variant or 'plain'}, resumed", lambda s=strategy, v=variant: _resumed(s, v)  # type: ignore[misc]


def ranks() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Iterate over the cells of several processes."""
    every = itertools.product(STRATEGIES, PLACEMENTS, (1, 3), ("best", "zero-bubble"), ("", "deferred", "names"))
    for i, (strategy, placement, m, order, variant) in enumerate(every):
        late = "delay" in strategy or "hogwild" in strategy
        if (late and order != "best") or (variant and i % 5):
            continue
        size = 2 * SIZE
        options = {"placement": PLACEMENTS[placement](size), "schedule": order}
        name = f"{strategy}, {placement}, M = {m}, {order}, {variant or 'plain'}"
        yield name, lambda s=strategy, m=m, v=variant, o=options: train(make(s, 2 * SIZE, m, v, **o), [8, 8, 6, 8, 8])  # type: ignore[misc]
    if SIZE == 4:
        for strategy, m, variant in itertools.product(
            STRATEGIES, (1, 2), ("", "deferred", "recompute", "bf16 messages")
        ):
            if variant == "recompute" and strategy.endswith("hogwild"):
                continue  # refused, which ends a job of several processes; the part of one process has these rows
            name = f"{strategy}, two replicas, M = {m}, {variant or 'plain'}"
            yield name, lambda s=strategy, m=m, v=variant: train(make(s, 2, m, v), [8, 8, 9, 8, 8])  # type: ignore[misc]


def _resumed(strategy: str, variant: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return train(make(strategy, 4, 2, variant), [8] * 5, variant, Path(folder))


def orders() -> Iterator[tuple[str, Callable[[], dict[str, str]]]]:
    """Iterate over schedules: the lists of every order by name, and periods and bounds of the best."""

    def lists(order: str, strategy: str, a: int, m: int, ranks: int) -> dict[str, str]:
        rule = nwise.strategy(strategy)
        flows = flows_for(rule, a, m)
        schedule = choose(order, flows, tuple(k * ranks // a for k in range(a)), strategy_ages(rule, flows))
        text = repr([[str(action) for action in actions] for actions in schedule.actions])
        # Schedules without costs of their own are timed by a function.
        costs = Costs(1, 0.25, 1, 1, latency=0.05)
        priced = (
            schedule.with_costs(costs) if hasattr(schedule, "with_costs") else nwise.schedule.timed(schedule, costs)
        )
        digest = {"lists": hashlib.sha256(text.encode()).hexdigest()[:16]} if order != "best" else {}
        return digest | {"period": f"{priced.period:.9g}"}

    def period(seed: int) -> dict[str, str]:
        draw = random.Random(seed)
        a, m, strategy = draw.randint(2, 16), draw.randint(1, 8), draw.choice(STRATEGIES[:7])
        slow = [draw.uniform(0.6, 1.6) for _ in range(a)] if seed % 2 else [1.0] * a
        costs = Costs(slow, [0.3 * f for f in slow], slow, slow, latency=draw.choice((0, 0.05, 1)))
        found = best(strategy, num_stages=a, num_microbatches=m, costs=costs)
        return {"best": f"{found.period:.9g}", "bound": f"{found.lower_bound:.9g}"}

    for order, strategy, (a, m), ranks in itertools.product(
        ("best", *RULES), STRATEGIES, ((4, 1), (4, 4), (8, 3)), (1, 2, 4)
    ):
        name = f"{order}, {strategy}, A = {a}, M = {m}, {ranks} ranks"
        yield name, lambda o=order, s=strategy, a=a, m=m, r=ranks: lists(o, s, a, m, r)  # type: ignore[misc]
    for seed in range(int(os.environ.get("DIGESTS_PROBLEMS", "200"))):
        yield f"problem {seed}", lambda seed=seed: period(seed)  # type: ignore[misc]


def main(part: str, out: str) -> None:
    """Compute every cell of a part, and write the digests of this rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    only, results = os.environ.get("DIGESTS_ONLY", ""), {}
    for name, run in {"alone": alone, "ranks": ranks, "orders": orders}[part]():
        if only not in name:
            continue
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        try:
            results[name] = run()
        except (ValueError, TypeError) as error:
            if SIZE > 1:
                raise
            results[name] = {"refused": str(error)}
        if RANK == 0 and sys.stderr.isatty():
            print(f"\r{len(results)} {name:80.80}", end="", file=sys.stderr)
    Path(f"{out}-{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
