"""The runtime of many processes against the runtime of one: real gloo processes, started by torchrun."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import nwise
from launch import RANKS, forked, results
from nwise.flow import flows_for
from nwise.schedule.named import choose
from once import made_once
from ranks import edges, placements
from ranks.equality import CASES, case
from test_interchange import written


def test_multi_process_matches_single_process_bitwise(tmp_path: Path) -> None:
    num_stages = 4
    found = results(num_stages, "equality.py", tmp_path, str(num_stages))
    for number, (strategy, m, optimizer, order) in enumerate(CASES):
        # Where micro-batches are unlike, orders add their gradients up in different orders.
        same_sums = strategy != "rotating-2-microbatch"
        flows = flows_for(nwise.strategy(strategy.partition(", ")[0]), num_stages, m)
        expected = case(num_stages, strategy, m, optimizer, "depth-first" if same_sums else choose(order, flows))
        together: dict[str, str] = {}
        for rank in range(num_stages):
            here = found[rank][number]
            assert all(f".{name.split('.')[1]}." == f".{rank}." for name in here), "a rank holds its own stage only"
            together |= here
        different = {name for name in expected if together.get(name) != expected[name]}
        assert together.keys() == expected.keys()
        assert not different, (strategy, m, optimizer, order, different)


WHERE = r"(`on_action` of )?[A-Z]+{rank}[ (].*, stage {rank}, micro-batch [01]\) of step {step}"
FAULTS = {  # which of its neighbours first misses a rank that was killed, or finds it different, is chance
    "raise": rf"Rank {{rank}} \(stage {{rank}}\) failed at {WHERE}: ValueError: the fault of this test",
    "kill": r"Rank [0-3] .* lost rank {rank} \(last seen .* at .*stage [0-3], micro-batch [01]\) of step",
    "stall": rf"Rank {{rank}} \(stage {{rank}}\) has been at {WHERE} for more than 2 seconds",
    "stop": r"Rank {before} \(stage {before}\) has not heard of rank {rank} for 2 seconds; last seen ",
    # Either the watch or a message of another schedule reports it first.
    "differ": r"Rank ({rank} .* settings as rank [0-3]|[0-3] .* settings as rank {rank})\. Found 2-wise(-mean)? with M = 2 on r"
    r"|Rank ({rank} .* schedule\. Found {how} here and {how} on rank [0-3]"
    r"|[0-3] .* schedule\. Found {how} here and {how} on rank {rank}),",
}


def sentence_of(kind: str, rank: int, step: str) -> str:
    """A pattern of what all ranks say of a fault of one of four."""
    return FAULTS[kind].format(rank=rank, before=(rank - 1) % 4, step=step, how="2-wise(-mean)? with M = 2")


def faulty(kind: str, rank: int, after: int, folder: Path) -> tuple[list[str], float]:
    """Sentences of the ranks that stop, and the seconds from the fault to the end of the last process."""
    moment = folder / "moment"
    arguments = [str(RANKS / "faults.py"), "4", kind, str(rank), str(after), str(moment)]
    # Only these two are found by the limit; on a busy machine a rank that has no fault may be silent for two seconds, too.
    limit = "2" if kind in ("stall", "stop") else "30"
    done = forked(4, arguments, folder, environment={"NWISE_TIMEOUT": limit})
    seconds = time.time() - float(moment.read_text())
    assert done.returncode, done.stderr[-2000:]
    return re.findall(r"^nwise: (rank \d.*)$", done.stderr, re.MULTILINE), seconds


@pytest.mark.parametrize("kind", FAULTS)
def test_rank_fault_ends_all_ranks_with_the_same_error(kind: str, tmp_path: Path) -> None:
    said, seconds = faulty(kind, 2, 40, tmp_path)
    assert seconds < 60, "not the default limit of five minutes"
    assert len({line.split(" stops: ")[1] for line in said}) == 1, "all say the same, which is the first error"
    assert re.search(sentence_of(kind, 2, r"\d"), said[0]), said[0]
    assert len(said) >= (3 if kind in ("kill", "stop") else 4)


def test_error_between_steps_ends_all_ranks(tmp_path: Path) -> None:
    said, _ = faulty("raise", 3, -1, tmp_path)
    assert len(said) == 4
    assert all("Rank 3 (stage 3) failed between steps: ValueError: the fault of this test" in line for line in said)


def test_rank_leaving_early_ends_all_ranks(tmp_path: Path) -> None:
    """Regression: a leaving rank's last sends were read as its next messages, and training continued with zeros."""
    said, seconds = faulty("leave", 1, -1, tmp_path)
    assert seconds < 60, "not the default limit of five minutes"
    assert len(said) == 4
    call = r"(step \d|the end|the exchange of 'inputs and target').* on rank \d"
    assert re.search(f"Found {call} and {call};", said[0]), said[0]


def test_rank_that_stops_while_others_exchange_facts_is_ended(tmp_path: Path) -> None:
    """Regression: the exchange timed out before the watch did, so no rank ended the stopped process, and the launcher stalled."""
    said, seconds = faulty("stop", 2, 5, tmp_path)
    assert said
    assert seconds < 60


@pytest.mark.slow("two hundred starts, ten minutes")
@pytest.mark.timeout(7200)
def test_two_hundred_random_faults(tmp_path: Path) -> None:
    numbers = random.Random(0)
    for _ in range(200):
        kind, rank, after = numbers.choice(list(FAULTS)), numbers.randrange(4), numbers.randrange(1, 300)
        said, seconds = faulty(kind, rank, after, tmp_path)
        assert len({line.partition(" stops: ")[2] for line in said}) == 1, (kind, rank, after, said)
        assert re.search(sentence_of(kind, rank, r"\d+"), said[0]), (kind, rank, after, said[0])
        assert seconds < 60, (kind, rank, after)


# Six steps have every size of a batch, more steps than the longest delay, and a look at what is pending. Eight processes on
# two cores take longer than all other tests of this file.
@pytest.mark.parametrize(
    ("num_ranks", "num_steps"),
    [
        (4, 6),
        pytest.param(2, 20, marks=pytest.mark.slow("the same for longer")),
        pytest.param(4, 20, marks=pytest.mark.slow("the same for longer")),
        pytest.param(8, 20, marks=pytest.mark.slow("eight processes on few cores")),
    ],
)
def test_placements_and_delays_match_single_process_bitwise(num_ranks: int, num_steps: int, tmp_path: Path) -> None:
    """One process, or several stages on each of two, four or eight; gradients of any age, an order written by torch."""
    csv = written("ScheduleZBVZeroBubble", 4, 4, tmp_path / "zbv.csv")
    cases: list[Any] = [one for one in placements.CASES if one[0] == num_ranks]
    orders = [placements.find(n, where, name, m, order, csv) for n, where, name, m, _, order in cases]
    (tmp_path / "orders").write_bytes(pickle.dumps(orders))
    found = results(num_ranks, "placements.py", tmp_path, str(num_ranks), str(tmp_path / "orders"), str(num_steps))
    options: list[dict[str, Any]] = [{} for _ in cases]
    if num_ranks == 4:
        cases += placements.FROZEN
        options += [{"frozen": (1,) if i != 1 else (), "num_stages": 4} for i in range(len(placements.FROZEN))]
    for number, (settings, more) in enumerate(zip(cases, options, strict=True)):
        expected: Any = placements.case(*(*settings[:5], "depth-first"), num_steps=num_steps, **more)
        ranks = [one[number] for one in found]
        assert [one["drained"] for one in ranks] == [expected["drained"]] * num_ranks, settings
        together = {name: digest for one in ranks for name, digest in one["digests"].items()}
        assert sum(len(one["digests"]) for one in ranks) == len(together), "a rank holds its own stages only"
        different = {name for name, digest in expected["digests"].items() if together.get(name) != digest}
        assert not different, (settings, different)


def test_losses_reach_rank_0_without_waiting(tmp_path: Path) -> None:
    """gloo's receives never say that they are there before somebody waits for them, so that losses of several processes once
    were all written at the next evaluation, with its time."""
    first, second = results(2, "arrivals.py", tmp_path)
    assert first == {"before": [], "after": [[7, [[0.0, 1.0], [1.0, 2.0]]]]}
    assert second == {"before": [], "after": []}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_unused_process_groups(tmp_path: Path) -> None:
    """Every group of gloo has a thread that wakes up a hundred times a second; each process once had four for nothing. Nor does a
    channel take what others send through the default group."""
    for found in results(2, "groups.py", tmp_path):
        assert found["mesh"] == ["pp"]
        assert found["loops"] in (1, 0)  # the default group's; torch before 2.13 gives its threads no names
        assert (found["first"], found["other"], found["second"]) == (1.0, 7.0, 2.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = made_once(tmp_path_factory, "edges", lambda empty: results(edges.A, "edges.py", empty))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(edges.A)]


@pytest.mark.parametrize("name", edges.CASES)
def test_multi_process_matches_single_process(name: str, found: list[Any]) -> None:
    expected = json.loads(json.dumps(edges.CASES[name]()))
    together: dict[str, Any] = {}
    for rank in range(edges.A):
        here = found[rank][name]
        assert {key.split(".")[1] for key in here if "." in key} <= {str(rank)}
        assert all(together.setdefault(key, value) == value for key, value in here.items()), "the same on every rank"
    assert together == expected
