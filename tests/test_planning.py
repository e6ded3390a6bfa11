"""Plans for devices of unequal speed and memory: against every cut, by hand, on real networks and processes."""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from itertools import combinations, permutations, product
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nwise
from cutting import tiny
from launch import results
from nwise.flow import flows_for
from nwise.planning import source
from nwise.planning.devices import as_devices, orders
from nwise.planning.partitions import Piece
from nwise.planning.plan import Plan
from nwise.planning.profiling import Profile, profile
from nwise.planning.search import Search, search
from nwise.schedule import Costs, best
from nwise.schedule.find import DoesNotFit
from nwise.schedule.memory import peak_bytes
from nwise.schedule.named import choose
from ranks import planned

SPEEDS = ([1, 2, 4], [4, 2, 1], [1, 1, 2], [1, 1, 1], [1, 3])


def equal_pieces(count: int, **sizes: Any) -> list[Piece]:
    return [Piece(str(i), 1, 1, 1, 0, 0, **sizes) for i in range(count)]


# The search -----------------------------------------------------------------------------------------


def check_against_every_cut(seed: int, most: int) -> None:
    """The plan's period is within 3 % of the best of all cuts and orders of the devices."""
    numbers = random.Random(seed)
    count = numbers.randint(4, most)
    drawn = [[numbers.uniform(0.2, 2) for _ in range(3)] + [numbers.random()] for _ in range(count)]
    pieces = [Piece(str(i), f, through, w, 0.0, h) for i, (f, through, w, h) in enumerate(drawn)]
    name = numbers.choice(["local", "2-wise", "3-wise-mean", "end-to-end", "rotating-2-microbatch"])
    devices = as_devices(numbers.choice(SPEEDS))
    one = Search(pieces, nwise.strategy(name), numbers.choice([1, 2, 4, 8]), devices, len(devices), {})
    found = one.improved().schedule.period
    best = min(
        one.cut((0, *rest), placement).schedule.period
        for rest in combinations(range(1, count), len(devices) - 1)
        for placement in set(permutations(range(len(devices))))
        if one.bound((0, *rest), placement) <= found * (1 + 1e-9)  # no other cut can be better
    )
    assert found <= best * 1.03


@pytest.mark.parametrize("seed", range(10))
def test_search_is_near_the_best_of_all_cuts(seed: int) -> None:
    check_against_every_cut(seed, 8)


@pytest.mark.slow("every cut of 100 networks, minutes")
@pytest.mark.parametrize("seed", range(10, 110))
def test_search_is_near_the_best_of_all_cuts_of_twelve_blocks(seed: int) -> None:
    check_against_every_cut(seed, 12)


def test_faster_devices_get_more_blocks() -> None:
    """Local training waits for none, so 14 equal blocks go to devices of speed 1, 2, 4 as 2, 4, 8."""
    cut = search({1: equal_pieces(14)}, nwise.Local(), as_devices([1, 2, 4]))
    ends = [*cut.starts[1:], 14]
    sizes = [b - a for a, b in zip(cut.starts, ends, strict=True)]
    assert sorted(zip(cut.placement, sizes, strict=True)) == [(0, 2), (1, 4), (2, 8)]


def test_several_stages_share_a_device() -> None:
    """Two devices, one three times as fast, and four stages of eight equal blocks: 2 and 6 blocks."""
    cut = search({1: equal_pieces(8)}, nwise.Local(), as_devices([1, 3]), 4)
    blocks = [0, 0]
    for a, b, device in zip(cut.starts, (*cut.starts[1:], 8), cut.placement, strict=True):
        blocks[device] += b - a
    assert blocks == [2, 6]
    assert sorted(cut.placement) in ([0, 1, 1, 1], [0, 0, 1, 1])


def test_memory_moves_blocks_to_another_device() -> None:
    pieces = equal_pieces(8, fixed_bytes=10)
    devices = as_devices([nwise.Device(memory=25), nwise.Device()])
    cut = search({1: pieces}, nwise.EndToEnd(), devices)
    assert cut.schedule.peak_bytes[0] <= 25
    assert sorted(zip(cut.placement, (cut.starts[1], 8 - cut.starts[1]), strict=True)) == [(0, 2), (1, 6)]
    small = as_devices([nwise.Device(memory=25), nwise.Device(memory=45)])
    with pytest.raises(DoesNotFit, match=r"`memory` should be at least \d+ bytes a rank for .* Found (25|45)"):
        search({1: pieces}, nwise.EndToEnd(), small)


@pytest.mark.parametrize("seed", [12, 21, 30, 56])
def test_search_finds_a_cut_that_fits_if_there_is_one(seed: int) -> None:
    """Regression: the search knew one order of actions, made without a limit, and gave up although others fitted."""
    numbers = random.Random(seed)
    drawn = [[numbers.uniform(1, 20) for _ in range(4)] for _ in range(5)]
    pieces = [
        Piece(
            *(str(i), f, f, f, 0, 0),
            activation_bytes=size,
            message_bytes=out / 4,
            fixed_bytes=fixed,
        )
        for i, (f, size, out, fixed) in enumerate(drawn)
    ]
    needed = sum(p.fixed_bytes + p.activation_bytes for p in pieces) / 2
    devices = as_devices([nwise.Device(1, needed * 0.9), nwise.Device(2, needed * 1.15)])
    one = Search(pieces, nwise.EndToEnd(), 4, devices, 2, {})
    periods = []
    for start, placement in product(range(1, 5), ((0, 1), (1, 0))):
        with suppress(DoesNotFit):
            periods.append(one.cut((0, start), placement).schedule.period)
    if periods:
        assert one.improved().schedule.period == pytest.approx(min(periods), rel=0.03)
    else:
        with pytest.raises(DoesNotFit, match="for the smallest cut tried, on its tightest device"):
            one.improved()


@pytest.mark.parametrize("devices", [[1, 1, 1, 1, 1, 10], [10, 1, 1, 1, 1, 1]])
def test_orders_of_many_devices_are_tried(devices: list[float]) -> None:
    """Regression: from six devices on, only the given order was tried, even if five were equal: 160 slots, not 24."""
    times = [10.0, *[1.0] * 8]
    pieces = [Piece(str(i), time, time, time, 0, 0) for i, time in enumerate(times)]
    assert search({8: pieces}, nwise.NWise(2), as_devices(devices)).schedule.period == pytest.approx(24)
    assert len(orders(as_devices([1, 2, 3, 4, 5, 6]))) == 120
    assert orders(as_devices([2, 1, 1])) == [(0, 1, 2), (1, 2, 0), (1, 0, 2)]


def test_frozen_pieces_are_planned_as_frozen() -> None:
    """Regression: nine frozen pieces of twelve were planned as if trained, with a step of 48 where 36 were possible."""
    pieces = [Piece(str(i), 1, 1, float(i >= 9), 0, 0, learns=i >= 9) for i in range(12)]
    cut = search({4: pieces}, nwise.EndToEnd(), as_devices(2))
    assert cut.schedule.period == pytest.approx(36)
    assert cut.starts == (0, 9)


def test_bound_of_late_gradients_holds_with_stages_on_one_rank() -> None:
    """Regression: messages inside a rank were charged, so a schedule was shorter than its lower bound."""
    costs = Costs(1, 0, 1, 1, message_bytes=4, bandwidth=1)
    late = best("end-to-end-delay-1", num_stages=3, num_microbatches=1, costs=costs, placement=[1, 0, 0], num_ranks=2)
    assert late.period >= late.lower_bound


def test_slow_links_ask_for_fewer_microbatches() -> None:
    pieces = {m: [Piece(str(i), 1 / m, 1 / m, 1 / m, 0, 0) for i in range(4)] for m in (1, 2, 4)}
    devices = as_devices(2)
    assert search(pieces, nwise.EndToEnd(), devices).schedule.num_microbatches == 4
    late = search(pieces, nwise.EndToEnd(), devices, latency=5.0)
    assert late.schedule.period > 2 * 5  # an activation and a gradient


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "`devices` should be an integer of at least 1. Found 0"),
        ([], "`devices` should contain at least one device. Found none"),
        ([1, 0], "`speed` of a device should be a float above 0. Found 0"),
        ([1, "fast"], "`speed` of a device should be a float above 0. Found 'fast'"),
        ([float("inf")], "`speed` of a device should be from 1e-06 to 1e.06. Found inf"),
        ([1e-300], "`speed` of a device should be from 1e-06 to 1e.06. Found 1e-300"),
        ([10**400], "`speed` of a device should be a float above 0. Found 10000"),
        ([float("nan")], "`speed` of a device should be a float above 0. Found nan"),
        ("two", "`devices` should be a number, or a list of speeds"),
    ],
)
def test_invalid_devices_raise(devices: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        as_devices(devices)


# Plans of networks ----------------------------------------------------------------------------------

X, Y = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


def network() -> nn.Sequential:
    """Blocks that change their input in place, dropout, and batch norm, none of which a plan may leave changed."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.BatchNorm1d(16), nn.Linear(16, 4))


def quiet(model: nn.Module, **options: Any) -> Plan:
    return nwise.plan(model, X, Y, **{"rounds": 1, "microbatches": (1, 2), "report": None, **options})


def quiet_table(model: nn.Module, **options: Any) -> nwise.Plans:
    return nwise.plan(model, X, Y, strategy=["local"], rounds=1, microbatches=(1, 2), report=None, **options)


def test_plan_leaves_the_network_as_it_was() -> None:
    model = network().eval()
    before, random_before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = quiet(model, devices=[1, 2], heads=lambda stages: nwise.heads.fitting(stages, X[:1], 4))
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_before)
    assert made.num_microbatches in (1, 2)
    assert sorted(made.placement) == [0, 1]
    stages = nwise.split(model, at=made.at)
    assert len(stages) == 2
    assert not {name for name in made.at if name.endswith(".1")}, "no stage begins at a ReLU that works in place"
    assert made.seconds >= max(made.busy) * (1 - 1e-9)


def test_plan_shows_its_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Measuring and searching take many seconds for a large network; the first process has bars, on a terminal."""
    quiet(network(), devices=[1, 2], report=print)
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bars: list[str] = []

    def track(items: list[Any], description: str, **options: Any) -> list[Any]:
        bars.append(description)
        return items

    monkeypatch.setattr("rich.progress.track", track)
    quiet(network(), devices=[1, 2])
    assert bars == [], "`report=None` is silent"
    quiet(network(), devices=[1, 2], report=print)
    assert bars == ["measuring", "searching"]


def test_plan_in_words() -> None:
    texts: list[str] = []
    limited = [nwise.Device(1, 1e8), nwise.Device(2)]
    made = quiet(network(), devices=limited, report=texts.append)
    assert texts == [str(made)]
    lines = texts[0].splitlines()
    assert lines[0].startswith(f"2 devices, 2-wise-mean, M = {made.num_microbatches}: ")
    assert lines[0].endswith(" a step expected")
    assert lines[1].split() == ["device", "speed", "stages", "busy", "memory"]
    assert "0 from the start" in texts[0]
    assert " of 95 MiB" in texts[0]


class Passes(nn.Module):
    """Hands its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_stages_begin_with_no_layer_that_works_in_place() -> None:
    """Regression: the layer behind an identity changed the input of the identity, and torch's error came from deep inside."""
    model = nn.Sequential(
        *(nn.Linear(16, 16), Passes(), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Dropout(0.1, inplace=True)),
        nn.Linear(16, 4),
    )
    made = quiet(model, devices=3, num_stages=3)
    assert made.at == ("3", "5")
    with pytest.raises(
        ValueError, match="at least one piece for each of the 4 stages. Found 3; use fewer devices or stages"
    ):
        quiet(model, devices=4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
def test_plan_of_a_compiled_network() -> None:
    """Regression: the names began with the compiler's own module."""
    model = network()
    assert quiet(torch.compile(model), devices=2).at[0] in [name for name, _ in model.named_modules()]  # type: ignore[arg-type]


def test_plan_leaves_heads_of_the_caller_alone() -> None:
    """Regression: gradients of a head that the caller uses elsewhere were dropped, and its statistics changed."""
    head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))
    head[1].weight.grad = torch.ones(4, 16)
    before = copy.deepcopy(head.state_dict())
    quiet(network(), devices=[nwise.Device(1, 1e9)] * 2, heads=lambda stages: [head] * (len(stages) - 1))
    assert head[1].weight.grad is not None
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_batch_norm_gets_two_samples() -> None:
    """Regression: the default tried one sample in a micro-batch, and torch refused it."""
    made = nwise.plan(network(), X, Y, devices=2, rounds=1, report=None)
    assert made.measured is not None
    assert sorted(made.measured.pieces) == [1, 2, 4]


def test_names_of_a_hugging_face_network_are_those_of_split() -> None:
    """Regression: the first layer of a list was named by its parent, which only plain networks allow."""
    pytest.importorskip("transformers")
    model = tiny("ResNetForImageClassification")
    images = torch.randn(4, 3, 16, 16)
    made = nwise.plan(model, images, torch.arange(4) % 3, devices=4, microbatches=1, rounds=1, report=None)
    assert len(nwise.split(model, made.at, images)) == 4


def test_order_of_the_pipeline_fits_the_memory_of_the_plan() -> None:
    """Regression: the pipeline chose its order without the plan's limits, and needed 1.4 times the memory."""
    costs = Costs(1, 0, 1, 1, activation_bytes=10)
    flows = flows_for(nwise.EndToEnd(), 2, 8)
    free = choose("best", flows, (0, 1), None, costs)
    limited = choose("best", flows, (0, 1), None, costs, (25.0, 100.0))
    assert max(peak_bytes(free.with_costs(costs))) > 25
    assert peak_bytes(limited.with_costs(costs))[0] <= 25
    with pytest.warns(UserWarning, match="`memory` should be at least 10 bytes .* The pipeline runs the fastest order"):
        choose("best", flows, (0, 1), None, costs, 5.0)
    pipe = nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], strategy="2-wise", schedule="best")
    pipe._prices = costs, 5.0
    pipe.refresh()
    with pytest.warns(UserWarning, match="whatever its memory") as seen:
        pipe.step(torch.randn(4, 2), target=torch.tensor([0, 1, 0, 1]))
    assert [w.filename for w in seen] == [__file__], "regression: the warning named a line of nwise"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "net"}, "`model` should be an nn.Module, .* Found str"),
        ({"loss_fn": [nn.functional.mse_loss]}, "`loss_fn` should be a function"),
        ({"loss_fn": nn.CrossEntropyLoss}, "`loss_fn` should be a function"),
        ({"optimizer": "adam"}, "`optimizer` should be a function"),
        ({"optimizer": lambda parameters: None}, "`optimizer` should return an optimizer of torch. Found NoneType"),
        ({"heads": [nn.Linear(2, 2)]}, "`heads` should be a function. Found list"),
        ({"report": True}, "`report` should be a function. Found bool"),
    ],
)
def test_wrong_kinds_of_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quiet(**{"model": network(), "devices": 2, **arguments})


def test_targets_have_as_many_samples_as_inputs() -> None:
    with pytest.raises(ValueError, match=r"a mini-batch along dimension 0. Found shapes \[8, 16\], \[7\]"):
        nwise.plan(network(), X, Y[:7], devices=2)
    with pytest.raises(ValueError, match=r"a mini-batch along dimension 0. Found shapes \[\]"):
        nwise.plan(network(), torch.tensor(1.0), devices=2)
    assert as_devices(np.int64(2)) == as_devices(2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "strategy",
    [nwise.Credit([[1, 0, 0], [0.5, 1, 0], [0, 1, 1]]), "hogwild", "rotating-2", "end-to-end-delay-1", "geometric-0.5"],
)
def test_every_strategy_is_planned_and_printed(strategy: Any) -> None:
    made = quiet(network(), devices=[1, 2, 1], strategy=strategy)
    assert "the same as end-to-end" not in str(made)


def test_pipeline_takes_a_plan() -> None:
    model = network()
    made = quiet(model, devices=2, strategy="end-to-end", microbatches=2)
    with pytest.warns(UserWarning, match="micro-batches"):  # of batch norm
        pipe = nwise.Pipeline(nwise.split(model, at=made.at), strategy="end-to-end", placement=made)
    assert pipe.num_microbatches == 2
    assert not pipe.step(X, target=Y).isnan()[-1]
    with pytest.warns(UserWarning, match="micro-batches"):
        four = nwise.Pipeline(
            nwise.split(model, at=made.at), None, nn.functional.cross_entropy, "end-to-end", 4, placement=made
        )
    assert four.num_microbatches == 4
    with pytest.raises(ValueError, match=r"should be a plan for these stages. Found one for 2 stages .* and 3 stages"):
        nwise.Pipeline(nwise.split(model, at=["1", "2"]), strategy="end-to-end", placement=made)
    other = next(name for name in ("1", "2", "3", "4") if name not in made.at)
    with pytest.raises(ValueError, match=rf"2 stages that begin at {other}; cut the network with"):
        nwise.Pipeline(nwise.split(model, at=[other]), strategy="end-to-end", placement=made)


def test_strategies_share_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of strategies gives a table; what was measured serves other devices, too."""
    calls: list[Any] = []

    def counted(*args: Any, **options: Any) -> Profile:
        calls.append(args)
        return profile(*args, **options)

    monkeypatch.setattr(source, "profile", counted)
    model, texts = network(), list[str]()
    made = nwise.plan(
        *(model, X, Y), devices=[1, 2], strategy=["local", "2-wise"], microbatches=2, rounds=1, report=texts.append
    )
    assert len(calls) == 1
    assert texts == [str(made)]
    assert {plan.strategy for plan in made.plans} >= {"local", "end-to-end", "zero-bubble", "one device alone"}
    assert made.verdict[-1] == "With 2 stages 2-wise is end-to-end."
    assert "Measured on cpu, mini-batches of 8; one round" in texts[0]
    assert made["one device alone"].devices == as_devices([2])
    with pytest.warns(UserWarning, match="micro-batches"):  # of batch norm
        pipe = nwise.Pipeline(nwise.split(model, at=made["local"].at), strategy="end-to-end", placement=made["local"])
    assert pipe.num_stages == 2
    measured = made["local"].measured
    assert measured is not None
    again = nwise.plan(measured, devices=[1, 1], strategy="local", report=None)
    assert len(calls) == 1
    assert again.num_microbatches == 2
    assert len(again.at) == 1
    with pytest.raises(ValueError, match="`microbatches` should be among those that were measured, 2. Found 4"):
        nwise.plan(measured, devices=2, microbatches=4)


def test_slow_links_leave_one_device_alone() -> None:
    """Two machines at 80 ms and 200 Mbit/s, and a network of milliseconds."""
    made = quiet_table(network(), devices=2, latency=0.08, bandwidth=25e6)
    assert made.recommended.strategy == "one device alone"
    assert made["end-to-end"].seconds > 2 * 0.08


def test_plan_of_named_inputs() -> None:
    """A Hugging Face network, whose masks travel along, in a dictionary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    nwise.untie(model)
    tokens = torch.randint(0, 32, (4, 8))
    batch = {"input_ids": tokens, "attention_mask": torch.ones(4, 8, dtype=torch.long)}
    made = nwise.plan(
        model,
        batch,
        tokens,
        devices=[nwise.Device(1, 1e9), nwise.Device(3, 1e9)],
        heads=nwise.heads.copied,
        loss_fn=nwise.losses.TokenCrossEntropy(),
        microbatches=1,
        rounds=1,
        report=None,
    )
    stages = nwise.split(model, made.at, batch)
    pipe = nwise.Pipeline(stages, nwise.heads.copied(stages), nwise.losses.TokenCrossEntropy(), placement=made)
    assert not pipe.step(batch, target=tokens).isnan()[-1]
    assert 0 < made.schedule.peak_bytes[0] < 1e9


def test_profiles_survive_json() -> None:
    measured = quiet(network(), devices=2).measured
    assert measured is not None
    again = Profile.from_json(measured.as_json())
    assert again.pieces == measured.pieces
    assert again.seconds == measured.seconds
    assert isnan(again.spread) == isnan(measured.spread)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": None}, "`devices` should be a number, or speeds such as .1, 2, 4., unless torchrun starts"),
        ({"devices": 11}, "The network should have at least one piece for each of the 11 stages"),
        ({"devices": 3, "num_stages": 2}, "`num_stages` should be an integer of at least 3. Found 2"),
        ({"devices": 2, "microbatches": 9}, "`microbatches` should be at most the 8 samples of a mini-batch. Found 9"),
        ({"devices": 2, "microbatches": []}, "`microbatches` should contain at least one number to try"),
        ({"devices": 2, "rounds": 0}, "`rounds` should be an integer of at least 1. Found 0"),
        ({"devices": 2, "strategy": "local@3,2-wise"}, "`strategy` should be the same at every step"),
        ({"devices": 2, "optimizer": torch.optim.LBFGS}, "`optimizer` should update from `.grad` alone. Found LBFGS"),
        ({"devices": 2, "heads": lambda stages: []}, "`heads` should return a module or None for every stage but"),
        (
            {"devices": 2, "heads": lambda stages: ["x"] * (len(stages) - 1)},
            "`heads` should return a module or None .* Found str",
        ),
        ({"devices": 2, "latency": -1.0}, "`latency` should be from 0"),
        ({"devices": 2, "microbatches": 2.5}, "`microbatches` should be an integer of at least 1. Found 2.5"),
    ],
)
def test_invalid_options_of_a_plan_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet(network(), **options)


# Processes ------------------------------------------------------------------------------------------


def test_processes_of_unequal_speed_make_one_plan(tmp_path: Path) -> None:
    """Rank 1 takes four times as long, measures that, and gets fewer blocks; the result is that of one process."""
    [first, second] = results(2, "planned.py", tmp_path)
    assert (first["at"], first["placement"], first["speeds"]) == (second["at"], second["placement"], second["speeds"])
    assert first["speeds"][0] == 1
    assert first["speeds"][1] == pytest.approx(0.25, rel=0.05)
    begin = int(first["at"][0].partition(".")[0])
    blocks = {first["placement"][0]: begin, first["placement"][1]: 8 - begin}
    assert blocks[0] > blocks[1]
    assert second["texts"] == []
    [expected] = first["texts"]
    assert expected.startswith("2 devices, 2-wise-mean, M = 2: ")
    alone = planned.case(tuple(first["at"]), "contiguous")
    assert {**first["digests"], **second["digests"]} == alone
