"""A pipeline that is changed between steps, copied, or lacks what its strategy needs."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import nwise
from nets import X, Y, three, train
from nwise.flow import StageFlow
from nwise.microbatch import Batch
from nwise.program.cutting import cut_batch
from nwise.randomness import StepSeeds
from nwise.runtime.modules import RemoteModule
from nwise.schedule.actions import Action, Kind
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from nwise.stage.weights import Weights
from nwise.tensors import names


def test_missing_heads_raise_before_a_step() -> None:
    """Regressions: heads that losses need were discarded, or set to None; the losses then used the stage's own output."""
    pipe = three("local")
    with pytest.raises(ValueError, match=r"local needs the heads of stages \[0, 1\]; keep them, or set `strategy`"):
        pipe.discard_heads()
    bare = three("end-to-end", heads=False)
    bare.strategy = "local"
    with pytest.raises(ValueError, match="a head for stage 0, whose loss 'local' needs"):
        bare.step(X, target=Y)
    pipe.step(X, target=Y)  # the schedule of this step fits the next one
    for sets in (True, False):
        if sets:
            pipe.heads[0] = None
        else:
            del pipe.heads[0]
        assert (len(pipe.heads), 0 in pipe.heads) == (1, False)
        with pytest.raises(ValueError, match="should have a head for stage 0"):
            pipe.step(X, target=Y)
        pipe.heads[0] = nn.Linear(8, 3)
        pipe.step(X, target=Y)
        assert pipe.heads[0].weight.grad is not None


@pytest.mark.parametrize("stage", [2, 9])
def test_head_of_the_last_stage_is_refused(stage: int) -> None:
    """The step trained through it, and `forward` and `evaluate` left it out."""
    pipe = three("2-wise")
    pipe.heads[stage] = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=rf"Found one of stage {stage} with 3 stages; remove it, or make it a part"):
        pipe.step(X, target=Y)


COPIES: dict[str, Callable[[nwise.Pipeline], nwise.Pipeline]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipe: pickle.loads(pickle.dumps(pipe)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copied_pipeline_runs_its_own_strategy(duplicate: Callable[[nwise.Pipeline], nwise.Pipeline]) -> None:
    """Orders went by the identity of their schedule and were copied along: in 900 steps of copies, deepcopy raised three
    times and pickle twice, and once a pickled pipeline ran the order of another strategy without a word.

    `test_nothing_is_keyed_by_id` forbids the cause; here are the copies.
    """
    pipe = three("local")
    train(pipe, 1)
    for i in range(24):
        other = duplicate(pipe)
        other.strategy = ("2-wise", "end-to-end", "rotating-2-microbatch", "hogwild")[i % 4]
        other.num_microbatches = 1 + i % 3
        fresh = three(other.strategy, num_microbatches=other.num_microbatches, seed=pipe.seed)
        fresh.load_state_dict(other.state_dict())
        fresh.steps = other.steps
        other.zero_grad()
        assert torch.equal(other.step(X, target=Y).nan_to_num(), fresh.step(X, target=Y).nan_to_num())
        grads = ([p.grad for p in one.parameters()] for one in (other, fresh))
        torch.testing.assert_close(*grads, rtol=0, atol=0)
        pipe = other


def test_pipeline_changes_between_steps_take_effect() -> None:
    """Regression: a new order was ignored, and so was a head added under `heads="all"` after the first step."""
    pipe = three(nwise.EndToEnd(heads="all"), heads=False, num_microbatches=2)
    ran: list[str] = []
    pipe.on_action = lambda action: ran.append(str(action))
    pipe.step(X, target=Y)
    depth_first, ran[:] = list(ran), []
    pipe.schedule = "phase"
    pipe.step(X, target=Y)
    assert sorted(ran) == sorted(depth_first) != ran != depth_first
    pipe.heads[1] = nn.Linear(8, 3)
    assert pipe.step(X, target=Y).isnan().tolist() == [True, False, False]
    del pipe.heads["1"]
    pipe.num_microbatches = 3
    assert pipe.step(X, target=Y).isnan().tolist() == [True, True, False]
    assert pipe.staleness.shape == (3, 3)
    with pytest.raises(ValueError, match="`schedule` should be one of best.*Found 'phases'. Did you mean 'phase'?"):
        pipe.schedule = "phases"
    with pytest.raises(ValueError, match="`num_microbatches` should be an integer of at least 1. Found 0"):
        pipe.num_microbatches = 0
    pipe.step(X, target=Y)


def test_changing_credit_every_step_leaks_no_memory() -> None:
    """Regression: every new matrix left a flow, a schedule and an order in memory."""
    pipe, sizes = three("local"), []
    for i in range(300):  # caches are full by then
        pipe.strategy = nwise.Credit([[1, 0, 0], [0, 1, 0], [1 + i, 0, 1]])
        pipe.step(X, target=Y)
        pipe.zero_grad()
        if i in (270, 299):
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[1] - sizes[0] < 50


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_deepcopy_of_compiled_pipeline_is_independent() -> None:
    """Regression: the compiled call of a copied `nn.Sequential` still used the original's parameters."""
    pipe = nwise.Pipeline([nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)], None, strategy="end-to-end")
    for stage in pipe.stages:
        nwise.compile_module(stage, "aot_eager")
    pipe.step(X, target=Y)
    twin = copy.deepcopy(pipe)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(X).any()
    twin.zero_grad()
    twin.step(X, target=Y)
    assert all(p.grad is not None for p in twin.parameters())
    assert nwise.reference_grads(list(pipe.stages), None, nn.functional.cross_entropy, X, Y, pipe.credit)[
        "stages.0.0.weight"
    ].any()
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["loss_fn", "recompute", "compress", "checks"])
def test_arguments_that_have_been_used_cannot_be_assigned(name: str) -> None:
    """Regression: the assignment was accepted, and the next step ignored it; a module became a part of the state dict."""
    pipe = three("end-to-end")
    for value in (nn.MSELoss(), "int8"):
        with pytest.raises(AttributeError, match=f"`{name}` should stay as the pipeline was made with it"):
            setattr(pipe, name, value)


def test_stages_that_are_added_are_refused() -> None:
    pipe = three("end-to-end")
    pipe.stages.append(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="should keep its 3 stages; any may be replaced. Found 4"):
        pipe.step(X, target=Y)


@pytest.mark.parametrize(
    ("only", "error", "found"), [([7], ValueError, "7"), ([-1], ValueError, "-1"), (0, TypeError, "0")]
)
def test_heads_that_do_not_exist_are_not_asked_for(only: Any, error: type[Exception], found: str) -> None:
    """Regression: no head ran, without a word."""
    with pytest.raises(error, match=f"`only` should .* Found {found}"):
        three("2-wise").head_outputs(X, only=only)


def wrapped(name: str, base: type = object) -> nn.Module:
    """A layer whose class looks like a wrapper's; real ones need a process group."""
    layer = nn.Linear(8, 8)
    layer.__class__ = type("Layer", (type(name, (base,), {}), nn.Linear), {})  # as `fully_shard` does
    return layer


WRAPPERS = {
    "DataParallel": nn.DataParallel(nn.Linear(8, 8)),
    "fully_shard": wrapped("FSDPLinear", FSDPModule),
    **{name: wrapped(name) for name in ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")},
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_that_synchronise_are_refused(wrapper: nn.Module) -> None:
    """Regression: a wrapper inside a stage summed gradients over ranks with other stages, or gave none at all."""
    match = "Stages and heads should exchange nothing with other processes; .* Found .* in {}; pass the plain module"
    bad, pipe = nn.Sequential(nn.Identity(), nn.Sequential(wrapper)), three("2-wise")
    nwise.Pipeline(
        [nn.SyncBatchNorm(8), nn.Linear(8, 3)], strategy="end-to-end"
    )  # in one process it is plain batch norm
    with pytest.raises(ValueError, match=match.format(r"`stages\[0\]`")):
        nwise.Pipeline([bad, nn.Linear(8, 3)], strategy="end-to-end")
    with pytest.raises(ValueError, match=match.format(r"`heads\[0\]`")):
        nwise.Pipeline([nn.Linear(8, 8), nn.Linear(8, 3)], [bad])
    with pytest.raises(ValueError, match=match.format("a stage or head")):
        nwise.Pipeline([lambda: bad, nn.Linear(8, 3)], strategy="end-to-end")
    pipe.step(X, target=Y)
    pipe.stages[0] = bad
    with pytest.raises(ValueError, match=match.format("a stage or head")):
        pipe.step(X, target=Y)


def test_a_rank_without_the_first_stage_takes_named_inputs() -> None:
    """Regression: it refused several inputs by name without a target, because its placeholder took none by name."""
    x = torch.ones(2, 3)
    parts = cut_batch((), {"a": x, "b": x}, None, None, None, 1, 1, RemoteModule("stage 0", 0))
    assert names(parts.inputs[0]) == ("a", "b")


def test_random_numbers_are_those_of_the_device_of_the_stage() -> None:
    """Regression: a stage on a GPU whose first input was on the CPU drew the same numbers in every step."""
    seeded: list[torch.device] = []

    class Spy(StepSeeds):
        def run(self, part: Any, device: torch.device, function: Any, *arguments: Any) -> Any:
            seeded.append(device)
            return arguments[1]

    stage = Stage(0, nn.Linear(2, 2, device="meta"), None, nn.functional.mse_loss)
    stage.survey(stage.module, None)
    flow = StageFlow(head=False, own=False, messages=(), weights=None, fused=None)
    tape = Tape(flow, Batch([], [None], [[1.0]], Spy()), 0, 0, Weights(()))
    stage.run(Action(Kind.FORWARD, 0, 0), tape, {None: (torch.ones(1),)})
    assert seeded == [torch.device("meta")]


def test_several_processes_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after a move the engine kept its device, and the next message was refused as of another one."""
    pipe = three("end-to-end")
    pipe.step(X, target=Y)
    monkeypatch.setattr(pipe.processes, "size", 2)
    pipe.double()
    with pytest.raises(
        ValueError, match="should be on its device before it first runs. Found a move to meta; make another"
    ):
        pipe.to("meta")
