"""Every recipe whose data can be had runs for a few steps, as it stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import nwise
from nwise.app.recipes import ImageSource, in_force, joined, parse_phases, recipe, spans
from nwise.app.training import Trainer


@pytest.mark.slow("training on real data, minutes")
@pytest.mark.parametrize("name", ["source-code", "cifar10-convnet-small", "cifar10-resnet-small", "lm1b-small"])
def test_small_recipes_learn_on_their_data(name: str, shared_data: Path) -> None:
    del shared_data
    config = dataclasses.replace(recipe(name), max_steps=60, eval_every=100)
    scores = Trainer(config).train()
    first = Trainer(dataclasses.replace(config, max_steps=1)).train()
    assert scores.heads[-1] is not None
    for after, before in zip(scores.heads, first.heads, strict=True):
        assert (after is None) == (before is None)  # a head that the strategy does not train has no score
        assert after is None or before is None or after.loss < 0.95 * before.loss


@pytest.mark.slow("full-size networks, minutes")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["cifar10-convnet", "cifar10-resnet", "cifar10-finetune"])
def test_full_recipes_run_on_a_part_of_their_data(name: str, shared_data: Path) -> None:
    del shared_data
    config = recipe(name)
    assert isinstance(config.data, ImageSource)
    data = dataclasses.replace(config.data, train_limit=16, test_limit=8)
    last = Trainer(dataclasses.replace(config, data=data, batch_size=8, max_steps=2, eval_every=1000)).train().heads[-1]
    assert last is not None
    assert last.loss > 0


@pytest.mark.parametrize(
    "text",
    [
        "2-wise",
        "local@500,end-to-end",
        "local@5,2-wise@10,hogwild",
        "credit-1,0;0.5,1@500,2-wise",  # regression: the pattern of `Credit` swallowed the rest of the name
    ],
)
def test_strategies_that_follow_each_other_round_trip(text: str) -> None:
    phases = parse_phases(text, heads="all")
    assert joined(phases) == text
    assert all(rule.heads == "all" for _, rule in phases)


def test_each_step_has_the_strategy_of_its_phase() -> None:
    phases = parse_phases("local@2,2-wise@1epochs,end-to-end", 5)
    assert [first for first, _ in phases] == [0, 2, 5]
    names = ["local"] * 2 + ["2-wise"] * 3 + ["end-to-end"] * 2
    assert [in_force(phases, step).name for step in range(7)] == names
    assert in_force(phases, -1) == nwise.Local()
    for stop in range(1, 8):
        assert [rule.name for steps, rule in spans(phases, stop) for _ in steps] == names[:stop]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "local@0,2-wise",
            "should change at steps that rise, from at least 1. Found 'local@0,2-wise', which changes at 0",
        ),
        ("local@3,2-wise@3,local", "which changes at 3, 3"),
        ("local@,2-wise", "should give a number of steps or a number of epochs above 0 after '@'"),
        ("local@1.5,2-wise", "should give a number of steps"),
        ("local@nanepochs,2-wise", "should give a number of steps"),
        ("local@500", "should be the same at every step. Found 'local@500'"),
        ("local@5,", "should be one like end-to-end, local"),
    ],
)
def test_bad_strategies_that_follow_each_other_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_phases(text)
