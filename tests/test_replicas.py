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
from nwise.stage.stage import Stage
from ranks import mesh
from ranks.replicated import CASES

REFUSALS = {
    "CrossEntropyLoss": "should be alike. Found loss: CrossEntropyLoss",
    "partial": "should be alike. Found loss: cross_entropy with {'ignore_index': 0} on rank 0",
    "frozen": "Found parameter stage.0.weight: [4, 4], torch.float32, trainable on rank 0 and [4, 4], torch.float32, frozen on",
    "evaluated": "Found mode of stage.0: training on rank 0 and evaluation on rank 1",
    "options": "Found options of stage.2: p=0.1, inplace=False on rank 0 and p=0.5, inplace=False on rank 1",
    "split": "Stages and heads should have plain parameters. Found a DTensor in a stage or head; leave tensor parallelism out",
    "evaluated later": "should have the same trainable parameters and modes. Found others on some ranks",
    "frozen later": "should have the same trainable parameters and modes. Found others on some ranks",
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


def test_replica_all_reduce_overlaps_backward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: the all-reduce started after the last pass, with no computation left to overlap."""
    events: list[str] = []
    really = dist.all_reduce

    def all_reduce(flat: Tensor, **settings: Any) -> Any:
        events.append(f"sum of {flat.numel() - 33}")  # a flag of the parameter, 32 of the replica
        return really(flat, **settings)

    monkeypatch.setattr(replicas, "BUCKET_BYTES", 1)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    torch.manual_seed(0)
    first, last = nn.Linear(4, 3), nn.Linear(3, 5)
    unused = nn.Parameter(torch.ones(7))
    first.weight.register_hook(lambda _: events.append("first weight"))
    learns: list[Tensor] = [*first.parameters(), *last.parameters()]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        for parameters in (learns, [unused, *learns]):
            events.clear()
            for parameter in parameters:
                parameter.grad = None
            stage = Stage(0, nn.Identity(), None, nn.functional.mse_loss, recompute=False)
            stage.learns = parameters
            sums = replicas.Replicas(group, stage)
            for _ in range(2):
                sums.start()
                with sums.summing(head=False):
                    last(first(torch.ones(2, 4))).sum().backward()
                sums.finish()
            assert len(events) == 2 * (len(parameters) + 1)
            assert max(events.index("sum of 5"), events.index("sum of 15")) < events.index("first weight")
            assert last.bias.grad is not None
            assert torch.equal(last.bias.grad, torch.full((5,), 4.0)), "two steps of two samples"
            assert unused.grad is None
    finally:
        dist.destroy_process_group()
