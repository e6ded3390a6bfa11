"""The benchmark of the runtime counts what it should."""

from __future__ import annotations

import json

import pytest

from benchmarks.runtime.bench import Case, measure
from benchmarks.runtime.command import main as bench
from benchmarks.runtime.ranks import cases
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


METHODS = {case.method for mib in (0, 4) for library, case in cases(4, mib) if library == "nwise"}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_virtual_stages_have_what_the_engine_reads(method: str) -> None:
    """Regression: the benchmark failed twice at what its stages lacked of `Stage`; only hours of its own runs showed it."""
    found = measure(Processes(2), Case(method=method, stages=2, ranks=1, slot_ms=0.1, batches=1, rounds=1))
    assert found.bytes_sent == found.bytes_predicted == [(0, 0)], "one process sends nothing"
