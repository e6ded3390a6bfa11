"""The optimizers of recipes: rates, groups of parameters, and what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nwise
from nwise.app.recipes import Adam, Sgd
from nwise.app.training import LearningRate, make_optimizer, rate_factor
from nwise.app.training.optimizers import parameter_groups
from ranks.common import pipeline


def test_muon_takes_no_group_later() -> None:
    """Parameters of a later group were never updated."""
    pipe = nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end")
    optimizer = make_optimizer(Adam(muon_lr=0.01), pipe.parameters(), [pipe.stages[0].weight])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="should get all parameters when it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_rate_drops_and_warm_up() -> None:
    sgd = Sgd(lr=0.1, drops=(91 / 200, 136 / 200, 182 / 200))
    epochs = [0, 90, 91, 135, 136, 181, 182, 199]
    assert [rate_factor(sgd, e * 390, 200 * 390) for e in epochs] == [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    adam = Adam(lr=1024**-0.5, warmup_steps=4000)
    rates = [adam.lr * rate_factor(adam, step - 1, 10**6) for step in (1, 4000, 16000)]
    assert rates == pytest.approx([1024**-0.5 * min(s**-0.5, s * 4000**-1.5) for s in (1, 4000, 16000)])
    assert rate_factor(Adam(), 123, 1000) == 1


def test_plateau_drops_the_rate() -> None:
    config = Sgd(lr=0.1, plateau_epochs=2)
    optimizer = make_optimizer(config, [nn.Parameter(torch.ones(1))])
    rate = LearningRate(config, optimizer, 100)
    seen = []
    for loss in (1.0, 0.9, 0.9, 0.9, 0.9, 0.8):
        optimizer.step()
        rate.step()
        rate.evaluated(loss)
        seen.append(rate.value)
    assert seen == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01, 0.01])


@pytest.mark.parametrize("config", [Sgd(), Sgd(momentum=0.0), Adam()], ids=["momentum", "sgd", "adam"])
def test_every_optimizer_goes_with_every_strategy(config: Sgd | Adam) -> None:
    """Regression: fused SGD with momentum failed at the second step of `rotating-2`: another head has a gradient."""
    x, y = torch.randn(6, 4), torch.randint(0, 4, (6,))
    for strategy in CYCLES:
        for heads in ("live", "all"):
            stages = [torch.nn.Linear(4, 4) for _ in range(4)]
            rule = nwise.strategy(strategy, heads=heads)
            pipe = nwise.Pipeline(stages, [torch.nn.Linear(4, 4) for _ in range(3)], strategy=rule, num_microbatches=2)
            optimizer = make_optimizer(config, pipe.parameters())
            for _ in range(max(4, 2 * rule.turns)):
                pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()


def test_sgd_momentum_matches_torch() -> None:
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    twin = torch.nn.Parameter(x.detach().clone())
    ours, theirs = (
        make_optimizer(Sgd(weight_decay=0.1), [x]),
        torch.optim.SGD([twin], lr=0.1, momentum=0.9, weight_decay=0.1),
    )
    for _ in range(3):
        for p, optimizer in ((x, ours), (twin, theirs)):
            p.grad = p.detach() ** 2
            optimizer.step()
    assert torch.equal(x, twin)


def test_drops_are_not_ignored_on_a_plateau() -> None:
    with pytest.raises(ValueError, match=r"`drops` should be empty with `plateau_epochs`.* Found \(0.5,\); set one"):
        Sgd(drops=(0.5,), plateau_epochs=5)


def test_learning_rates_by_stage() -> None:
    pipe = pipeline(3, "2-wise", 1)
    groups = parameter_groups(pipe, 0.1, (1.0, 0.5, 2.0))
    assert [group["lr"] for group in groups] == [0.1, 0.05, 0.2]
    assert sum(len(group["params"]) for group in groups) == len(list(pipe.parameters()))


CYCLES = [
    "local", "2-wise", "3-wise-mean", "end-to-end", "deep-supervision", "geometric-0.7", "blocks-2", "rotating-2", "rotating-3",
    "rotating-2-microbatch", "hogwild", "2-wise-hogwild",
]  # fmt: skip
