"""Real links: loss and cuts change no bit, and no rank waits beyond its limit (`benchmarks/wire`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wire.faults import FAULTS, LIMIT, expected, run
from benchmarks.wire.net import missing
from benchmarks.wire.small_run import STAGES

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "")


def test_links_are_measured_and_change_no_bit(tmp_path: Path) -> None:
    found = run(FAULTS["none"], tmp_path / "wire", expected(tmp_path / "alone"))
    assert found["codes"] == [0] * STAGES
    assert found["same_bits"]
    assert sorted(found["links"]) == ["0 to 1", "1 to 0", "1 to 2", "2 to 1"]
    for latency, bandwidth in found["links"].values():
        assert latency == pytest.approx(0.005, rel=0.3)
        assert bandwidth == pytest.approx(200e6 / 8, rel=0.3)


@pytest.mark.slow("real seconds of cut links; `python -m benchmarks.wire.faults` has a table")
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "none"])
def test_no_fault_changes_a_bit_or_hangs(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    found = run(fault, tmp_path / name, expected(tmp_path / "alone"))
    assert None not in found["codes"], "hangs"
    assert all(code != 0 for code in found["codes"]) if fault.ends else found["codes"] == [0] * STAGES
    assert found["same_bits"], "after a resume, where the ranks ended"
    assert found["seconds"] < 60 if not fault.ends else found["seconds"] < LIMIT + 20
