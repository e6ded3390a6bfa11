"""The benchmark of the runtime counts what it should."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.links import budget
from benchmarks.runtime.bench import Case, measure
from benchmarks.runtime.command import main as bench
from benchmarks.runtime.ranks import cases
from benchmarks.runtime.virtual import Device
from experiments.frontier.arms import arm
from experiments.harness.clock import network_costs
from nwise.microbatch import Batch
from nwise.runtime.processes import Processes
from nwise.schedule import Action, Costs, Kind, best
from nwise.schedule.costs import prices
from nwise.stage import Stage


@pytest.mark.slow("a developer's instrument, which starts torchrun twice")
def test_bench_runtime_counts_slots_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Assert counts, but no time that a busy machine could spoil."""
    assert bench(["--stages", "3", "--slot-ms", "5", "--batches", "4", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_slots"] == 4
    assert found["measured_slots"] > 3.99, "time does not run faster"
    assert found["efficiency"] == pytest.approx(found["predicted_slots"] / found["measured_slots"])
    assert found["bytes_sent"] == found["bytes_predicted"] == [[8, 0], [8, 8], [0, 8]]
    assert bench(["--stages", "2", "--slot-ms", "2", "--batches", "2", "--rounds", "1"]) == 0
    assert "as predicted" in capsys.readouterr().out


METHODS = {case.method for mib in (0, 4) for library, case in cases(4, mib) if library == "nwise"}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_virtual_stages_have_what_the_engine_reads(method: str) -> None:
    """Regression: the benchmark failed twice at what its stages lacked of `Stage`; only hours of its own runs showed it."""
    found = measure(Processes(2), Case(method=method, stages=2, ranks=1, slot_ms=0.1, batches=1, rounds=1))
    assert found.bytes_sent == found.bytes_predicted == [(0, 0)], "one process sends nothing"


def test_paced_stages_compute_and_take_the_time_of_an_accelerator() -> None:
    """An action begins when its message is due; what it sends is due a latency after its end, and its values are real."""
    module = nn.Linear(2, 2)
    stage = Stage(1, module, None, nn.functional.mse_loss)
    stage.survey(module, None)
    costs = Costs(forward=2.0, head=1.0, input_grad=3.0, weight_grad=1.0)
    device, slot, latency = Device(0.004), 0.004, 0.02
    budget.pace(stage, prices(costs, 3)[1], device, latency)
    schedule = best("end-to-end", num_stages=3, num_microbatches=1, costs=costs)
    tape = stage.tapes(schedule, 0, Batch([()], [None], [[1.0] * 3]))[0]

    def due(seconds: float) -> Tensor:
        return torch.tensor([time.perf_counter() + seconds], dtype=torch.float64)

    x, gradient, arrives = torch.randn(3, 2), torch.randn(3, 2), due(0.015)
    y, sent = stage.run(Action(Kind.FORWARD, 1, 0), tape, {None: (x, arrives)})
    assert time.perf_counter() >= device.free
    assert device.free == pytest.approx(arrives.item() + 2 * slot, abs=1e-9)
    torch.testing.assert_close((y, sent), (module(x).detach(), torch.tensor([device.free + latency]).double()))

    (message,), arrives = tape.flow.cotangent(0).needed, due(0.015)
    given = {message: (gradient, arrives)}
    back, sent = stage.run(Action(Kind.INPUT_GRAD, 1, 0, 0), tape, given)
    assert device.free == pytest.approx(arrives.item() + 3 * slot, abs=1e-9)
    torch.testing.assert_close((back, sent), (gradient @ module.weight, torch.tensor([device.free + latency]).double()))
    before = device.free
    stage.run(Action(Kind.WEIGHT_GRAD, 1, 0), tape, given)
    torch.testing.assert_close(module.weight.grad, gradient.T @ x)
    assert device.free == pytest.approx(before + slot, abs=1e-9)


@pytest.mark.parametrize("method", budget.METHODS)
def test_budgets_train_with_the_recipe_of_the_frontier(method: str) -> None:
    one, rule = budget.recipe(method, 300), arm("adam end-to-end")
    like = replace(rule, num_stages=4).run(0.02, 0)
    assert (one.model, one.optimizer.beta2) == (like.model, like.optimizer.beta2)  # type: ignore[union-attr] # Adam's settings
    assert one.optimizer.extrapolate == ("delay" in method)
    assert budget.COSTS.head == pytest.approx(network_costs(budget._MODEL, 4).head[0])  # type: ignore[index] # of every stage
