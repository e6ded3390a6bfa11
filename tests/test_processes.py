"""The processes of a pipeline, where one process and several share a method or have one each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import nwise
from launch import results
from nwise.runtime.launch import check_same
from nwise.runtime.processes import Processes
from ranks import loops


def test_stages_here_follow_the_placement() -> None:
    """Regression: the benchmark of the runtime ran interleaved schedules with the stages of the placement before."""
    processes = Processes(4)
    for placement in (0, 0, 0, 0), (0, 1, 1, 0):
        processes.placement = placement
        assert processes.here == tuple(k for k, place in enumerate(placement) if place == 0)


def test_a_table_has_every_bit_and_the_mean_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    third, rows = torch.tensor(1 / 3), {0: torch.tensor([1 / 3, torch.nan]), 1: torch.tensor([-0.0, 1e-45])}
    one = Processes(2)
    found = one.table(rows)
    assert found.dtype == torch.float32
    assert torch.equal(found[0, :1], third[None])
    assert found.isnan().tolist() == [[False, True], [False, False]]
    assert found[1].tolist() == rows[1].tolist()
    parts = [[[0, [1.0]]], [[0, [2.0]]], [[1, [5.0]]], [[1, [7.0]]]]
    monkeypatch.setattr(Processes, "gather", lambda self, name, value: parts)
    assert one.table({0: torch.zeros(1), 1: torch.zeros(1)}).tolist() == [[1.5], [6.0]]


def test_ranks_without_a_value_are_not_compared() -> None:
    check_same([{"inputs": None}, {"inputs": "a"}, {"inputs": "a"}])
    with pytest.raises(
        ValueError, match="`inputs` should be the same on every rank. Found 'a' on rank 1 and 'b' on rank 3; x."
    ):
        check_same([{"inputs": one} for one in (None, "a", None, "b")], {"inputs": "x"})


def test_loops_under_torchrun_do_as_in_one_process(tmp_path: Path) -> None:
    """Regressions: `summary` on one rank hung for twenty minutes; a pipeline could not be copied."""
    norms: list[float] = []
    pipe, model = loops.clipped(lambda pipe: norms.append(float(nwise.clip_grad_norm_(pipe, 0.05))))
    first, second = found = results(2, "loops.py", tmp_path)
    assert first["norms"] == second["norms"] == norms, "bit for bit those of one process"
    assert first["after gathering"] == model(loops.data(1)[0][0]).tolist()
    assert first["summary"] == pipe.summary()
    assert first["local"][:2] == [[0], pipe.credit.tolist()]
    assert first["averaged"] == ""
    assert first["average"] == loops.averaged(), "that of one process"
    expected = loops.gathered()
    assert [one["gathered"].pop("here") for one in (first, second)] == [[0], [1]]
    assert expected.pop("here") == [0, 1]
    assert first["gathered"] == second["gathered"] == expected, "losses and scores of all heads on every rank"
    for one in found:
        for name in ("copied", "pickled"):
            assert one[name][:2] == [True, True]
            assert all(
                "A copy of a pipeline under several processes should only be read" in text for text in one[name][2:]
            )
        assert re.search(
            "`seed` should be the same .*; call `torch.manual_seed` first, with one number on all", one["seed"]
        )
