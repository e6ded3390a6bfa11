"""What checkpoints hold beside weights: any state of an optimizer, buffers of losses; and no names of `torch.compile`."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nwise
from launch import results
from nets import equal
from nwise.app.recipes import Adam
from nwise.app.training import make_optimizer
from nwise.checkpoint import Checkpoints, Resumed, files, gather_weights, load_main_state, main_state
from nwise.training.late import hidden_matrices
from ranks import saved_state
from ranks.saved_state import Centred, Scaled, make, train
from test_checkpoint import signed

Make = Callable[[nwise.Pipeline], Any]


def pipeline(loss: Any = nn.functional.cross_entropy, cut: tuple[str, ...] = ("a", "b")) -> nwise.Pipeline:
    return make(loss, cut)[0]


class OwnKeys(torch.optim.SGD):
    """Has state of no parameter, one tensor in the state of all of them and in a list, and its own `state_dict`."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr, momentum=0.9)
        self.slow = torch.ones(2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        if not self.state:
            count = torch.zeros(())
            for p in parameters:
                self.state[p].update(step=count, counts=[count])
        state: Any = self.state["all"]  # type: ignore[index]  # no parameter
        state["count"] = state.get("count", 0) + 1
        state["mean"] = state.get("mean", torch.ones(2)) * 0.5
        self.state[parameters[0]]["step"] += 1
        self.slow = self.slow * 0.7
        for p in parameters:
            shared = self.state[p]["step"] + 0.5 * self.state[p]["counts"][0]
            p.grad *= (state["count"] + state["mean"][0] + shared) * self.slow[0]
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict.pop("slow")
        super().load_state_dict(state_dict)


def several_groups(pipe: nwise.Pipeline) -> torch.optim.Optimizer:
    groups = [
        {"params": list(pipe.heads.parameters()), "lr": torch.tensor(0.2), "name": "heads"},
        {"params": list(pipe.stages.parameters())[::-1], "betas": (0.5, 0.9), "capturable": False},
    ]
    return torch.optim.Adam(groups, lr=torch.tensor(0.1), foreach=False)


def transposed(pipe: nwise.Pipeline) -> torch.optim.Optimizer:
    """Momentum in another memory order than that of the parameters."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for p in pipe.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.zeros(p.shape[::-1]).permute(*reversed(range(p.dim())))
    return optimizer


def late(**options: Any) -> Make:
    """An optimizer for late gradients."""
    config = Adam(lr=0.01, **options)
    return lambda pipe: make_optimizer(config, pipe.parameters(), hidden_matrices(pipe))


@pytest.mark.parametrize(
    "optimizer",
    [
        *(late(extrapolate=True), late(predict=2), late(muon_lr=0.02)),
        *(late(muon_lr=0.02, extrapolate=True), late(muon_lr=0.02, predict=3)),
        lambda pipe: Scaled(pipe.parameters(), lr=0.1),
        lambda pipe: OwnKeys(pipe.parameters(), lr=0.1),
        lambda pipe: torch.optim.Adam(pipe.named_parameters(), amsgrad=True),
        lambda pipe: torch.optim.Adafactor(pipe.parameters()),
        # State of another dtype than the parameter's.
        lambda pipe: torch.optim.Adafactor(pipe.double().parameters()),
        lambda pipe: torch.optim.NAdam(pipe.double().parameters()),
        several_groups,
        transposed,
    ],
)
def test_state_of_optimizers_resumes_bitwise(optimizer: Make, tmp_path: Path) -> None:
    """Regression: state that is not a tensor raised at the first save; options of groups started afresh, without a word."""
    whole = pipeline()
    update = optimizer(whole)
    rate = torch.optim.lr_scheduler.StepLR(update, 2)
    checkpoints = Checkpoints(tmp_path, whole, update)
    train(whole, update, 3, rate)
    checkpoints.save()
    saved, saved_rate = copy.deepcopy(update.state_dict()), rate.state_dict()
    train(whole, update, 3, rate)
    again = pipeline()
    update = optimizer(again)
    rate = torch.optim.lr_scheduler.StepLR(update, 2)
    assert Checkpoints(tmp_path, again, update).resume() == Resumed(3, "")
    assert equal(update.state_dict(), saved)
    rate.load_state_dict(saved_rate)
    train(again, update, 3, rate)
    assert all(map(torch.equal, again.parameters(), whole.parameters()))
    assert again.state_dict()["stages.0.a.weight"].std() > 0.1, "the updates have not vanished"


def test_states_keep_their_order_in_memory(tmp_path: Path) -> None:
    """Fused updates go by memory. Complex numbers are stored as pairs of real ones."""
    pipe, again = pipeline(), pipeline()
    update, other = transposed(pipe), torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    for p in pipe.parameters():
        update.state[p]["waves"] = torch.randn(4, 3, 2, dtype=torch.complex128).permute(2, 0, 1)
        update.state[p]["whole"] = torch.randn(p.shape[:-1], dtype=torch.complex128)
    Checkpoints(tmp_path, pipe, update).save()
    assert Checkpoints(tmp_path, again, other).resume() == Resumed(0, "")
    for p, q in zip(pipe.parameters(), again.parameters(), strict=True):
        for name, expected in update.state[p].items():
            found = other.state[q][name]
            assert torch.equal(found, expected), name
            assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), name


def test_resuming_in_another_precision_casts_as_torch_does_and_says_so(tmp_path: Path) -> None:
    """Regression: weights were cast silently, but states kept their dtype, so the next update of Adam failed."""
    pipe = pipeline().double()
    update = torch.optim.Adam(pipe.parameters(), foreach=False)
    for p in pipe.parameters():
        p.grad = torch.randn_like(p)
    update.step()
    Checkpoints(tmp_path, pipe, update).save()
    again, other = pipeline(), pipeline()
    ours, torchs = (torch.optim.Adam(one.parameters(), foreach=False) for one in (again, other))
    assert Checkpoints(tmp_path, again, ours).resume() == Resumed(0, "float64 -> float32")
    other.load_state_dict(pipe.state_dict())
    torchs.load_state_dict(update.state_dict())
    assert equal(ours.state_dict(), torchs.state_dict())
    assert all(map(torch.equal, again.parameters(), other.parameters()))
    train(again, ours, 1)


def test_values_that_can_be_read_without_code() -> None:
    one = torch.ones(2)
    value = {"a": (1, None, [True, np.float64(0.1)]), 2: {"t": one, "again": one}, "size": torch.Size([3])}
    found = files.plain(value, torch.neg)
    assert equal(found, {"a": (1, None, [True, 0.1]), 2: {"t": -one, "again": -one}, "size": torch.Size([3])})
    assert found[2]["t"] is found[2]["again"]
    assert type(found["a"][2][1]) is float
    with pytest.raises(TypeError, match=r"^'a/1', a function$"):
        files.plain({"a": [0, equal]}, torch.neg)
    with pytest.raises(TypeError, match=r"^'', a Tensor of layout torch.sparse_coo$"):
        files.plain(torch.ones(2).to_sparse(), torch.neg)


class Unsaved(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("use another function")


def with_function(pipe: nwise.Pipeline) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pipe.parameters())
    optimizer.param_groups[0]["rule"] = equal
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        (
            with_function,
            TypeError,
            "An optimizer's state should consist of tensors.* Found 'rule', a function, of SGD;",
        ),
        (lambda pipe: Unsaved(pipe.parameters()), ValueError, "Found that Unsaved raises NotImplementedError"),
        (lambda pipe: [torch.optim.SGD(pipe.parameters())], TypeError, "should be one optimizer. Found list; make one"),
        (
            lambda pipe: torch.optim.SGD([*pipe.parameters(), nn.Parameter(torch.ones(3))]),
            ValueError,
            r"should be of the pipeline's parameters. Found another one, of shape \(3,\)",
        ),
    ],
)
def test_optimizer_that_cannot_be_saved_is_refused_before_training(
    optimizer: Make, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    pipe = pipeline()
    with pytest.raises(kind, match=message):
        Checkpoints(tmp_path, pipe, optimizer(pipe))
    checkpoints = Checkpoints(tmp_path, pipe)
    with pytest.raises(kind, match=message):
        checkpoints.optimizer = optimizer(pipe)


def test_state_that_cannot_be_saved_raises_in_the_first_update(tmp_path: Path) -> None:
    """Not at the first save, after hours of training."""

    class Objects(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state[self.param_groups[0]["params"][0]]["rule"] = object()

    pipe = pipeline()
    update = Objects(pipe.parameters())
    checkpoints = Checkpoints(tmp_path, pipe, update)
    with pytest.raises(TypeError, match="Found 'rule', a object, of Objects; make `Checkpoints` without the optimizer"):
        train(pipe, update, 1)
    with pytest.raises(TypeError, match="Found 'rule', a object"):
        checkpoints.save()
    assert not list(tmp_path.glob("step-*"))


def test_own_keys_of_a_state_dict_stay_with_their_parameters(tmp_path: Path) -> None:
    pipe = pipeline()
    update = OwnKeys(pipe.parameters(), lr=0.1)
    Checkpoints(tmp_path, pipe, update).save()
    before = copy.deepcopy(pipe.state_dict())
    pipe.stages[0].requires_grad_(False)
    update = OwnKeys((p for p in pipe.parameters() if p.requires_grad), lr=0.1)
    with pytest.raises(
        ValueError, match="OwnKeys should resume with the parameters that it had, because it adds 'slow'"
    ):
        Checkpoints(tmp_path, pipe, update).resume()
    assert equal(dict(pipe.state_dict()), dict(before))


def by_stage(pipe: nwise.Pipeline, *rates: float) -> torch.optim.Optimizer:
    stages = [[*s.parameters(), *pipe.heads[str(k)].parameters()] for k, s in enumerate(pipe.stages[:-1])]
    groups = [*stages, list(pipe.stages[-1].parameters())]
    options = [{"params": g, "lr": r} for g, r in zip(groups, rates, strict=True)]
    return torch.optim.SGD(options, lr=rates[0], momentum=0.9)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("momentum", 0.5, [(0.1, 0.9), (0.2, 0.9)]),
        # Of a fused kernel; the rate of another group may be a number.
        ("lr", torch.tensor(0.2), [(0.1, 0.9), (0.8, 0.9)]),
        ("lr", 0.3, [(0.1, 0.9), (0.8, 0.9)]),
    ],
)
def test_options_of_groups_in_another_cut(option: str, value: Any, expected: list[Any], tmp_path: Path) -> None:
    """Each group takes the options of its parameters, as far as those agree."""
    pipe = pipeline(cut=("a", "b", "c"))
    update = by_stage(pipe, 0.1, 0.2, 0.2)
    update.param_groups[2][option] = value
    Checkpoints(tmp_path, pipe, update).save()
    again = pipeline(cut=("a", "bc"))
    update = by_stage(again, 0.1, 0.8)
    found = Checkpoints(tmp_path, again, update).resume()
    assert [(g["lr"], g["momentum"]) for g in update.param_groups] == expected
    assert found is not None
    assert f"the optimizer's {option} is its own, because saved groups differ" in found.changes
    assert f"{option} is that of the checkpoint" not in found.changes


def test_options_are_those_of_the_checkpoint_unless_the_caller_has_others(tmp_path: Path) -> None:
    pipe = pipeline()
    Checkpoints(tmp_path, pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)).save()
    update = torch.optim.SGD(pipe.parameters(), lr=0.2, momentum=0.9)
    checkpoints = Checkpoints(tmp_path, pipe, update)
    info = checkpoints.newest()
    assert info is not None
    assert checkpoints.restore(info, settings=False).changes == ""
    assert update.param_groups[0]["lr"] == 0.2
    assert checkpoints.restore(info).changes == "the optimizer's lr is that of the checkpoint, not of lr=0.2"
    assert update.param_groups[0]["lr"] == 0.1


ONE = ["optimizer.model.a.weight.step", "optimizer.model.a.bias.step"]


def test_a_resume_repeats_what_python_numpy_and_torch_draw(tmp_path: Path) -> None:
    """Augmentations draw from all three; before, a resumed run saw other samples than one that was not stopped."""

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.randn(1))]  # noqa: NPY002

    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        draw()  # a second normal number waits in two of them
        if not seed:
            Checkpoints(tmp_path, pipeline()).save()
            expected = [draw(), draw()]
    Checkpoints(tmp_path, pipeline()).resume()
    assert [draw(), draw()] == expected


# Losses


class Object:
    """A loss that is neither a module nor a function."""

    def __init__(self, loss: nn.Module) -> None:
        self.inner = loss

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return self.inner(output, target)

    def compute(self, output: Tensor, target: Tensor) -> Any:
        return self(output, target)


def wrapped(loss: nn.Module) -> Any:
    @functools.wraps(loss.forward)
    def call(*given: Any) -> Any:
        return loss(*given)

    return call


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss,
        lambda loss: [loss, Centred()],
        lambda loss: loss.forward,
        lambda loss: functools.partial(loss),
        lambda loss: lambda output, target: loss(output, target),
        wrapped,
        Object,
        lambda loss: Object(loss).compute,
        lambda loss: torch.compile(loss, backend="eager"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of the compiler
def test_buffers_of_losses_resume_bitwise(form: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    """Regression: a running mean in a loss started afresh after a resume, without a word."""

    def start() -> tuple[nwise.Pipeline, torch.optim.Optimizer, Centred]:
        loss = Centred()
        pipe = pipeline(form(loss))
        return pipe, torch.optim.SGD(pipe.parameters(), 0.1), loss

    whole, update, loss = start()
    checkpoints = Checkpoints(tmp_path, whole, update)
    train(whole, update, 3)
    checkpoints.save()
    train(whole, update, 3)
    again, update, resumed = start()
    assert Checkpoints(tmp_path, again, update).resume() == Resumed(3, "")
    train(again, update, 3)
    assert torch.equal(loss.centre, resumed.centre)
    assert not torch.equal(loss.centre, Centred().centre)
    assert all(map(torch.equal, again.parameters(), whole.parameters()))
    assert not [name for name in again.state_dict() if "centre" in name]


def test_loss_with_other_buffers_starts_afresh_and_says_so(tmp_path: Path) -> None:
    Checkpoints(tmp_path, pipeline(nn.CrossEntropyLoss(weight=torch.ones(3)))).save()
    said = "fresh buffers of the losses at stages 0, 1"
    assert Checkpoints(tmp_path, pipeline()).resume() == Resumed(0, said)
    assert Checkpoints(tmp_path, pipeline(Centred())).resume() == Resumed(0, said)


def test_one_loss_of_several_stages_takes_the_last_buffers(tmp_path: Path) -> None:
    losses = [Centred(), Centred()]
    losses[1].centre += 1
    Checkpoints(tmp_path, pipeline(losses)).save()
    one = Centred()
    found = Checkpoints(tmp_path, pipeline(one)).resume()
    assert found == Resumed(0, "a loss of several stages has the buffers of the last of them")
    assert torch.equal(one.centre, losses[1].centre)


def test_two_processes_save_what_one_resumes(tmp_path: Path) -> None:
    """State that is not a tensor, options of groups and buffers of losses come from the processes that have them."""
    [first, second] = results(2, "saved_state.py", tmp_path, str(tmp_path / "two"), "3")
    pipe, update, losses = saved_state.main(tmp_path / "two", 0)
    assert [loss.centre.tolist() for loss in losses] == [first["centre"], second["centre"]]
    names: dict[Tensor, str] = {p: name for name, p in pipe.named_parameters()}
    factors = {names[p]: state["factors"][0].tolist() for p, state in update.state.items()}
    assert factors == {**first["factors"], **second["factors"]}
    assert [group["count"] for group in update.param_groups] == [3, 3]
    train(pipe, update, 2)
    whole, _, _ = saved_state.main(tmp_path / "one", 5)
    assert all(map(torch.equal, pipe.parameters(), whole.parameters()))


# Names of `torch.compile`


def compiled(what: str) -> nwise.Pipeline:
    pipe: Any = pipeline()
    if what == "stages":
        pipe.stages[0] = torch.compile(pipe.stages[0], backend="eager")
        pipe.stages[1] = torch.compile(pipe.stages[1], backend="eager")
    elif what == "layers":
        pipe.stages[0].a = torch.compile(pipe.stages[0].a, backend="eager")
        pipe.stages[1].b = torch.compile(pipe.stages[1].b, backend="eager")
    if what:
        pipe.heads["0"] = torch.compile(pipe.heads["0"], backend="eager")
    return pipe


@pytest.mark.parametrize("before", ["", "stages", "layers"])
@pytest.mark.parametrize("after", ["", "stages", "layers"])
def test_names_of_compiled_modules_reach_no_file(before: str, after: str, tmp_path: Path) -> None:
    """Regression: `_orig_mod` was in every name, so an uncompiled network could not read the file."""
    pipe = compiled(before)
    update = torch.optim.Adam(pipe.parameters(), 0.1)
    checkpoints = Checkpoints(tmp_path, pipe, update)
    train(pipe, update, 2)
    folder = checkpoints.save()
    assert (
        "_orig_mod" not in f"{files.read_facts(folder)} {list(files.read_tensors(folder))} {files.read_values(folder)}"
    )
    assert set(gather_weights(pipe)) == set(gather_weights(pipeline()))
    again = compiled(after)
    resumed = torch.optim.Adam(again.parameters(), 0.1)
    assert Checkpoints(tmp_path, again, resumed).resume() == Resumed(2, "")
    assert equal(resumed.state_dict(), update.state_dict())
    fresh = compiled(after)
    load_main_state(fresh, main_state(pipe))
    for one in (again, fresh):
        assert all(map(torch.equal, main_state(one).values(), main_state(pipe).values()))


def test_mutated_state_of_an_optimizer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """A signed checkpoint of another program, whose optimizer's state has another form, ended in a KeyError."""
    pipe = pipeline()
    update = torch.optim.Adam(pipe.parameters())
    train(pipe, update, 1)
    folder = Checkpoints(tmp_path, pipe, update).save()
    index = folder / "checkpoint.json"
    path = folder / "process-0.pt"
    written = json.loads(index.read_text().split("\n")[0])
    values = torch.load(path, weights_only=True)
    said = []
    for key in values["optimizer"]:
        for change in (None, 3, "text", [17], {"a": None}, "drop"):
            mutated = copy.deepcopy(values)
            part = mutated["optimizer"]
            part[key] = change
            if change == "drop":
                del part[key]
            torch.save(mutated, path)
            written["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            index.write_bytes(signed(written))
            try:
                Checkpoints(tmp_path, pipe, torch.optim.Adam(pipe.parameters())).resume()
            except ValueError as error:
                said.append(str(error))
    assert len(said) > 10
    assert all(
        re.search(r"form that nwise writes. Found .*; resume from another|should resume with the", s) for s in said
    )


def test_checkpoints_without_safetensors_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an error of torch, after the first step had been made."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    pipe = nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end")
    with pytest.raises(ImportError, match=r"A checkpoint needs safetensors, .* `pip install 'nwise\[checkpoint\]'`"):
        Checkpoints(tmp_path / "run", pipe)
    assert not list(tmp_path.iterdir())


class Copied(nn.Linear):
    """Its state dict holds copies, as a quantiser's does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "halves"] = self.weight.detach().clone()


class Extra(nn.Linear):
    """It has a state beside its tensors."""

    extra: Any = torch.ones(1)

    def get_extra_state(self) -> Any:
        return self.extra


class Plain(Extra):
    extra = {"a": 1}  # noqa: RUF012


class Graph(nn.Linear):
    """It has a sparse buffer."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("adjacency", torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Copied, "'model.0.halves', which the module's state dict makes anew"),
        (Extra, "'model.0._extra_state', which the module's state dict makes anew"),
        (Plain, "'model.0._extra_state', a dict"),
        (Graph, "'model.0.adjacency', torch.sparse_coo; keep its indices"),
    ],
)
def test_states_that_could_not_be_loaded_are_refused(kind: Any, found: str, tmp_path: Path) -> None:
    """Regression: they were saved, and the fresh values stayed on resuming; a sparse buffer failed in the first save, unnamed."""
    pipe = nwise.Pipeline(list(nwise.split(nn.Sequential(kind(3, 3), nn.Linear(3, 2)), at=1)), strategy="end-to-end")
    with pytest.raises(TypeError, match=f"The state of a module should .*Found {found}"):
        Checkpoints(tmp_path, pipe, None)
    assert not list(tmp_path.iterdir())
