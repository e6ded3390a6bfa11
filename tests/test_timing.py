"""The paper's formula, and the same costs simulated."""

from __future__ import annotations

import pytest

import nwise
from nwise.schedule.timing import modelled_time, paper_time


def test_the_table_of_time_per_batch() -> None:
    """Figure 3 of the paper: end-to-end 2A, Hogwild 2, 1-wise 2, 2-wise 4, 3-wise 6 slots."""
    for num_stages in (4, 8):
        found = [
            modelled_time(nwise.strategy(name), num_stages, 1)
            for name in ("end-to-end", "hogwild", "local", "2-wise", "3-wise")
        ]
        assert found == [2 * num_stages, 2, 2, 4, 6]


@pytest.mark.parametrize("num_stages", range(1, 11))
def test_the_simulation_meets_the_formula(num_stages: int) -> None:
    for n in range(1, num_stages + 1):
        for num_microbatches in (1, 2, 4, 8):
            expected = paper_time(num_stages, num_microbatches, n)
            assert modelled_time(nwise.NWise(n), num_stages, num_microbatches) == expected


def test_hand_worked_cells() -> None:
    assert paper_time(4, 4, 4) == 2 * (4 + 4 - 1)
    assert paper_time(8, 4, 3) == 4 * 4
    assert paper_time(4, 4, 3) == (2 + 4 - 3) * 4 + 2 * (6 - 4 - 1)
    assert paper_time(3, 1, 9) == paper_time(3, 1, 3) == 6
    with pytest.raises(ValueError, match="`n` should be at least 1. Found 0"):
        paper_time(3, 1, 0)


def test_rotating_blocks_cost_what_their_blocks_cost() -> None:
    assert modelled_time(nwise.Rotating(2), 8, 1) == modelled_time(nwise.Blocks(2), 8, 1) == 4
    assert modelled_time(nwise.Hogwild(nwise.NWise(2)), 8, 1) == 3
