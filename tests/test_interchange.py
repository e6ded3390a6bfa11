"""Schedules in the format of `torch.distributed.pipelining`, read from what its own classes write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torchs

from nwise.app import cli
from nwise.app.report.interchange import read_csv, write_csv
from nwise.schedule import Costs, baseline, best, simulate, validate

COSTS = Costs(1, 0, 1, 1)


class FakeStage:
    """As much of torch's stage as its schedules look at before they run."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, num_stages, num_ranks, 0
        self.is_first, self.is_last, self.device = index == 0, index == num_stages - 1, torch.device("cpu")
        self.has_backward, self.group = True, None
        self.stage_index_to_group_rank: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


def written(kind: str, num_ranks: int, microbatches: int, path: Path, **options: Any) -> str:
    """What torch writes for two stages on a rank."""
    size = 2 * num_ranks
    indices = (0, size - 1) if kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else (0, num_ranks)
    stages = [FakeStage(index, size, num_ranks) for index in indices]
    schedule = getattr(torchs, kind)(stages, microbatches, loss_fn=lambda y, t: 0)
    schedule._dump_csv(str(path), **options)
    return path.read_text()


def written_plain(kind: str, num_ranks: int, microbatches: int) -> str:
    """What torch's order for one stage on a rank looks like in the same format, for which torch itself has no writer."""
    schedule = getattr(torchs, kind)(FakeStage(0, num_ranks, num_ranks), microbatches, loss_fn=lambda y, t: 0)
    order: dict[int, list[Any]] = schedule._get_pipeline_order()
    return "\n".join(",".join("" if a is None else str(a) for a in order[rank]) for rank in range(num_ranks))


def renumbered(text: str) -> str:
    """The same with the last rank's forwards numbered from 0."""
    *others, last = text.split("\n")
    return "\n".join([*others, re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", last)])


@pytest.mark.parametrize(("kind", "name"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")])
def test_gpipe_and_1f1b_are_those_of_torch(kind: str, name: str) -> None:
    for num_ranks, microbatches in ((2, 4), (4, 8), (8, 32)):
        text = written_plain(kind, num_ranks, microbatches)
        if name == "1f1b":
            # torch 2.13 numbers the last rank's forwards from 1 to M in this list; its runtime has a loop apart.
            with pytest.raises(ValueError, match=rf"Found no F{num_ranks - 1}\(0\)"):
                read_csv(text, kind)
            text = renumbered(text)
        theirs = read_csv(text, kind)
        ours = baseline(name, num_stages=num_ranks, num_microbatches=microbatches, costs=COSTS)
        # GPipe: (M + A - 1) forwards and as many backward passes; 1F1B is as long with fewer in flight.
        assert theirs.with_costs(COSTS).period == ours.period == 3 * (microbatches + num_ranks - 1)
        assert max(theirs.in_flight) == max(ours.in_flight) == (microbatches if name == "gpipe" else num_ranks)


# Period with F = I = W = 1 on four ranks with eight micro-batches, which take 48 slots, and in flight on a stage at most.
TORCHS = {
    "ScheduleZBVZeroBubble": (48, 8),
    "ScheduleDualPipeV": (51, 8),
    "ScheduleInterleaved1F1B": (57, 8),
    "ScheduleInterleavedZeroBubble": (51, 8),
    "ScheduleLoopedBFS": (57, 8),
}


@pytest.mark.parametrize("kind", TORCHS)
def test_schedules_of_torch_are_read_timed_and_improved(kind: str, tmp_path: Path) -> None:
    for num_ranks, microbatches in ((2, 4), (4, 8), (4, 32)):
        schedule = read_csv(written(kind, num_ranks, microbatches, tmp_path / "s.csv"), kind)
        assert (schedule.num_stages, schedule.num_ranks) == (2 * num_ranks, num_ranks)
        validate(schedule)
        found = schedule.with_costs(COSTS)
        assert found.lower_bound <= found.period
        assert simulate(schedule.with_costs(COSTS), cycles=8).period == pytest.approx(found.period, rel=0.01)
        assert read_csv(write_csv(schedule), kind) == schedule
        ours = best(
            "end-to-end", num_stages=2 * num_ranks, num_microbatches=microbatches, costs=COSTS,
            placement=schedule.placement,
        )  # fmt: skip
        assert ours.optimal, "no order of these actions on these ranks is faster"
        assert max(ours.in_flight) <= max(found.in_flight)
        if (num_ranks, microbatches) == (4, 8):
            assert (found.period, max(found.in_flight)) == TORCHS[kind]


def test_interleaved_1f1b_is_that_of_torch(tmp_path: Path) -> None:
    """List scheduling took 59 slots instead of 57 on 4 ranks with M = 8, and 78 instead of 68 on 8 ranks with M = 8."""
    for num_ranks, microbatches in ((2, 4), (4, 8), (8, 8), (4, 32)):
        theirs = read_csv(written("ScheduleInterleaved1F1B", num_ranks, microbatches, tmp_path / "s.csv"))
        ours = baseline(
            "interleaved-1f1b",
            num_stages=2 * num_ranks,
            num_ranks=num_ranks,
            num_microbatches=microbatches,
            costs=COSTS,
        )
        assert ours.work == theirs.work


def test_both_formats_of_torch_are_one_schedule(tmp_path: Path) -> None:
    texts = [
        written("ScheduleInterleaved1F1B", 2, 4, tmp_path / f"{name}.csv", format=name)
        for name in ("compute_only", "compute_comms")
    ]
    assert "SEND_F" in texts[1]
    assert read_csv(texts[0]) == read_csv(texts[1])


def test_torch_reads_what_nwise_writes(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    found = baseline("zb-v", num_stages=4, num_ranks=2, num_microbatches=6, costs=COSTS)
    path.write_text(write_csv(found))
    stages = [FakeStage(index, 4, 2) for index in (0, 3)]
    schedule: Any = torchs.ScheduleZBVZeroBubble(stages, 6, loss_fn=lambda y, t: 0)  # type: ignore[arg-type]
    schedule._load_csv(str(path), format="compute_only")
    cells = [[str(action) for action in schedule.pipeline_order[rank] if action is not None] for rank in range(2)]
    assert cells == [line.split(",") for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", r"A cell should be a stage, one of F, I, W, B, and a micro-batch, like 0F0. Found '0X0'"),
        ("0F0,0B0\n0F1,0B1", "A stage should be on one rank. Found stage 0 on 0 and 1"),
        ("0F0,0B0\n1F0,1I0", r"Found no W1\(0\)"),
        ("0F0,2F0", "Found 2 of 3 stages and 1 micro-batches"),
        ("0F99999,0B99999", "Found 1 of 1 stages and 100000 micro-batches"),
        ("0B0,0F0\n1F0,1B0", r"Found W0\(0\) without the activation|deadlock|before"),
    ],
)
def test_broken_csv_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(text)


def test_other_strategies_are_not_written() -> None:
    for name in ("2-wise", "end-to-end-delay-1"):
        with pytest.raises(ValueError, match="should be end-to-end and without delay to be written as CSV"):
            write_csv(best(name, num_stages=3, num_microbatches=3, costs=COSTS))


def test_csv_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zb-v.csv"
    arguments = ["schedule", "--strategy", "zb-v", "--stages", "4", "--ranks", "2", "--microbatches", "4"]
    assert cli.run([*arguments, "--out", str(path)]) == 0
    assert path.read_text().startswith("0F0,")
    capsys.readouterr()
    assert cli.run(["schedule", "--csv", str(path), "--costs", "1,0,1,1"]) == 0
    out = capsys.readouterr().out
    assert "zb-v.csv" in out
    assert "rank 1" in out
    # Names of files were read as markup: words in square brackets were lost, and an end tag was a traceback.
    (tmp_path / "[a[").mkdir()
    odd = path.rename(tmp_path / "[a[" / "b].csv")
    assert cli.run(["schedule", "--csv", str(odd), "--costs", "1,0,1,1", "--lists"]) == 0
    assert capsys.readouterr().out.count("b].csv") == 2
    assert cli.run(["schedule", "--csv", str(odd), "--ranks", "3"]) == 2
    assert "`ranks` should not be given with `csv`, whose file has one. Found 3" in capsys.readouterr().err
    assert cli.run(["schedule", "--strategy", "2-wise", "--out", str(tmp_path / "new" / "2-wise.csv")]) == 2
    assert "should be end-to-end" in capsys.readouterr().err
    assert not (tmp_path / "new").exists(), "nothing is written"
