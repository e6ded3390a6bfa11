"""Memory: what a rank of a schedule holds at most, by hand and beside a step that runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.memory.run import peak
from nwise.app.recipes import Adam, Recipe
from nwise.app.recipes.config import Mlp
from nwise.app.training.build import make_pipeline, measurable
from nwise.planning.partitions import stage_costs
from nwise.planning.profiling import profile
from nwise.schedule import Costs
from nwise.schedule.ages import strategy_ages
from nwise.schedule.find import method_flows
from nwise.schedule.memory import fixed_bytes, peak_bytes
from nwise.schedule.named import choose
from nwise.schedule.recompute import recomputing
from nwise.strategies import strategy as parse

SIZES = Costs(1, 0, 1, 1, activation_bytes=10, message_bytes=1, fixed_bytes=3)


@pytest.mark.parametrize(
    ("recompute", "most"),
    [
        # In one process: F0, F1, H1, B1, W0. Activations of both stages.
        (False, 2 * 3 + 2 * 10),
        # F0, F1, H1, B1, R0, W0: stage 0 keeps its output while stage 1, which goes on with its own pass, has its activations.
        (True, 2 * 3 + 1 + 10),
    ],
)
def test_peak_by_hand(recompute: bool, most: float) -> None:
    schedule = choose("depth-first", method_flows("end-to-end", 2, 1), (0, 0))
    schedule = recomputing(schedule) if recompute else schedule
    assert peak_bytes(schedule.with_costs(SIZES)) == (most,)


def test_a_delay_keeps_the_activations_of_earlier_mini_batches() -> None:
    schedule = choose(
        "depth-first",
        flows := method_flows("local-delay-2", 2, 1),
        (0, 1),
        strategy_ages(parse("local-delay-2"), flows),
    )
    costs = replace(SIZES, weight_bytes=7)
    # Two mini-batches wait when a third one runs; four more versions of the parameters, from a forward to its update.
    assert peak_bytes(schedule.with_costs(costs)) == (3 + 3 * 7 + 3 * 10,) * 2


@pytest.mark.parametrize(("strategy", "versions"), [("hogwild", 0), ("hogwild-forward", 5 + 3), ("end-to-end", 0)])
def test_late_passes_with_the_weights_of_their_forward_need_older_weights(strategy: str, versions: int) -> None:
    """Of ages 4, 2, 0 with weights of 7: those of every mini-batch from its forward to its update."""
    flows = method_flows(strategy, 3, 1)
    rule, costs = parse(strategy), replace(SIZES, weight_bytes=7)
    schedule = choose("depth-first", flows, (0, 0, 0), strategy_ages(rule, flows))
    assert fixed_bytes(schedule.with_costs(costs)) == (3 * 3 + 7 * versions,)
    assert peak_bytes(schedule.with_costs(costs))[0] == peak_bytes(schedule.with_costs(SIZES))[0] + 7 * versions


@pytest.mark.filterwarnings("ignore:With 4 micro-batches")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("strategy", ["end-to-end", "local", "2-wise-mean", "deep-supervision"])
def test_predicted_peak_is_near_that_of_a_step(strategy: str, m: int, recompute: bool) -> None:
    """The prediction leaves out messages on their way, gradients inside a pass, heads' activations and scratch space."""
    config = Recipe(
        model=Mlp(num_stages=5, width=64),
        optimizer=Adam(),
        batch_size=256,
        device="cpu",
        strategy=strategy,
        microbatches=m,
        recompute=recompute,
    )
    data = config.load()[0]
    pipe = make_pipeline(config, data, config.phases(1)[0][1])
    x, y = data.batch(torch.arange(config.batch_size))
    pipe.step(x, target=y)  # which is compared with plain autograd
    pipe.zero_grad()
    measured = peak(lambda: pipe.step(x, target=y), "cpu") + 3 * sum(
        p.nbytes for p in pipe.parameters()
    )  # Adam's moments, too

    sizes = profile(measurable(config, data, torch.device("cpu")), (m,), rounds=1)
    flows = method_flows(strategy, len(sizes.starts), m)
    costs = stage_costs(sizes.pieces[m], sizes.starts, [turn[0] for turn in flows])
    schedule = choose("depth-first", flows, (0,) * len(sizes.starts), strategy_ages(parse(strategy), flows))
    predicted = peak_bytes((recomputing(schedule) if recompute else schedule).with_costs(costs))[0]
    assert 0.55 * measured < predicted <= measured
