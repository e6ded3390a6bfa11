"""The paper's timing model: its formula, its fit, its table of the best M, and real schedules that meet it."""

from __future__ import annotations

import pytest

import nwise
from experiments.t.printed import best_table
from nwise.schedule import PAPER, Slot, best, fit_slot, paper_time, simulate


def slots(strategy: str | nwise.Strategy, num_stages: int, num_microbatches: int) -> float:
    return best(strategy, num_stages=num_stages, num_microbatches=num_microbatches, costs=PAPER).period


def test_slots_per_batch_match_figure_3() -> None:
    """Figure 3 of the paper: end-to-end 2A, Hogwild 2, 1-wise 2, 2-wise 4, 3-wise 6 slots."""
    for num_stages in (4, 8):
        found = [slots(name, num_stages, 1) for name in ("end-to-end", "hogwild", "local", "2-wise", "3-wise")]
        assert found == [2 * num_stages, 2, 2, 4, 6]


_POWERS = (1, 2, 4, 8, 16, 32)
FEW_CELLS = [(1, _POWERS), (2, _POWERS), (5, _POWERS), (8, (1, 4, 8))]


@pytest.mark.parametrize(
    ("num_stages", "counts"),
    [*FEW_CELLS, *(pytest.param(a, _POWERS, marks=pytest.mark.slow("more of the same")) for a in range(3, 17))],
)
def test_best_schedule_meets_paper_formula(num_stages: int, counts: tuple[int, ...]) -> None:
    """All 816 cells: A <= 16, N <= A, M a power of two up to 32, simulated and not only summed up."""
    for n in range(1, num_stages + 1):
        for m in counts:
            found = best(nwise.NWise(n), num_stages=num_stages, num_microbatches=m, costs=PAPER)
            assert found.period == found.lower_bound == paper_time(num_stages, m, n)
            # From an empty pipeline the period is reached once the first mini-batch has gone through.
            assert simulate(found, cycles=4).period == found.period


def test_paper_time_by_hand() -> None:
    assert paper_time(4, 4, 4) == 2 * (4 + 4 - 1)
    assert paper_time(8, 4, 3) == 4 * 4
    assert paper_time(4, 4, 3) == (2 + 4 - 3) * 4 + 2 * (6 - 4 - 1)
    assert paper_time(3, 1, 9) == paper_time(3, 1, 3) == 6
    with pytest.raises(ValueError, match="`n` should be an integer of at least 1. Found 0"):
        paper_time(3, 1, 0)


def test_rotating_blocks_cost_what_their_blocks_cost() -> None:
    assert slots(nwise.Rotating(2), 8, 1) == slots(nwise.Blocks(2), 8, 1) == 4
    assert slots(nwise.Hogwild(nwise.NWise(2)), 8, 1) == 3


def test_nine_cells_of_printed_table_differ_from_formula() -> None:
    """A printed cell may cover several A; it counts as different if any of them differs."""
    off = {(cell["method"], cell["num_stages"]) for cell in best_table() if cell["loss"] > 1e-12}
    expected = {("3-wise", a) for a in (3, 4)} | {("4-wise", a) for a in (4, 5, 6)} | {("5-wise", a) for a in (2, 4, 5)}
    assert off == expected | {("5-wise", a) for a in (6, 7, 8)}
    # of 36 cells: two, three (4; 5; 6-11) and four (2; 4; 5; 6-11)
    groups = [range(a, a + 1) for a in (2, 3, 4, 5)] + [range(6, 12), range(12, 31)]
    cells = {(method, next(i for i, group in enumerate(groups) if a in group)) for method, a in off}
    assert len(cells) == 9
    losses = {
        (c["method"], c["num_stages"]): (c["printed"], c["formula"], round(100 * c["loss"], 1)) for c in best_table()
    }
    assert losses["3-wise", 3] == (4, 8, 11.9)
    assert losses["4-wise", 5] == (2, 8, 28.4)
    assert losses["5-wise", 5] == (4, 16, 31.4)
    assert losses["5-wise", 8][:2] == (2, 4)


def test_paper_speedup_of_fifty_per_cent_at_fifteen_stages() -> None:
    assert Slot().speedup(15, 2) == pytest.approx(1.4992, abs=5e-5)
    assert Slot().speedup(3, 2) < 1 < Slot().speedup(8, 2)
    assert Slot().speedup(4, 4) == 1


def test_fit_slot_recovers_true_constants() -> None:
    true = Slot(0.02, 1.5)
    cells = [(a, m, n) for a in (4, 6) for m in (1, 2, 4, 8, 16) for n in (2, a)]
    found = fit_slot({cell: true.batch_seconds(*cell) for cell in cells})
    assert (found.c0, found.c1) == pytest.approx((0.02, 1.5))
    noisy = fit_slot({cell: true.batch_seconds(*cell) * (1.1 if i % 2 else 0.9) for i, cell in enumerate(cells)})
    assert 0.05 < noisy.error < 0.11
    # Times that fall faster than 1 / M would need c0 < 0.
    assert fit_slot({(2, 1, 1): 2.0, (2, 2, 1): 1.0}).c0 == 0


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({(4, 2, 2): 1.0}, "at least two different M.*Found fewer"),
        ({(4, 1, 2): 1.0, (4, 2, 2): 0.0}, r"finite times above 0. Found 0.0 at A, M, N = \(4, 2, 2\)"),
    ],
)
def test_fit_slot_rejects_invalid_measurements(measured: dict[tuple[int, int, int], float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_slot(measured)
