"""Fixtures for all tests: fixed seeds, one thread for bitwise comparisons, the shared data folder."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("NWISE_DATA", Path(__file__).parents[2] / "shared" / "data"))

# torch looks up the name of every address that connects to a store. Where the hosts file has no "::1", a name server is asked,
# and one that does not answer would hold a test up for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Test processes and those that they start share compiled files, also where the shell asks for none; compiling takes seconds.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    """Fix the examples of hypothesis: the same in every run, on slow machines too.

    The process that hands tests out to workers runs none. It begins two seconds earlier without hypothesis and torch.
    """
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("fixed")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for ``-n auto``: one for each core; one more starts and collects for nothing."""
    return len(os.sched_getaffinity(0))


def pytest_collection_finish() -> None:
    """Leave out of the garbage collection what the imports made: looking through it took a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    import torch

    torch.set_num_threads(1)  # several processes at once, and sums in one order
    torch.manual_seed(0)


@pytest.fixture
def float64() -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def shared_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder with real CIFAR-10 and One Billion Word text; skips where it is not."""
    if not (SHARED / "cifar10").is_dir():
        pytest.skip(f"no data folder at {SHARED}; set NWISE_DATA to one with cifar10/ and lm1b/")
    monkeypatch.setenv("NWISE_DATA", str(SHARED))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    return SHARED
