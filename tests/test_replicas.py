"""Replicas of a stage: gradients of all kinds are those of plain PyTorch, and a difference between replicas is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launch import results
from nwise.runtime import replicas
from nwise.runtime.work import work_of
from nwise.schedule import PAPER, best
from nwise.schedule.actions import Kind
from nwise.stage.stage import Stage
from ranks import mesh
from ranks.replicated import CASES

REFUSALS = {
    "frozen": "Found stage.0.weight: [4, 4], torch.float32, trainable on rank 0 and [4, 4], torch.float32, frozen on",
    "other layers": "Found stage.2.weight: none on rank 0 and [2, 3], torch.float32, trainable on rank 1",
    "split": "Stages and heads should have plain parameters. Found a DTensor in a stage or head; leave tensor parallelism out",
    "frozen later": "Stage 0 should train the same parameters as in its first step, because its replicas rely on it",
}


def test_replicas_match_plain_training_and_differences_are_found(tmp_path: Path) -> None:
    """Regressions: sparse gradients failed; and in silence something else trained with a loss, mode or frozen parameter that
    differed, and with weights or buffers that one replica had otherwise later."""
    for found in results(2, "replicated.py", tmp_path):
        assert found["errors"].keys() == CASES.keys()
        for name, error in found["errors"].items():
            assert error < (2e-2 if name == "two precisions" else 1e-12), name
        assert found["refusals"].keys() == REFUSALS.keys()
        for name, text in REFUSALS.items():
            assert text in found["refusals"][name], name
            assert found["refusals"][name].count("All replicas") <= 1, "once"
        assert "`inputs` should be the same on every rank. Found" in found["inputs"]
        assert "ContractError: nwise.check: 1 difference" in found["loss"], "the stage of one rank, in both"
        assert "of shape [] in stage 1" in found["loss"]
        named = [[text.split(". ")[0] for text in texts] for texts in found["values"]]
        kind = "replicas with other values: stages.0"
        assert named == [[], [f"{kind}.weight"], [f"{kind}.mean"], []]


def test_replicas_match_more_micro_batches(tmp_path: Path) -> None:
    found = results(4, "mesh.py", tmp_path)
    for number, settings in enumerate(mesh.CASES):
        expected = mesh.replicas(*settings, alone=True)
        for stage in range(2):
            one, other = (found[2 * stage + replica][number] for replica in range(2))
            assert one == other, "replicas stay equal, bit by bit"
            for what in ("values", "gradients"):
                for name, numbers in one[what].items():
                    assert numbers == pytest.approx(expected[what][name], rel=1e-4, abs=1e-6), (settings, what, name)
    # Replicas once left out only what was not finite in their own part, and went apart.
    for stage in range(2):
        one, other = (found[2 * stage + replica][-2] for replica in range(2))
        assert one == other
        assert one["left"] == [True, False, True]
    # Deferred batch norm once moved the statistics of each replica by its own part.
    one, other = (found[replica][-1] for replica in range(2))
    assert one == other
    expected = mesh.statistics(alone=True)
    assert one.keys() == expected.keys() == {"stages.0.1.running_mean", "stages.0.1.running_var"}
    for name, numbers in one.items():
        assert numbers == pytest.approx(expected[name], rel=1e-5), name


def test_one_sum_begins_after_the_last_gradients_of_a_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It adds the gradients of earlier steps, and leaves a parameter without a gradient if no replica has one."""
    events: list[int] = []
    really = dist.all_reduce

    def all_reduce(flat: Tensor, **settings: Any) -> Any:
        events.append(flat.numel())
        return really(flat, **settings)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    torch.manual_seed(0)
    last = nn.Linear(3, 5)
    net, unused = nn.Sequential(nn.Linear(4, 3), last), nn.Parameter(torch.ones(7))
    net.register_parameter("unused", unused)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        stage = Stage(0, net, None, nn.functional.mse_loss)
        stage.survey(net, None)
        sums = replicas.Replicas(dist.group.WORLD, stage)
        for _ in range(2):
            sums.start()
            net(torch.ones(2, 4)).sum().backward()
            sums.begin()
            sums.finish()
        assert events == [4 * 3 + 3 + 3 * 5 + 5 + 7 + 5] * 2, "all parameters, and whether there is a gradient of each"
        assert last.bias.grad is not None
        assert torch.equal(last.bias.grad, torch.full((5,), 4.0)), "two steps of two samples"
        assert unused.grad is None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["2-wise", "end-to-end", "end-to-end-delay-1", "local"])
def test_the_sum_follows_the_last_task_that_adds_to_a_gradient(strategy: str) -> None:
    schedule = best(strategy, num_stages=4, num_microbatches=2, placement=(0, 1, 1, 0), costs=PAPER)
    tasks = schedule.graph.tasks
    for rank in range(2):
        work = work_of(schedule, rank)
        for call in work.calls:
            adding = [n for n in call if tasks[n].kind in (Kind.HEAD, Kind.WEIGHT_GRAD, Kind.BOTH)]
            last = {[n for n in adding if tasks[n].stage == k][-1] for k in {tasks[n].stage for n in adding}}
            assert last == work.completes & set(call)
