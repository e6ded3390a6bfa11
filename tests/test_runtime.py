"""The runtime of many processes against the runtime of one: real gloo processes, started by torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import results
from ranks.equality import CASES, case


@pytest.mark.parametrize("num_stages", [2, 4])
def test_parameters_are_bitwise_those_of_one_process(num_stages: int, tmp_path: Path) -> None:
    found = results(num_stages, "equality.py", tmp_path, str(num_stages))
    for number, (strategy, m, optimizer, order) in enumerate(CASES):
        # Where micro-batches are unlike, orders add their gradients up in different orders.
        same_sums = strategy != "rotating-2-microbatch"
        expected = case(num_stages, strategy, m, optimizer, "depth-first" if same_sums else order)
        together: dict[str, str] = {}
        for rank in range(num_stages):
            here = found[rank][number]
            assert all(f".{name.split('.')[1]}." == f".{rank}." for name in here), "a rank holds its own stage only"
            together |= here
        different = {name for name in expected if together.get(name) != expected[name]}
        assert together.keys() == expected.keys()
        assert not different, (strategy, m, optimizer, order, different)
