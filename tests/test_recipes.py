"""Every recipe whose data can be had runs for a few steps, as it stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nwise.app.recipes import ImageSource, recipe
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
