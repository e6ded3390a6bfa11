"""Strategies: their matrices, their names, their refusals."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nwise
from nwise.strategies.base import example_names

NAMES = [
    "local",
    "2-wise",
    "3-wise-mean",
    "end-to-end",
    "deep-supervision",
    "geometric-0.5",
    "blocks-2",
    "rotating-2",
    "rotating-3-microbatch",
    "credit-1,0;0.5,1",
    "hogwild",
    "2-wise-hogwild",
    "rotating-2-hogwild",
]


@pytest.mark.parametrize("name", NAMES)
def test_strategy_name_round_trips(name: str) -> None:
    assert nwise.strategy(name).name == name
    assert nwise.strategy(nwise.strategy(name)) == nwise.strategy(name)


def test_matrices_by_hand() -> None:
    half = 0.5
    table = {
        "2-wise": [[0, 0, 0], [1, 0, 0], [0, 1, 1]],
        "3-wise": [[0, 0, 0], [0, 0, 0], [1, 1, 1]],
        "2-wise-mean": [[half, 0, 0], [half, half, 0], [0, half, 1]],
        "deep-supervision": [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        "geometric-0.5": [[1, 0, 0], [0.5, 1, 0], [0.25, 0.5, 1]],
        "blocks-2": [[0, 0, 0], [1, 1, 0], [0, 0, 1]],
    }
    for name, matrix in table.items():
        assert nwise.strategy(name).credit(3).tolist() == matrix, name


def test_rotating_borders_move_by_one() -> None:
    rotating = nwise.Rotating(2)
    assert [rotating.turn(step, 5) for step in range(4)] == [0, 1, 0, 1]
    assert rotating.credit(4, 0).argmax(0).tolist() == [1, 1, 3, 3]
    assert rotating.credit(4, 1).argmax(0).tolist() == [0, 2, 2, 3]
    assert [nwise.Rotating(3).credit(5, turn).argmax(0).tolist() for turn in range(3)] == [
        [2, 2, 2, 4, 4],
        [1, 1, 4, 4, 4],
        [0, 3, 3, 3, 4],
    ]
    assert [nwise.Rotating(2, every="microbatch").turn(1, m) for m in range(3)] == [1, 0, 1]


def test_rotating_2_is_two_wise_mean_in_expectation() -> None:
    rotating = nwise.Rotating(2)
    mean = (rotating.credit(6, 0) + rotating.credit(6, 1)) / 2
    assert torch.equal(mean, nwise.NWise(2, reduce="mean").credit(6))


def test_window_beyond_stages_is_end_to_end_and_warns_once() -> None:
    stages = [torch.nn.Linear(2, 2) for _ in range(3)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pipe = nwise.Pipeline(stages, None, strategy="7-wise")
        for _ in range(3):
            pipe.step(torch.randn(4, 2), target=torch.tensor([0, 1, 0, 1]))
    assert [str(w.message) for w in seen] == [
        "`n = 7` is more than the number of stages, 3: the farthest loss of every stage is the last one, as with `n = 3`."
    ]
    assert torch.equal(pipe.credit, nwise.EndToEnd().credit(3))
    assert [w.filename for w in seen] == [__file__], "regression: the warning named the caller of the caller"
    with pytest.warns(UserWarning, match="`n = 4` is more than the number of stages, 3"):
        pipe.strategy = nwise.Hogwild(nwise.NWise(4))


def test_names_stand_for_strategies_inside_others() -> None:
    assert nwise.Hogwild("2-wise") == nwise.Hogwild(nwise.NWise(2))  # type: ignore[arg-type]
    assert nwise.Hogwild(nwise.NWise(2, heads="all")).heads == "all"
    third = nwise.Credit([[1 / 3]])
    assert nwise.strategy(third.name) == third


@dataclasses.dataclass(frozen=True)
class Window(nwise.Strategy):
    """A user's strategy without a name of its own."""

    n: int = 2

    def credit(self, num_stages: int, turn: int = 0) -> torch.Tensor:
        return nwise.NWise(self.n).credit(num_stages)


def test_names_by_default_tell_arguments_apart() -> None:
    """Regression: a resume with another window found no change, and a plan of two windows kept one."""
    assert nwise.Delayed(Window(3)).name == "Window(n=3)-delay-1"


def test_options_of_a_late_strategy_are_kept_or_refused() -> None:
    """Regression: `heads="live"` was dropped in silence if the base runs all heads."""
    late = nwise.Delayed(nwise.NWise(2, heads="all"))
    assert nwise.strategy(late, heads="all") == late
    with pytest.raises(
        ValueError, match="`heads` of '2-wise-delay-1' should be 'all', as its `base` says. Found 'live'"
    ):
        nwise.strategy(late, heads="live")


def test_options_by_keyword() -> None:
    assert nwise.strategy("2-wise", heads="all") == nwise.NWise(2, heads="all")
    assert nwise.strategy(nwise.Local(), heads="all") == nwise.Local(heads="all")
    assert nwise.Credit([[1, 0], [0, 1]]) == nwise.Credit(torch.eye(2))
    assert hash(nwise.Credit([[1, 0], [0, 1]])) == hash(nwise.Credit(torch.eye(2)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nwise.NWise(0), r"`n`, .* at least 1 .* Found `n = 0`"),
        (lambda: nwise.strategy("0-wise"), r"Found `n = 0`"),
        (lambda: nwise.NWise(1.5), r"integer of at least 1 .* Found `n = 1.5`"),  # type: ignore[arg-type]
        (lambda: nwise.Credit([[0, 0], [0, 0]]), r"`matrix` should give at least one stage credit. Found only zeros"),
        (lambda: nwise.NWise(2, reduce="sum"), r"'last' or 'mean'. Found 'sum'"),  # type: ignore[arg-type]
        (lambda: nwise.NWise(2, heads="some"), r"'live' or 'all'. Found 'some'"),  # type: ignore[arg-type]
        (lambda: nwise.Geometric(0.0), r"above 0 and at most 1. Found `decay = 0.0`"),
        (lambda: nwise.Geometric(1.5), r"Found `decay = 1.5`"),
        (lambda: nwise.Blocks(0), r"from 1 to 1024. Found `size = 0`"),
        (lambda: nwise.Rotating(0), r"from 1 to 1024. Found `size = 0`"),
        (lambda: nwise.Rotating(2, every="epoch"), r"'step' or 'microbatch'. Found 'epoch'"),  # type: ignore[arg-type]
        (lambda: nwise.Credit([[1, 2, 3]]), r"square, one row per loss. Found shape \(1, 3\)"),
        (lambda: nwise.Credit([[1, 2], [0, 1]]), r"zero above the diagonal.*matrix\[0\]\[1\] = 2.0; set it to 0"),
        (lambda: nwise.Credit([[float("nan")]]), r"finite numbers"),
        (lambda: nwise.Credit([[1.0]]).credit(2), r"each of the 2 stages. Found 1"),
        (
            lambda: nwise.strategy("local@5,2-wise"),
            r"same at every step. Found 'local@5,2-wise'; .* set `pipe.strategy`",
        ),
        (lambda: nwise.Hogwild(nwise.Hogwild()), r"Found 'hogwild', whose gradients are late already; pass its `base`"),
        (lambda: nwise.Blocks(1.5), r"an integer from 1 to 1024. Found `size = 1.5`"),  # type: ignore[arg-type]
        (lambda: nwise.strategy("rotating-30000000"), r"from 1 to 1024. Found `size = 30000000`"),
        (lambda: nwise.Blocks("2"), r"Found `size = '2'`"),  # type: ignore[arg-type]
        (lambda: nwise.Geometric("a"), r"Found `decay = 'a'`"),  # type: ignore[arg-type]
        (lambda: nwise.Credit("abc"), r"rows of numbers, all of one length. Found 'abc'"),
        (lambda: nwise.strategy("credit-1;"), r"rows like 1,0;0.5,1. Found '1;'"),
        (lambda: nwise.strategy("credit-1,0;1"), r"rows of numbers, all of one length"),
        (lambda: nwise.Credit(torch.eye(2) * 1j), r"rows of numbers, all of one length"),
        (lambda: nwise.strategy("geometric-e"), r"`strategy` should be one like"),
        (
            lambda: nwise.strategy("two-wise"),
            r"one like end-to-end, local, 2-wise.* Found 'two-wise'. Did you mean '2-wise'?",
        ),
    ],
)
def test_invalid_strategies_raise(build, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        build()


def test_strategy_of_wrong_type_raises() -> None:
    with pytest.raises(TypeError, match=r"`nwise.Credit\(matrix\)`. Found int"):
        nwise.strategy(2)  # type: ignore[arg-type]


class Odd(nwise.Strategy):
    """One method is enough for a strategy of one's own."""

    def credit(self, num_stages: int, turn: int = 0) -> torch.Tensor:
        return nwise.NWise(1 + num_stages // 2).credit(num_stages)


def test_custom_strategy_needs_only_credit() -> None:
    stages = [torch.nn.Linear(2, 2) for _ in range(4)]
    pipe = nwise.Pipeline(stages, [torch.nn.Linear(2, 2) for _ in range(3)], strategy=Odd())
    assert pipe.strategy.name == "Odd"
    assert pipe.step(torch.randn(4, 2), target=torch.tensor([0, 1, 0, 1])).isnan().tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_a_class_that_is_defined_once_more_takes_its_name() -> None:
    """The cell of a notebook that ran again gave the name of the older class, until that was collected."""

    def define(weight: float) -> type[nwise.Strategy]:
        class Again(nwise.Strategy):
            name = pattern = "again"
            examples = ("again",)

            def credit(self, num_stages: int, turn: int = 0) -> torch.Tensor:
                return weight * torch.eye(num_stages, dtype=torch.float64)

        return Again

    older, newer = define(1), define(2)
    assert isinstance(nwise.strategy("again"), newer)
    assert not isinstance(nwise.strategy("again"), older)
    assert example_names().count("again") == 1
    del older, newer
    gc.collect()


def test_custom_names_may_look_like_those_of_others() -> None:
    """A subclass without a name took that of its parent; a name that ends like a delay was taken apart."""

    class Same(nwise.NWise):
        pass

    class Late(nwise.Strategy):
        name = pattern = "steps-delay-2"

        def credit(self, num_stages: int, turn: int = 0) -> torch.Tensor:
            return torch.eye(num_stages, dtype=torch.float64)

    assert type(nwise.strategy("2-wise")) is nwise.NWise
    assert type(nwise.strategy("steps-delay-2")) is Late
    assert nwise.strategy("credit-1,0;1,1-delay-1").name == "credit-1,0;1,1-delay-1"
    assert nwise.strategy("credit-1,0;1,1-hogwild-least").asynchronous
    del Same, Late
    gc.collect()


def test_numbers_of_numpy_give_names_that_can_be_parsed() -> None:
    """Regression: the name was geometric-np.float64(0.5), and True was a decay."""
    assert nwise.Geometric(np.float64(0.5)).name == "geometric-0.5"
    with pytest.raises(ValueError, match="`decay` should be above 0 and at most 1. Found `decay = True`"):
        nwise.Geometric(True)


class Given(nwise.Strategy):
    """A strategy that returns a given value as its credit."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        object.__setattr__(self, "value", value)

    def credit(self, num_stages: int, turn: int = 0) -> Any:
        return self.value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (torch.ones(2, 2).triu(), r"zeros above the diagonal.*Found C.0, 1. = 1.0"),
        (torch.tensor([[1.0, 0.0], [float("nan"), 1.0]]), "should have finite numbers"),
        ([[1, 0], [0, 1]], "a tensor of shape .2, 2. with values. Found list"),
        (torch.eye(3), "Found shape .3, 3. on cpu"),
        (torch.eye(2, device="meta"), "Found shape .2, 2. on meta"),
        (torch.eye(2) * 1j, "should be real numbers in a tensor .* Found shape .2, 2. on cpu, torch.complex64"),
    ],
)
def test_credit_of_custom_strategies_is_checked(credit: Any, message: str) -> None:
    """A transposed matrix trained locally without a word; the others ended deep inside."""
    with pytest.raises(ValueError, match=message):
        nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], strategy=Given(credit))
