"""The check of the first step: what breaks the contract is told, by stage, and nothing else is."""

from __future__ import annotations

import copy
import random
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import nwise
from breaking import KINDS, SETTINGS, TENSORS, WIDTH, Reentrant, X, Y
from launch import results
from nets import ZOO
from nwise.findings import (
    AGAIN,
    BUFFERS,
    ERRORS,
    IDLE,
    LOSS,
    NOTHING,
    OUTSIDE,
    REPLICAS,
    SAMPLES,
    STEP,
    WARNINGS,
    WRITTEN,
    Finding,
)
from ranks import checked
from test_contract import assert_same, gradients
from test_microbatch import Do

pytestmark = pytest.mark.usefixtures("float64")

ROOT = Path(__file__).parents[1]


def pipeline(stage: nn.Module, place: int = 1, **setting: Any) -> nwise.Pipeline:
    net: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    net[place] = stage
    heads = None if setting["strategy"] == "end-to-end" else [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm with micro-batches
        return nwise.Pipeline(net, heads, **setting)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", KINDS)
def test_a_stage_that_breaks_the_contract_is_named(name: str, setting: str) -> None:
    pipe = pipeline(TENSORS[name](), **SETTINGS[setting])
    expected = KINDS[name][list(SETTINGS).index(setting)]
    if expected == "raises":
        with pytest.raises((RuntimeError, AssertionError, TypeError, AttributeError)):
            nwise.check(pipe, X, target=Y)
        return
    report = nwise.check(pipe, X, target=Y)
    assert [one.kind for one in report.findings] == ([] if expected is None else [expected]), report
    assert all(
        re.search(r"(stage |stages\.|heads\.|loss )1\b", where) for one in report.findings for where in one.where
    ), report
    assert not report.notes
    if expected is None and pipe.strategy.name == "end-to-end" and name not in RANDOM:
        pipe.step(X, target=Y)
        assert_same(gradients(pipe), plain(pipe), 1e-12)


RANDOM = ("Python's numbers", "NumPy's numbers", "dropout", "injects")  # the last is not in parts what it is as a whole


def plain(pipe: nwise.Pipeline) -> dict[str, Tensor]:
    """The gradients of a `backward` for each micro-batch."""
    twin = copy.deepcopy(nn.Sequential(*pipe.stages))
    twin.zero_grad()
    for x, y in zip(X.chunk(pipe.num_microbatches), Y.chunk(pipe.num_microbatches), strict=True):
        (functional.cross_entropy(twin(x), y) / pipe.num_microbatches).backward()
    return {f"stages.{name}": p.grad for name, p in twin.named_parameters() if p.grad is not None}


FAULTS = [name for name, kinds in KINDS.items() if kinds[3] in (STEP, SAMPLES, OUTSIDE, NOTHING, BUFFERS)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FAULTS), st.integers(0, 2), st.sampled_from(["2-wise-mean", "3-wise-mean"]), st.integers(2, 4))
def test_a_faulty_stage_is_named_wherever_it_is(name: str, place: int, strategy: str, m: int) -> None:
    """Stage 0 has one pass, and the last one B alone, so what only a second walk breaks is right there."""
    if place == 2:
        net = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sequential(TENSORS[name](), nn.Linear(WIDTH, 3))]
        pipe = nwise.Pipeline(net, [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)], strategy=strategy, num_microbatches=m)
    else:
        pipe = pipeline(TENSORS[name](), place, strategy=strategy, num_microbatches=m)
    report = nwise.check(pipe, X, target=Y)
    told = {one.kind for one in report.findings}
    assert told <= {KINDS[name][3], SAMPLES}, report
    assert told or place != 1, report
    named = [where for one in report.findings for where in one.where]
    assert all(re.search(rf"(stage |stages\.|heads\.|loss ){place}\b", where) for where in named), report


def test_the_first_step_raises_and_is_undone() -> None:
    pipe = pipeline(TENSORS["adds a gradient"](), strategy="2-wise-mean")
    message = (
        r"nwise.check: 1 difference .* \(2-wise-mean, M = 1; .* steps\)\.\n  1. error: step != plain .*: stages.1.\w+ "
    )
    for _ in range(2):  # the second is the first again
        with pytest.raises(nwise.ContractError, match=message):
            pipe.step(X, target=Y)
        assert all(p.grad is None for p in pipe.parameters())
        assert pipe.steps == 0
    pipeline(TENSORS["adds a gradient"](), strategy="2-wise-mean", checks="never").step(X, target=Y)  # it says so
    with pytest.raises(
        ValueError, match="`checks` should be 'first' or 'never'. Found 'always'; to check at any other time"
    ):
        pipeline(nn.Linear(WIDTH, WIDTH), strategy="2-wise", checks="always")


def test_what_only_the_cut_changes_warns_in_the_first_step() -> None:
    pipe = pipeline(TENSORS["mixes samples"](), strategy="end-to-end", num_microbatches=2)
    with pytest.warns(
        UserWarning, match=r"both at once, samples: output 0 of stage 1. Samples .* \(docs/contract.md, 4, 8\)"
    ) as told:
        pipe.step(X, target=Y)
    assert len(told) == 1
    pipe.step(X, target=Y)


class Penalised(nn.Module):
    """A loss that uses a weight of the network."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weights = [weight]

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + self.weights[0].square().sum()


class Ignoring(nn.Module):
    """A mean over the targets that are not 0; `counted` says so."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, ignore_index=0)


class Counted(Ignoring):
    def count(self, target: Tensor) -> Tensor:
        return (target != 0).sum()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (Ignoring(), LOSS),
        (Counted(), None),
        (lambda out, y: functional.cross_entropy(out, y, reduction="sum"), LOSS),
        (lambda out, y: functional.cross_entropy(out, y) + out.mean(0).square().sum(), LOSS),
        (nn.CrossEntropyLoss(ignore_index=2), None),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)), None),
        (functional.cross_entropy, None),
    ],
)
@pytest.mark.parametrize("m", [2, 4])
def test_losses_that_are_no_means_are_named(loss: Any, kind: str | None, m: int) -> None:
    """Regression: `ignore_index` of a loss of the user's was overlooked where its samples are uneven."""
    pipe = nwise.Pipeline([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)], None, loss, "end-to-end", m)
    report = nwise.check(pipe, X, target=Y)
    assert [one.kind for one in report.findings] == ([] if kind is None else [kind]), report
    assert kind is None or re.match(r"loss 1, [\d.]+ whole and [\d.]+ in parts", report.findings[0].where[0])


def test_tensors_from_outside_are_told_in_losses_too() -> None:
    net = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(net, None, Penalised(net[0].weight), "end-to-end")
    with pytest.raises(
        nwise.ContractError, match=r"outside that requires a gradient: one of shape \[4, 4\] in stage 1"
    ):
        pipe.step(X, target=Y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch itself
def test_an_output_that_requires_no_gradient_is_told() -> None:
    """Regression: under local credit a stage of the reentrant checkpoint learned nothing, in silence."""
    pipe = pipeline(Reentrant(WIDTH, WIDTH), strategy="local")
    with pytest.raises(nwise.ContractError, match=r"no gradient, .* stage 1. The reentrant .* `Pipeline"):
        pipe.step(X, target=Y)


def test_updates_inside_a_step_are_told() -> None:
    """Regression: an optimizer in hooks of autograd's nodes updated between micro-batches, in silence."""
    layer = nn.Linear(WIDTH, WIDTH)

    def update(*_: Any) -> None:
        layer.weight.data.add_(1.0)
        with torch.no_grad():
            layer.weight.mul_(0.5)

    node = torch.autograd.graph.get_gradient_edge(layer.weight).node
    node.register_hook(update)
    with pytest.raises(
        nwise.ContractError, match=r"parameters that a forward changes: stages.1.weight\. Leave updates"
    ):
        pipeline(layer, strategy="end-to-end", num_microbatches=2).step(X, target=Y)
    layer.weight.register_post_accumulate_grad_hook(update)
    pipeline(layer, strategy="end-to-end").step(X, target=Y)  # in one backward they are as in plain torch
    with pytest.raises(
        ValueError, match=r"no hooks of `register_post_accumulate_grad_hook` with several .* on stages.1.weight"
    ):
        pipeline(layer, strategy="end-to-end", num_microbatches=2).step(X, target=Y)


def test_what_cannot_be_copied_is_a_note() -> None:
    layer: Any = nn.Linear(WIDTH, WIDTH)
    layer.lock = threading.Lock()
    report = nwise.check(pipeline(layer, strategy="2-wise"), X, target=Y)
    assert not report.findings
    assert report.notes == ["stage 1 (TypeError: cannot pickle '_thread.lock' object)"]
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = layer.forward  # as wrappers of other libraries leave it
    pipe = pipeline(layer, strategy="2-wise")
    assert "a copy of Linear would compute with the original" in str(nwise.check(pipe, X, target=Y))
    pipe.step(X, target=Y)


def test_parameters_that_the_optimizer_lacks_are_named() -> None:
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    pipe = nwise.Pipeline(
        nwise.split(network, ["1", "2"]), [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)], strategy="2-wise"
    )

    def found(parameters: Any) -> list[str]:
        report = nwise.check(pipe, X, target=Y, optimizer=torch.optim.SGD(parameters, 0.1))
        return [where for one in report.findings for where in one.where if one.kind == IDLE]

    assert found(pipe.parameters()) == []
    assert found(pipe.main_parameters()) == ["heads.1.weight", "heads.1.bias"], "head 0 does not run"
    pipe.heads[1].requires_grad_(False)
    other = nn.Linear(WIDTH, 3)  # such as a new module of the network, after the split
    assert found([*pipe.main_parameters(), *other.parameters()]) == ["2 parameters that no stage or head holds"]


@pytest.mark.filterwarnings("ignore:With 2 micro-batches, batch norm")
@pytest.mark.parametrize("strategy", ["2-wise-mean", "end-to-end-delay-1", "hogwild"])
def test_a_check_leaves_everything_as_it_was(strategy: str) -> None:
    def made() -> nwise.Pipeline:
        torch.manual_seed(0)
        net = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(3)]
        sides = [nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)]
        return nwise.Pipeline(
            [*net[:2], nn.Linear(WIDTH, 3)], sides, None or functional.cross_entropy, strategy, 2, seed=1
        )

    def state(pipe: nwise.Pipeline) -> list[Any]:
        tensors = [*pipe.parameters(), *(p.grad for p in pipe.parameters() if p.grad is not None), *pipe.buffers()]
        return [pipe.steps, random.getstate(), torch.get_rng_state().tolist(), [x.tolist() for x in tensors]]

    pipes = made(), made()
    nwise.check(pipes[0], X, target=Y)
    for x, y in ((X, Y), (X + 1, Y), (X - 1, Y)):
        for pipe in pipes:
            pipe.step(x, target=y)
        assert state(pipes[0]) == state(pipes[1])
    if strategy != "2-wise-mean":
        with pytest.raises(ValueError, match="`nwise.check` should be called while no gradients are due"):
            nwise.check(pipes[0], X, target=Y)
        while pipes[0].drain():
            pass
    before = state(pipes[0])
    nwise.check(pipes[0], X, target=Y)
    assert state(pipes[0]) == before


def test_under_a_delay_gradients_are_compared_when_they_are_due() -> None:
    pipe = pipeline(TENSORS["adds a gradient"](), strategy="2-wise-mean-delay-2", num_microbatches=2)
    for _ in range(2):
        pipe.step(X, target=Y)
    with pytest.raises(nwise.ContractError, match=r"step != plain autograd: stages.1"):
        pipe.step(X, target=Y)


def fails(pipe: nwise.Pipeline) -> None:
    with pytest.raises(IndexError):
        pipe.step(X, target=Y + 9)


INTERRUPTIONS: dict[str, Callable[[nwise.Pipeline], Any]] = {
    "nothing": lambda _: None,
    "an error": fails,
    "forgotten": lambda pipe: pipe.forget_pending(),
    "early": lambda pipe: pipe.pending_gradients(),
    "drained": lambda pipe: pipe.drain(),
    "another number": lambda pipe: setattr(pipe, "steps", 9),
    "another M": lambda pipe: setattr(pipe, "num_microbatches", 1),
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
@pytest.mark.filterwarnings("ignore:All gradients should be applied before a change")
def test_a_step_that_is_interrupted_is_not_judged_by_halves(name: str) -> None:
    """The first step of which all gradients come is compared instead."""
    for fault in (False, True):
        stage = TENSORS["adds a gradient"]() if fault else nn.Linear(WIDTH, WIDTH)
        pipe = pipeline(stage, strategy="2-wise-mean-delay-2", num_microbatches=2)
        pipe.step(X, target=Y)
        INTERRUPTIONS[name](pipe)
        with pytest.raises(nwise.ContractError, match="step != plain autograd") if fault else nullcontext():
            for _ in range(4):
                pipe.step(X, target=Y)


class Looked(nn.Module):
    """An embedding that changes its rows in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class Blocks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(super().forward, x, use_reentrant=False))


@pytest.mark.parametrize("strategy", ["end-to-end", "end-to-end-delay-1", "hogwild"])
def test_what_a_delay_cannot_serve_is_told(strategy: str) -> None:
    """Rows that a forward changes are changed in a copy, and a block that runs again finds later parameters."""
    rows, late = torch.arange(8), strategy != "end-to-end"
    pipe = nwise.Pipeline([Looked(), nn.Linear(WIDTH, 3)], strategy=strategy)
    found = [(one.kind, one.where) for one in nwise.check(pipe, rows, target=Y).findings]
    assert found == ([(WRITTEN, ["stages.0.table.weight"])] if "delay" in strategy else [])
    pipe = nwise.Pipeline([Blocks(WIDTH, WIDTH), nn.Linear(WIDTH, 3)], strategy=strategy)
    if strategy == "end-to-end-delay-1":
        with pytest.raises(RuntimeError, match="Stage 0 should have no hooks on saved tensors under a delay"):
            pipe.step(X, target=Y)
    else:
        assert [one.kind for one in nwise.check(pipe, X, target=Y).findings] == [AGAIN] * late


@pytest.mark.parametrize("recompute", [False, True])
def test_expanded_buffers_are_left_alone(recompute: bool) -> None:
    """Regression: such a buffer refuses a copy, so the first step raised a RuntimeError."""
    stage = Do(lambda layer, x: layer(x) * layer.scale)
    stage.layer.register_buffer("scale", torch.ones(1).expand(WIDTH))
    pipe = nwise.Pipeline([stage, nn.Linear(WIDTH, 3)], strategy="end-to-end", recompute=recompute)
    assert not nwise.check(pipe, X, target=Y).findings


def test_every_error_and_warning_names_a_sentence_of_the_contract() -> None:
    page = (ROOT / "docs" / "contract.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if re.match(r"\| \d", line)}
    assert list(rows) == [str(number) for number in range(1, 13)]
    for kind in (*ERRORS, *WARNINGS):
        found = re.search(r"\(docs/contract.md, (\d[\d, ]*)\)$", str(Finding(kind, ["x"])))
        assert found is not None
        assert all("check" in rows[number] for number in found[1].split(", ")) or kind in (REPLICAS, IDLE)


@pytest.mark.parametrize("name", sorted(ZOO))
@pytest.mark.parametrize("options", [{"recompute": True}, {"schedule": "zero-bubble"}, {"compress": "bf16"}])
def test_networks_that_keep_the_contract_are_left_alone(name: str, options: dict[str, Any]) -> None:
    """`test_contract.py` has the same for every strategy and number of micro-batches: a warning fails a test."""
    net = ZOO[name](4)
    x, y = net.draw(6)
    for strategy, m in (("3-wise-mean", 2), ("rotating-2", 1), ("2-wise-hogwild", 3)):
        if options.get("recompute") and "hogwild" in strategy:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, m, **options)
        report = nwise.check(pipe, x, target=y)
        assert not report.findings, report
        assert not report.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    net = ZOO["tokens"](3)
    for module in (*net.stages, *net.heads):
        if module is not None:
            module.float()
    x, y = net.draw(6)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, "2-wise-mean", 2)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        assert not nwise.check(pipe, x, target=y).findings


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow("four ranks find the same")), 4])
def test_all_ranks_find_what_one_process_finds(ranks: int, tmp_path: Path) -> None:
    alone = {name: checked.found(name) for name in checked.NAMES}
    error = checked.raised()
    assert "step != plain autograd: stages.2.weight by" in error
    for findings, replicas, deferred, raised in results(ranks, "checked.py", tmp_path):
        assert findings == alone
        assert raised == error
        assert not deferred
        assert [re.sub(":.*", "", one) for one in replicas] == [REPLICAS] * (ranks == 4)
