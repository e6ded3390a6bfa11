"""The benchmark of the runtime counts what it should."""

from __future__ import annotations

import json

import pytest

from benchmarks.runtime.bench import Case, measure
from benchmarks.runtime.command import main as bench
from nwise.runtime.processes import Processes


@pytest.mark.slow("a developer's instrument, which starts torchrun twice")
def test_bench_runtime_counts_slots_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Assert counts, but no time that a busy machine could spoil."""
    assert bench(["--stages", "3", "--slot-ms", "5", "--batches", "4", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_slots"] == 4
    assert found["measured_slots"] > 3.99, "time does not run faster"
    assert found["efficiency"] == pytest.approx(found["predicted_slots"] / found["measured_slots"])
    assert found["bytes_sent"] == found["bytes_predicted"] == [[8, 0], [8, 8], [0, 8]]
    assert bench(["--stages", "2", "--slot-ms", "2", "--batches", "2", "--rounds", "1"]) == 0
    assert "as predicted" in capsys.readouterr().out


def test_virtual_stages_have_what_the_engine_reads() -> None:
    """Regression: the benchmark failed, because its stages lacked `Stage.learns`; only a slow test ran it."""
    found = measure(Processes(2), Case(stages=2, ranks=1, slot_ms=0.1, batches=1, rounds=1))
    assert found.predicted_slots == 4
    assert found.bytes_sent == found.bytes_predicted == [(0, 0)], "one process sends nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "0"], "`stages` should be an integer of at least 1"),
        (["--slot-ms", "0"], "`slot_ms` should be above 0"),
        (["--message-mib", "-1"], "`message_mib` should be from 0"),
        (["--strategy", "3wise"], "`strategy` should be one like"),
        (["--costs", "1,2"], "Costs should have"),
    ],
)
def test_bad_benchmarks_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(arguments) == 2
    assert message in capsys.readouterr().err
