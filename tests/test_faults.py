"""What is not finite, what is stopped, and what is gone on from at the command line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import nwise
from launch import elastic, forked, results, signal_when
from nets import equal
from nwise.app.cli import run as command
from nwise.app.recipes import Mlp, Recipe, Sgd, recipe
from nwise.app.report.display import PlainDisplay
from nwise.app.training import Callback, CheckpointPolicy, LearningRate, Run, StoppedError, Trainer, new_run
from nwise.checkpoint import gather_weights
from nwise.training import NonFiniteGuard, NotFiniteError
from ranks import finite, stopped
from ranks.common import batches, pipeline

TINY = dataclasses.replace(
    recipe("digits"), model=Mlp(width=16), max_steps=12, batch_size=32, strategy="2-wise", eval_every=0.1, log_every=1
)
OPTIONS = ["--max-steps", "12", "--batch-size", "32", "--eval-every", "0.1", "--log-every", "1", "--filters", "4"]
CONVOLUTIONS = dataclasses.replace(recipe("digits"), max_steps=12, batch_size=32, eval_every=9, channels_last=True)
ALWAYS = CheckpointPolicy(checkpoint_every=4, keep=99)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a run but its lock, which names the time."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def parameters(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.pipe.parameters()]


class Stops(Callback):
    """As a signal would, after a step."""

    def __init__(self, after: int) -> None:
        self.after, self.said = after, ""

    def started(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def stepped(self, step: int, losses: Tensor) -> None:
        if step == self.after:
            self.trainer.stop()

    def resumed(self, step: int, changes: str) -> None:
        self.said = f"{step}: {changes}"


# Gone on from


@pytest.mark.parametrize(
    ("config", "after"),
    [
        (TINY, 3),
        (dataclasses.replace(TINY, optimizer=Sgd(lr=0.05, drops=(0.4, 0.8)), clip=0.5, stage_lr=(1, 0.5, 1, 1)), 7),
        (dataclasses.replace(TINY, optimizer=Sgd(lr=0.05, plateau_epochs=1), eval_every=0.02, batch_size=64), 6),
        # Before, at and after a switch.
        *((dataclasses.replace(TINY, strategy="local@6,end-to-end", then=Sgd(lr=0.01)), after) for after in (3, 6, 7)),
        *((dataclasses.replace(TINY, strategy="local@7,end-to-end"), after) for after in (6, 7)),
        *((dataclasses.replace(TINY, strategy="2-wise-hogwild"), after) for after in (3, 6)),
        # The turns of a cycle.
        *((dataclasses.replace(TINY, strategy="rotating-2", microbatches=2), after) for after in (3, 6)),
    ],
)
def test_resume_after_stop_is_bitwise(config: Recipe, after: int, tmp_path: Path) -> None:
    hogwild = "hogwild" in config.strategy  # whose checkpoints end the mini-batches under way
    whole, first, second = Trainer(config), Trainer(config), Trainer(config)
    expected = new_run(config, tmp_path)
    policy = CheckpointPolicy(checkpoint_every=after) if hogwild else None
    scores = whole.train(expected, policy=policy)
    run = new_run(config, tmp_path)
    with pytest.raises(StoppedError, match=f"Stopped at step {after}"):
        first.train(run, (Stops(after),), ALWAYS if not hogwild else CheckpointPolicy())
    assert run.status == "stopped"
    run.record(kind="train", step=after + 2)  # of a step that is not in the checkpoint
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')  # whoever wrote it was killed
    callback = Stops(-1)
    again = second.train(run, (callback,), policy, resume=True)
    assert callback.said == f"{after}: "
    assert again == scores
    assert equal(parameters(whole), parameters(second))
    untimed = [[{k: v for k, v in r.items() if k != "seconds"} for r in one.metrics()] for one in (expected, run)]
    assert untimed[0] == untimed[1]
    assert run.status == "done"


@pytest.mark.parametrize("config", [TINY, CONVOLUTIONS], ids=["mlp", "channels last"])
def test_resume_extends_a_finished_run(config: Recipe, tmp_path: Path) -> None:
    """Regression: the file format rejected tensors that are not contiguous, as with channels last."""
    run = new_run(config, tmp_path)
    Trainer(config).train(run, policy=CheckpointPolicy())
    longer, whole = (Trainer(dataclasses.replace(config, max_steps=20)) for _ in range(2))
    longer.train(run, resume=True)
    whole.train()
    assert equal(parameters(longer), parameters(whole))
    assert run.recipe.max_steps == 20
    assert json.loads((run.folder / "run.json").read_text())["resumed"][0]["step"] == 12


@pytest.mark.parametrize(
    ("change", "policy", "message"),
    [
        ({"max_steps": 5}, CheckpointPolicy(), "should give more than the 12 steps that were done. Found 5"),
        ({"model": Mlp(width=17), "max_steps": 20}, CheckpointPolicy(), "The network should be that of"),
        ({}, None, "should hold a checkpoint to resume from. Found none"),
    ],
)
def test_refused_resume_leaves_the_run_unchanged(change: Any, policy: Any, message: str, tmp_path: Path) -> None:
    """Regression: a run without checkpoints was started over, which deleted its records and weights."""
    run = new_run(TINY, tmp_path)
    Trainer(TINY).train(run, policy=policy)
    files = contents(run.folder)
    with pytest.raises(ValueError, match=message):
        Trainer(dataclasses.replace(TINY, **change)).train(run, resume=True)
    assert contents(run.folder) == files
    if policy is None:
        Trainer(TINY).train(run, resume=True, allow_restart=True)  # as after a restart


def test_resume_from_checkpoint_without_trainer_facts_raises(tmp_path: Path) -> None:
    run, trainer = new_run(TINY, tmp_path), Trainer(TINY)
    nwise.checkpoint.Checkpoints(run.folder / "checkpoints", trainer.pipe).save()
    with pytest.raises(ValueError, match="should have 'rate' among its facts. Found None"):
        trainer.train(run, resume=True)


@pytest.mark.parametrize("options", [{"checkpoint_every": -1}, {"checkpoint_minutes": -1.0}, {"keep": 0}])
def test_invalid_checkpoint_policy_raises(options: Any) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}` should be .* Found {value}"):
        CheckpointPolicy(**options)


def test_checkpoint_minutes_saves_by_time(tmp_path: Path) -> None:
    run = new_run(TINY, tmp_path)
    Trainer(TINY).train(run, policy=CheckpointPolicy(checkpoint_minutes=1e-9, keep=99))
    assert len(list((run.folder / "checkpoints").glob("step-*"))) == 13  # from before the first step on


def test_failed_run_keeps_weights_of_last_test(tmp_path: Path) -> None:
    config = dataclasses.replace(recipe("digits"), max_steps=30, batch_size=32, optimizer=Sgd(lr=1e30))
    run = new_run(config, tmp_path)
    with pytest.raises(NotFiniteError, match="should be a finite number"):
        Trainer(config).train(run, policy=CheckpointPolicy(checkpoint_every=1))
    assert all(t.isfinite().all() for t in run.weights().values() if t.is_floating_point())


def test_resume_with_another_strategy_uses_its_rates(tmp_path: Path) -> None:
    """Regression: the steps of the old strategy's phase counted towards the phase of the new one."""
    config = dataclasses.replace(TINY, optimizer=Sgd(lr=0.1, drops=(0.5,)), strategy="local@4,end-to-end")
    for before, now, rates in (
        ("local@4,end-to-end", "end-to-end", [0.01] * 5),
        ("end-to-end", "local@8,end-to-end", [0.01] + [0.1] * 2 + [0.01] * 2),
    ):
        run = new_run(config, tmp_path)
        with pytest.raises(StoppedError, match="."):
            Trainer(dataclasses.replace(config, strategy=before)).train(run, (Stops(7),), CheckpointPolicy())
        Trainer(dataclasses.replace(config, strategy=now)).train(run, resume=True)
        found = [r["lr"] for r in run.metrics() if r["kind"] == "train" and r["step"] > 7]
        assert found == pytest.approx(rates)


def test_plateau_drops_restore_with_a_zero_rate_group() -> None:
    """Regression: drops were derived from the rate of the first group, which may be zero."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.0, 0.1), strict=True)]
    config = Sgd(plateau_epochs=1)
    optimizers = [torch.optim.SGD([dict(group) for group in groups], lr=0.1) for _ in range(2)]
    rate, other = (LearningRate(config, optimizer, 9) for optimizer in optimizers)
    for loss in (1.0, 2.0, 2.0):
        rate.evaluated(loss)
    other.restore(json.loads(json.dumps(rate.state())), 3)
    assert [[g["lr"] for g in o.param_groups] for o in optimizers] == [[0.0, pytest.approx(0.001)]] * 2
    with pytest.raises(ValueError, match="The state of a rate should have its drops"):
        other.restore({}, 3)


# The command line


def text(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    return out + err


def test_resume_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["--runs", str(tmp_path)]
    assert command(["train", "digits", *OPTIONS, *runs]) == 0
    (folder,) = tmp_path.iterdir()
    assert command(["train", "--resume", str(folder), "--max-steps", "15", "--strategy", "3-wise"]) == 0
    assert "resuming at step 12: strategy 2-wise-mean -> 3-wise" in text(capsys)
    assert Run.open(folder).recipe.strategy == "3-wise"
    assert command(["train", f"--resume={folder}", "--max-steps", "18", "--cut", "1", "2", "1"]) == 0
    assert "stages 4 -> 3; dropped the heads of the former stages 1" in text(capsys)
    assert command(["evaluate", str(folder)]) == 0
    assert command(["train", "cifar10-convnet", "--resume", str(folder)]) == 2
    assert "`RECIPE` should be the run's own, 'digits', or be left out. Found 'cifar10-convnet'" in text(capsys)
    assert command(["train", "--resume", str(tmp_path / "nothing")]) == 2
    assert "A run should be a folder with a run.json" in text(capsys)
    assert command(["train", "--resume", str(folder), "--timeline", "3"]) == 2
    assert "`timeline` should be set when a run starts" in text(capsys)
    assert command(["train", "--resume", str(folder), "--cut", "9"]) == 2
    assert "`cut` should have numbers of at least 1 whose sum is the network's 4 stages. Found (9,)" in text(capsys)


def test_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    """Only one rank gets the signal; all ranks must stop after the same number of steps."""
    runs = tmp_path / "runs"
    trained = lambda: any(path.read_text().count("train") > 3 for path in runs.glob("*/metrics.jsonl"))  # noqa: E731
    sender = signal_when(trained, signal.SIGTERM, tmp_path, rank=1)
    endless = ["--epochs", "1000", "--log-every", "1", "--filters", "4", "--runs", str(runs), "--cut", "2", "2"]
    done = forked(2, ["-m", "nwise", "train", "digits", *endless], tmp_path)
    sender.join()
    (folder,) = runs.iterdir()
    assert "as requested. Resume with `nwise train --resume" in done.stderr
    assert Run.open(folder).status == "stopped"
    (one,) = (folder / "checkpoints").glob("step-*")
    assert len(list(one.glob("*.safetensors"))) == 2


def test_stop_breaks_off_a_test_on_all_ranks_after_the_same_batch(tmp_path: Path) -> None:
    """A process test, as ranks tell one another once a second. The lines of the tests are those of one process.

    Regression: a stop waited for the end of the test, and the lines had losses of an earlier step than those of one process.
    """
    first, second = results(2, "stopped.py", tmp_path)
    assert first["stopped"] == second["stopped"] == "Stopped at step 0, before its test was done, as requested."
    assert first["batches"] == second["batches"] < 45
    console = Console(file=io.StringIO(), width=200)
    Trainer(stopped.CONFIG).train(callbacks=(PlainDisplay(console),))
    assert isinstance(console.file, io.StringIO)
    lines = [line.partition(" test ")[2] for line in console.file.getvalue().splitlines()]
    assert first["lines"] == [line for line in lines if line]
    assert ["training loss" in line for line in first["lines"]] == [False, True, True, True]  # steps 0, 5, 10, 12


# What is not finite


def test_on_nan_stop_names_stage_and_micro_batch() -> None:
    pipe = pipeline(4, "2-wise", 2)
    told: list[dict[str, Any]] = []
    guard, ignores = NonFiniteGuard(pipe, "stop", told.append), NonFiniteGuard(pipe, "ignore")
    (x, y), *_ = batches(1)
    pipe.step(x, target=y)
    assert guard() == []
    x[-1] = float("nan")
    pipe.step(x, target=y)
    assert ignores() == []
    message = r"The loss of stage 1's head should be .* Found nan in micro-batch 1 of step 1;"
    with pytest.raises(NotFiniteError, match=message):
        guard()
    (facts,) = told
    assert (facts["stage"], facts["head"], facts["microbatch"], facts["step"]) == (1, 1, 1, 1)
    assert facts["losses"]["stage 1, micro-batch 1"] == "nan"
    assert {"name", "not_finite", "gradient_not_finite", "gradient_largest"} == set(facts["parameters"][0])
    with pytest.raises(ValueError, match="`on_nan` should be stop, skip or ignore. Found 'hope'"):
        NonFiniteGuard(pipe, "hope")  # type: ignore[arg-type]


# A gradient of nan at stage 3 spoils those of the stages that its loss reaches, and what shares a loss with any of them.
# A guard follows a switch.
SKIPPED = {
    "local": [3],
    "2-wise": [1, 2, 3],
    "3-wise": [0, 1, 2, 3],
    "end-to-end": [0, 1, 2, 3],
    "local, then end-to-end": [0, 1, 2, 3],
}


@pytest.mark.parametrize("strategy", SKIPPED)
@pytest.mark.parametrize("what", ["gradient", "value"])
def test_on_nan_skip_skips_stages_sharing_a_loss(strategy: str, what: str) -> None:
    found = finite.trained(strategy, what)
    assert found == {"left_out": [[], SKIPPED[strategy], []], "same": [[], SKIPPED[strategy], []], "finite": True}


def test_non_finite_run_writes_post_mortem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["train", "digits", "--lr", "1e30", *OPTIONS, "--runs", str(tmp_path)]) == 1
    said = text(capsys)
    assert "should be a finite number. Found" in said
    assert "post-mortem.json" in said
    (folder,) = tmp_path.iterdir()
    facts = json.loads((folder / "post-mortem.json").read_text())
    assert {"step", "stage", "head", "microbatch", "losses", "parameters", "samples", "lr"} == set(facts)
    assert len(facts["samples"]) == 32
    assert Run.open(folder).status == "failed"


def test_skipped_steps_are_recorded(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, optimizer=Sgd(lr=1e30, momentum=0.0), on_nan="skip", strategy="local")
    run = new_run(config, tmp_path)
    Trainer(config).train(run)
    assert any(r["kind"] == "skipped" and r["stages"] for r in run.metrics())


def test_on_nan_skip_agrees_across_ranks(tmp_path: Path) -> None:
    ranks = results(4, "finite.py", tmp_path, *SKIPPED)
    for strategy, left_out in SKIPPED.items():
        for key in ("left_out", "same"):
            found = [[k for one in ranks for k in one[strategy][key][step]] for step in range(3)]
            assert found == [[], left_out, []], (strategy, key)
        assert all(one[strategy]["finite"] for one in ranks)


def test_on_nan_stop_on_one_rank_stops_all(tmp_path: Path) -> None:
    done = forked(
        4, ["-m", "nwise", "train", "digits", "--filters", "4", "--lr", "1e30", "--runs", str(tmp_path)], tmp_path
    )
    assert done.returncode
    assert "should be a finite number. Found" in done.stderr
    (folder,) = tmp_path.glob("digits*")
    assert json.loads((folder / "post-mortem.json").read_text())["stage"] in range(4)


# Memory


def test_live_tensor_count_is_constant_over_steps() -> None:
    import gc

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    gc.freeze()  # millions of objects of other tests, which would be looked through at every step
    pipe = pipeline(4, "2-wise", 1)
    update = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    counts = []
    for x, y in batches(5):
        pipe.step(x, target=y)
        update.step()
        update.zero_grad()
        counts.append(alive())
    assert len(set(counts[1:])) == 1
    assert counts[1] > 10, "the tensors of the pipeline are counted"


@pytest.mark.slow("two thousand steps, minutes")
def test_memory_is_constant_over_two_thousand_steps(tmp_path: Path) -> None:
    records = script("soak.py", tmp_path)
    assert [one["rank"] for one in records] == [0, 1, 2, 3]
    assert all(one["deviation"] < 0.01 for one in records)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# Killed


@pytest.mark.parametrize(
    "numbers",
    [
        # The first one hits during start-up.
        pytest.param(["--first", "2", "--runs", "3"], marks=pytest.mark.slow("three runs that are resumed, a minute")),
        pytest.param(["--runs", "100"], marks=pytest.mark.slow("a hundred killed runs, half an hour")),
    ],
    ids=["three", "a hundred"],
)
@pytest.mark.timeout(3600)
def test_killed_runs_resume_bitwise(numbers: list[str], tmp_path: Path) -> None:
    """Run kills of `benchmarks/faults`."""
    records = script("kills.py", tmp_path, *numbers)
    assert [one["identical"] for one in records] == [True] * int(numbers[-1])
    assert len({one["rank"] for one in records}) > 1
    assert len(records) < 100 or any(one["while_writing"] for one in records)


def script(name: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records of a script of `benchmarks/faults`."""
    path, out = Path(__file__).parents[1] / "benchmarks" / "faults" / name, folder / "records.jsonl"
    command = [sys.executable, str(path), *arguments, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_torchrun_restart_resumes_a_killed_run(tmp_path: Path) -> None:
    """Regression: torchrun keeps its store, so the second attempt connected to the addresses of the first."""
    runs = tmp_path / "runs"
    arguments = ["-m", "nwise", "train", "digits", "--cut", "2", "2", "--max-steps", "120", "--checkpoint-every", "20"]
    arguments += ["--eval-every", "9", "--filters", "4", "--runs", str(runs)]

    sender = signal_when(lambda: any(runs.glob("*/checkpoints/step-*[0-9]")), signal.SIGKILL, tmp_path, rank=1)
    done = elastic(2, arguments, tmp_path, restarts=1)
    sender.join()
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stdout
    (folder,) = runs.iterdir()
    run = Run.open(folder)
    steps = [r["step"] for r in run.metrics() if r["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert run.status == "done"
    (noted,) = json.loads((folder / "run.json").read_text())["resumed"]
    whole = Trainer(run.recipe)
    whole.train()
    assert noted["step"] >= 20
    assert all(torch.equal(t, run.weights()[name]) for name, t in gather_weights(whole.pipe).items())
