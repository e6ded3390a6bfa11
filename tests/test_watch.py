"""The watch of a rank with a store in memory and a clock that the test moves; real processes are in test_runtime.py."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from nwise.runtime.calls import Calls, RankError, Status
from nwise.runtime.watch import Watchdog
from nwise.schedule.actions import Action, Kind

LIMIT = 10.0
FORWARD, RECEIVE = Action(Kind.FORWARD, 0, 1), Action(Kind.RECEIVE_GRADIENT, 0, 1, 0)


class Store:
    """The store of all ranks, as far as the watch uses it; the other ranks report at once."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, (value or expected).encode())

    def add(self, key: str, value: int) -> int:
        return 100


class Ranks:
    """Ranks with a stage each, whose watches the test runs by hand: `tick` is a second in the life of all that are awake."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.doing: list[Status | None] = [None] * size
        self.store = Store()
        self.calls = [Calls() for _ in range(size)]
        self.watches = [self.watch(rank, size) for rank in range(size)]
        self.asleep: set[int] = set()

    def watch(self, rank: int, size: int) -> Watchdog:
        """A watch whose threads never start."""
        doing, clock = lambda: self.doing[rank], lambda: self.now
        return Watchdog(self.store, rank, size, [rank], LIMIT, doing, clock, self.calls[rank])

    def begin(self, rank: int, action: Action | None, step: int = 3, *, over: bool = False) -> None:
        self.doing[rank] = None if action is None else Status(step, action, self.now, over)

    def tick(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1
            awake = [watch for rank, watch in enumerate(self.watches) if rank not in self.asleep]
            for watch in awake:
                watch._beat()
            for watch in awake:
                watch._check_self()
                watch._check_next()

    def error(self) -> str:
        """What the first rank that failed told the others."""
        return self.store.values.get("error", b"").decode()


def test_rank_that_works_too_long_reports_itself() -> None:
    ranks = Ranks(2)
    ranks.begin(1, FORWARD)
    ranks.tick(10)
    assert not ranks.error()
    ranks.tick()
    assert (
        ranks.error()
        == "Rank 1 (stage 1) has been at F0(1) (forward, stage 0, micro-batch 1) of step 3 for more than 10 seconds"
    )
    with pytest.raises(RankError, match="Rank 1"):
        ranks.watches[1].check()


def test_waiting_rank_names_the_rank_that_does_not_wait() -> None:
    """Regression: when rank 0's loader stalled, with no known time limit, only the waiting ranks were blamed."""
    ranks = Ranks(3)
    for rank in (1, 2):
        ranks.begin(rank, RECEIVE)
    ranks.tick(13)
    assert not ranks.error(), "a waiting rank speaks three seconds later, so that a stalled one reports first"
    ranks.tick()
    assert ranks.error().startswith("Rank 1 (stage 1) has been at RG")
    assert ranks.error().endswith(
        "for more than 10 seconds; rank 0, which is slow or has stalled, was last seen between steps"
    )


def test_on_action_of_a_message_is_not_a_wait() -> None:
    """Regression: a stall in `on_action` of a message counted as a wait, so a waiting rank was blamed."""
    ranks = Ranks(2)
    ranks.begin(0, RECEIVE, over=True)
    ranks.begin(1, RECEIVE)
    ranks.tick(11)
    assert ranks.error().startswith("Rank 0 (stage 0) has been at `on_action` of RG")
    assert ranks.error().endswith("for more than 10 seconds")


def test_rank_before_a_silent_one_reports_it() -> None:
    ranks = Ranks(3)
    ranks.tick()
    # Another machine's process: the watch would end one of its own.
    ranks.store.set("beat/2", ranks.store.get("beat/2").decode().replace('"host": "', '"host": "not '))
    ranks.asleep = {2}
    ranks.tick(11)
    assert not ranks.error()
    ranks.tick()
    assert ranks.error() == "Rank 1 (stage 1) has not heard of rank 2 for 10 seconds; last seen between steps"


def test_main_thread_learns_of_an_error_only_after_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a main thread that was quick to raise the watch's error ended its process before the watch had printed it."""
    ranks = Ranks(2)
    early, set_first = [], ranks.store.compare_set

    def at_the_store(key: str, expected: str, value: str) -> bytes:
        early.append(ranks.watches[0].has_failed)
        return set_first(key, expected, value)

    def write(line: str) -> int:
        early.append(ranks.watches[0].has_failed)
        return len(line)

    monkeypatch.setattr(ranks.store, "compare_set", at_the_store)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(write=write, flush=lambda: None))
    ranks.begin(0, FORWARD)
    ranks.tick(11)
    assert early == [False, False]
    with pytest.raises(RankError, match="for more than 10 seconds"):
        ranks.watches[0].check()


A, B = ("2-wise with M = 2", 1), ("local with M = 2", 2)


def test_ranks_that_train_with_different_settings_end() -> None:
    """Regression: a strategy set on one rank trained something else in silence, or hung until the time limit."""
    ranks = Ranks(2)
    zero, one = ranks.calls
    for calls in ranks.calls:
        calls.begin("step 0", *A)
    ranks.tick()
    zero.begin("step 1", *B)
    ranks.tick()
    assert not ranks.error(), "rank 1 may change, too, before it begins the call"
    one.begin("step 1", *A)
    ranks.tick()
    assert (
        "(stage 0) should train with the same settings as rank 1. Found local with M = 2 on rank 0 and 2-wise with "
        "M = 2 on rank 1; give all ranks" in ranks.error()
    )


def test_rank_may_be_ahead_with_a_change() -> None:
    ranks = Ranks(2)
    zero, one = ranks.calls
    for calls in ranks.calls:
        calls.begin("step 0", *A)
    zero.begin("step 1", *B)
    zero.begin("step 2", *A)
    ranks.tick()
    one.begin("step 1", *B)
    ranks.tick()
    one.begin("step 2", *A)
    ranks.tick()
    assert not ranks.error()


def test_rank_that_makes_another_call_ends_all() -> None:
    """Regression: a call on one rank only, such as `drain`, was found by chance, or after four times the time limit."""
    ranks = Ranks(3)
    for step in range(40):
        for calls in ranks.calls:
            calls.begin(f"step {step}", *A)
    ranks.tick()
    for calls in ranks.calls[:2]:  # a checkpoint; rank 2 only lags behind
        calls.begin("`drain`", *A)
        calls.begin("step 40", *A)
    ranks.tick()
    assert not ranks.error(), "rank 2 may drain, too"
    ranks.calls[2].begin("step 40", *A)
    ranks.tick()
    expected = (
        "Rank 1 (stage 1) should make the same calls of nwise as rank 2, in the same order. Found `drain` (`Calls.begin` in "
        "test_watch.py, line "
    )
    assert ranks.error().startswith(expected)
    assert re.search(
        r" on rank 1 and step 40 \(`Calls.begin` in test_watch.py, line \d+\) on rank 2; make", ranks.error()
    )
