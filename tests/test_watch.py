"""The watch of a rank with a store in memory and a clock that the test moves; real processes are in test_runtime.py."""

from __future__ import annotations

import pytest

from nwise.runtime.watch import Doing, RankError, Runs, Watchdog
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
        self.doing: list[Doing | None] = [None] * size
        self.store = Store()
        self.watches = [self.watch(rank, size) for rank in range(size)]
        self.asleep: set[int] = set()

    def watch(self, rank: int, size: int) -> Watchdog:
        """A watch whose threads never start."""
        return Watchdog(self.store, rank, size, [rank], LIMIT, lambda: self.doing[rank], lambda: self.now)

    def begin(self, rank: int, action: Action | None, step: int = 3, *, over: bool = False) -> None:
        self.doing[rank] = None if action is None else Doing(step, action, self.now, over)

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
    ranks.tick(20)
    assert not ranks.error(), "a waiting rank has twice the limit, so that a stalled one reports first"
    ranks.tick()
    assert ranks.error().startswith("Rank 1 (stage 1) has been at RG")
    assert ranks.error().endswith(
        "for more than 20 seconds; rank 0, which waits for no rank, was last seen between steps"
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


def test_first_error_is_the_one_of_all_ranks() -> None:
    ranks = Ranks(2)
    ranks.begin(1, FORWARD)
    first = ranks.watches[1].failed(ValueError("a"))
    second = ranks.watches[0].failed(ValueError("b"))
    assert str(first) == str(second)
    assert str(first).endswith("failed at F0(1) (forward, stage 0, micro-batch 1) of step 3: ValueError: a")


def call(watch: Watchdog, runs: Runs | None = None) -> None:
    """Begin a call, with something else from it on."""
    if runs is not None:
        watch.runs = runs._replace(since=watch.calls)
    watch.calls += 1


A, B = Runs(0, "2-wise with M = 2", 1), Runs(0, "local with M = 2", 2)


def test_ranks_that_train_with_different_things_end() -> None:
    """Regression: a strategy set on one rank trained something else in silence, or hung until the time limit."""
    ranks = Ranks(2)
    zero, one = ranks.watches
    for watch in ranks.watches:
        call(watch, A)
    ranks.tick()
    call(zero, B)
    ranks.tick()
    assert not ranks.error(), "rank 1 may change, too, before it begins the call"
    call(one)
    ranks.tick()
    assert (
        "(stage 0) should train with the same settings as rank 1. Found local with M = 2 here and 2-wise with M = 2"
        in ranks.error()
    )


def test_rank_may_be_ahead_with_a_change() -> None:
    ranks = Ranks(2)
    zero, one = ranks.watches
    for watch in ranks.watches:
        call(watch, A)
    call(zero, B)
    call(zero, A)
    ranks.tick()
    call(one, B)
    ranks.tick()
    call(one, A)
    ranks.tick()
    assert not ranks.error()


def test_rank_that_drains_alone_ends_all() -> None:
    """Regression: after `pending_gradients` on rank 0 only, rank 1 paired activations with the targets of the step after."""
    ranks = Ranks(2)
    zero, one = ranks.watches
    for watch in ranks.watches:
        watch.train("2-wise-delay-1 with M = 2", 7)
        call(watch)
    for watch in ranks.watches:  # a checkpoint, on all ranks
        watch.count_drain()
        call(watch)
        call(watch)
        ranks.tick()
    assert not ranks.error()
    zero.count_drain()
    call(zero)
    ranks.tick()
    assert not ranks.error(), "rank 1 may drain, too"
    call(one)
    ranks.tick()
    assert "Found 2-wise-delay-1 with M = 2 after 2 calls of `drain` or `pending_gradients` here" in ranks.error()
    assert "and 2-wise-delay-1 with M = 2 after 1 calls" in ranks.error()
