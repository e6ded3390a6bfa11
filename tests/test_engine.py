"""The engine runs the actions of its schedule, and leaves no trace of a step that failed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from launch import RANKS, forked
from nwise.schedule import best
from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import Costs
from ranks.common import pipeline


def test_failed_step_leaves_no_trace_on_its_rank(tmp_path: Path) -> None:
    """The other ranks stop because their messages never arrive; all name the computation, not the message before it."""
    done = forked(2, [str(RANKS / "undone.py"), str(tmp_path)], tmp_path)
    assert "rank 0 (stage 0) stops: Rank 1 (stage 1) failed at I1(0.0) (input gradient" in done.stderr
    found = json.loads((tmp_path / "1.json").read_text())
    assert found["same"]
    assert found["gradients"] >= 4
    assert "the fault of this test" in found["error"]


def test_custom_schedule_is_run() -> None:
    found = best("2-wise", num_stages=3, num_microbatches=2, costs=Costs(1, 0, 1, 1))
    ran: list[Action] = []
    pipe = pipeline(3, "2-wise", 2, schedule=found)
    pipe.on_action = ran.append
    pipe.step(torch.randn(4, 6), target=torch.zeros(4, dtype=torch.int64))
    for k, actions in enumerate(found.work):
        assert [a for a in ran if a.stage == k] == [a for a in actions if a.kind is not Kind.UPDATE]
