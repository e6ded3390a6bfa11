"""The public names, called with all their arguments as users and other projects call them: they change only on purpose."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nwise
from benchmarks.runtime.command import main as bench
from launch import forked
from nwise.app import cli
from nwise.app.models import convnet, gpt, resnet
from nwise.checkpoint import Checkpoints
from nwise.schedule import PAPER, Costs, Schedule, best, paper_time, simulate, validate

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def parts() -> tuple[list[nn.Module], list[nn.Module]]:
    return [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)], [nn.Linear(4, 3), nn.Linear(4, 3)]


def test_pipeline() -> None:
    stages, heads = parts()
    actions: list[object] = []
    pipe = nwise.Pipeline(
        stages=stages, heads=heads, loss_fn=nn.functional.cross_entropy, strategy="2-wise-mean", num_microbatches=2,
        schedule="best", recompute=False, seed=1, placement="contiguous", compress="none", mesh=None, timeout=30.0,
        checks="first",
    )  # fmt: skip
    pipe.on_action, pipe.recorder = actions.append, lambda step, action, begin, end: None
    losses: Tensor = pipe.step(X, target=Y)
    losses += pipe.step(microbatches=[X[:3], X[3:]], targets=[Y[:3], Y[3:]])
    assert actions
    assert losses.shape == (3,)
    assert float(losses[-1]) > 0
    assert (pipe.steps, pipe.drain(), pipe.num_stages, pipe.num_microbatches) == (2, False, 3, 2)
    every = set(pipe.parameters())
    assert every == {*pipe.main_parameters(), *pipe.head_parameters()}
    assert pipe.credit.dtype == torch.float64
    assert pipe.processes.table({k: losses[k : k + 1] for k in range(3)}).shape == (3, 1)
    assert pipe(X).shape == (8, 3)
    assert [output.shape for output in pipe.head_outputs(X) if isinstance(output, Tensor)] == [(8, 3)] * 3
    pipe.forget_pending()
    pipe.refresh()
    norm = nwise.clip_grad_norm_(pipe, 1.0, by="global")
    assert float(norm) > 0
    assert nwise.defer_batchnorm(pipe) is pipe
    nwise.compile_module(stages[0], backend="eager")
    assert not pipe.step(X, target=Y).isnan().any()


def test_credit() -> None:
    stages, heads = parts()
    for strategy in (
        nwise.NWise(2),
        nwise.Credit(torch.eye(3)),
        nwise.strategy("end-to-end"),
        nwise.NWise(2, heads="all"),
    ):
        flow = nwise.find_flow(strategy.credit(3), trainable=[True] * 3, probes=())
        assert len(flow.messages) == 2
        pipe = nwise.Pipeline(stages, heads, strategy=strategy)
        grads = nwise.reference_grads(stages, heads, nn.functional.cross_entropy, X, Y, pipe.credit, num_microbatches=1)
        assert {"stages.0.weight", "stages.2.bias"} <= set(grads)


class Counted(nn.Module):
    """A loss that says what it averages over."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def count(self, target: Tensor) -> int:
        return len(target)


def test_losses_and_heads() -> None:
    stages, _ = parts()
    heads = [nwise.heads.linear((4,), 3), nwise.heads.fitting(stages, X, 3)[1]]
    pipe = nwise.Pipeline(stages, heads, Counted(), "local", 3)
    assert not pipe.step(X, target=Y).isnan().any()
    tokens = nwise.losses.TokenCrossEntropy(ignore_index=-100)
    assert tokens(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)) > 0
    assert nwise.inject(torch.ones(2), torch.tensor(0.5)).equal(torch.ones(2))


def test_split() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3))
    assert [len(list(stage.parameters())) for stage in nwise.split(network, ["2", "3"])] == [2, 2, 2]
    assert len(nwise.split(network, 2)) == 2
    assert isinstance(nwise.untie(network), list)


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = nwise.plan(Costs(1, 0.5, 1, 1), devices=2, strategy="2-wise", microbatches=[1, 2], report=None)
    assert plan.num_microbatches in (1, 2)
    assert len(plan.placement) == 2


def test_schedules() -> None:
    found = best("2-wise", num_stages=4, num_microbatches=2, costs=PAPER)
    assert isinstance(found, Schedule)
    assert found.period == simulate(found, cycles=4).period == paper_time(4, 2, 2) == 6
    slower = Costs(forward=1, head=0.5, input_grad=1, weight_grad=1, latency=0.1)
    assert best("2-wise", num_stages=4, num_microbatches=2, costs=slower, num_ranks=2).period > 6
    validate(found)


@pytest.mark.parametrize(
    "model",
    [
        gpt(2, blocks_per_stage=1, width=8, num_heads=2, sequence_length=4, vocabulary_size=11, seed=1),
        resnet("32", 10, 32, width_factor=0.1, seed=1),
        convnet(3, 10, in_channels=3, image_size=8, filters=2, seed=1),
    ],
)
def test_models(model: nwise.app.models.StagedModel) -> None:
    assert len(model.heads) == len(model.stages) - 1
    names = {name for stage in model.stages for name, _ in stage.named_parameters()}
    assert {name for name, _ in model.whole().named_parameters()} == names


def test_checkpoints(tmp_path: Path) -> None:
    stages = [nwise.Chain({str(k): stage}) for k, stage in enumerate(parts()[0])]
    pipe = nwise.Pipeline(stages, parts()[1], strategy="2-wise")
    optimizer = torch.optim.Adam(pipe.parameters())
    pipe.step(X, target=Y)
    checkpoints = Checkpoints(tmp_path, pipe, optimizer, keep=2, asynchronous=False)
    assert checkpoints.save().name == "step-00000001"
    checkpoints.wait()
    found = checkpoints.resume()
    assert found is not None
    assert found.step == 1


TRAIN = "train digits --epochs 1 --checkpoint-every 1000 --json"


@pytest.mark.parametrize(
    "command",
    [
        TRAIN,
        "plan --costs transformer --devices 4 --strategy 2-wise end-to-end --microbatches 1 2 --json",
        "schedule --strategy 2-wise zero-bubble --stages 4 --microbatches 2 --json",
    ],
)
def test_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(shlex.split(command)) == 0
    json.loads(capsys.readouterr().out)


def test_train_on_two_processes(tmp_path: Path) -> None:
    done = forked(2, ["-m", "nwise", *shlex.split(TRAIN), "--runs", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"run", "heads"} <= json.loads(done.stdout).keys()


@pytest.mark.slow("starts torchrun")
def test_bench_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--stages 2 --strategy 2-wise --slot-ms 2 --batches 2 --rounds 1 --json".split()) == 0
    assert {"predicted_slots", "measured_slots", "efficiency"} <= json.loads(capsys.readouterr().out).keys()
