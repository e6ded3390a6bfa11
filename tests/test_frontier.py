"""The frontier: arms, their rates, the clock, and the claims on made-up records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.__main__ import main as reproduce
from experiments.e1 import experiment as e1
from experiments.e2 import experiment as e2
from experiments.frontier import clock, costs, experiment, memory, plots
from experiments.frontier.arms import ARMS, STEPS, Arm, arm
from experiments.harness.cell import Cell, Record
from experiments.harness.claims import Claim
from experiments.harness.experiment import Job, NothingMatches
from experiments.harness.runs import Runs
from experiments.harness.search import TRIAL_SEED, Search
from experiments.harness.store import Store
from experiments.harness.trained import Trained
from experiments.index import EXPERIMENTS
from experiments.rates.experiment import SEARCHES
from experiments.width import experiment as width
from nwise.app.recipes import EmbeddedText, ImageSource, to_json
from nwise.app.training import Trainer
from nwise.planning.partitions import Piece
from nwise.planning.profiling import Profile

FOLDER = Path(__file__).parents[1] / "experiments"


def records(name: str, end: float, slope: float = 0.0, seeds: int = 3) -> list[Record]:
    """Made-up runs whose loss falls in a straight line to `end` and some thousandths more for each seed."""
    return [
        {
            "method": name,
            "part": "",
            "seed": seed,
            "stages": 8,
            "tests": [
                {"step": step, "loss": [end + slope * (STEPS - step) + seed / 1000 * (1 + end)]}
                for step in (0, STEPS // 2, STEPS)
            ],
        }
        for seed in range(seeds)
    ]


def found(runs: Runs) -> dict[str, Claim]:
    return {claim.text: claim for claim in experiment.claims(runs)}


def test_rates_are_a_factor_of_two_apart() -> None:
    for one in SEARCHES:
        assert len(one.grid) >= 5
        assert [b / a for a, b in pairwise(one.grid)] == pytest.approx([2] * (len(one.grid) - 1))


def test_width_compares_distances_from_exact_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm comes closer to exact training if its distance shrinks, whatever happens to both losses."""
    narrow = Runs([*records("muon end-to-end", 1.2), *records("muon local", 1.4), *records("muon 2-wise-mean", 1.3)])
    monkeypatch.setattr(width, "_narrow", lambda: narrow)
    monkeypatch.setattr("experiments.frontier.experiment.slots", lambda one, latency: "")  # a delay's take seconds
    ends = {"end-to-end": 1.0, "local": 1.3, "2-wise-mean": 1.02, "rotating-2, all heads": 1.02}
    seeds = {"2-wise-mean": 4}
    made = [records(width.at(name).name, end, slope=1e-4, seeds=seeds.get(name, 5)) for name, end in ends.items()]
    runs = Runs([record for some in made for record in some])
    claims = {claim.text: claim for claim in width.claims(runs)}
    closer = [
        claims[f"{name} is behind end-to-end by less at width 256 than at 96, equal steps"]
        for name in ("local", "2-wise-mean", "rotating-2, all heads")
    ]
    assert [claim.verdict for claim in closer] == ["does not hold", "holds", "undecided"], "rotating has no narrow runs"
    assert [claim.effect for claim in closer][:2] == pytest.approx([-0.1, 0.08], abs=1e-3)
    assert [claim.seeds for claim in closer] == [3, 3, 0], "seeds of both widths"
    assert claims["end-to-end, 1 block is worse than end-to-end"].verdict == "undecided", "without runs"
    assert claims["local is worse than 2-wise-mean"].seeds == 4
    # A step of local training is shorter, so exact training has done fewer steps: 2500 * 3.27 / 4.19.
    ahead = claims["equal time, latency 0: end-to-end is worse than local"]
    assert ahead.effect == pytest.approx(1.0 + 1e-4 * 2500 * (1 - 3.27 / 4.19) - 1.3, abs=1e-3)
    rows = width.EXPERIMENT.parts.tables(runs).splitlines()
    assert "| local | 1.402 (0.001) | 1.305 (0.002) |" in "\n".join(rows)
    assert "| 2-wise-mean | 0.100 | 0.020 | +0.080 | +0.080 to +0.080 |" in rows, "distances, unpaired"
    assert "| end-to-end-delay-1, extrapolated | – | – | – | – |" in rows


def test_claims_of_e6_are_tested_again() -> None:
    """A mean variant that helps, and a method that leads at every moment by the paper's costs and never by ours."""
    losses = {"end-to-end": 1.0, "local": 1.2, "2-wise": 1.3, "2-wise-mean": 1.1}
    runs = Runs([record for name, end in losses.items() for record in records(f"muon {name}", end, slope=1e-3)])
    claims = {claim.text: claim for claim in experiment.e6_claims(runs)}
    assert claims["equal steps: 2-wise is worse than 2-wise-mean"].verdict == "holds"
    leads = "leads end-to-end at all of eight moments"
    assert claims[f"the paper's costs: local {leads}"].verdict == "holds"
    assert claims[f"our costs, latency 0: local {leads}"].verdict == "does not hold"
    assert claims[f"our costs, latency 1: local {leads}"].verdict == "holds"
    assert claims[f"our costs, latency 0: 3-wise-mean {leads}"].verdict == "undecided", "without runs"


@pytest.mark.parametrize("name", ["e1", "e2", "frontier", "width"])
def test_reported_runs_have_the_best_rates(name: str) -> None:
    """A new trial could choose another rate; runs with the old one would then leave the tables."""
    one = EXPERIMENTS[name]
    assert isinstance(one, Trained)
    job = Job(folder=FOLDER, size="medium")
    assert sum(len(runs.records) for runs in one.all_runs(job)) == len(one.store(job).read())


def test_rates_come_from_trials_with_the_settings_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {"ours": arm("muon local").trial}
    search = Search(title="Ours", grid=(0.01, 0.02), trials=trials)
    monkeypatch.setattr("experiments.harness.search.RECORDS", tmp_path / "medium.jsonl")
    assert search.rates() == {}

    def record(cell: Cell, loss: float, **changes: Any) -> Record:
        config = to_json(replace(cell.recipe, **changes))
        return {
            "method": "ours",
            "part": cell.part,
            "seed": 100,
            "stages": 8,
            "tests": [{"loss": [loss]}],
            "config": config,
        }

    low, high = search.cells
    store = Store(tmp_path / "medium.jsonl")
    store.add(record(low, 2.0), record(high, 1.0, batch_size=8), {"another": "record"})
    assert search.rates() == {}, "a trial with other batches does not count"
    store.add(record(high, 3.0))
    assert search.rates() == {"ours": 0.01}


def test_place_of_a_run_is_not_part_of_its_cell(tmp_path: Path) -> None:
    """Runs of one method may go to CPUs and GPUs; the record says where."""
    local = Cell(method="local", recipe=arm("muon local").run(0.02, seed=0))
    record = {"method": "local", "part": "", "config": to_json(replace(local.recipe, device="cuda:1"))}
    store = Store(tmp_path / "medium.jsonl")
    store.add(record)
    here = replace(local, recipe=replace(local.recipe, device="cpu"))
    assert store.records_for([local, here]) == [(local, record), (here, record)]


def test_less_memory_takes_more_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage keeps the activations of one micro-batch in local training; a second one costs two more actions of 0.02 slots."""
    monkeypatch.setattr(clock, "COUNTS", (1, 2, 4))
    piece = Piece("block", forward=9, input_grad=9, weight_grad=9, chain=9, head=9)  # the times are the clock's
    pieces = {m: [replace(piece, activation_bytes=8 / m)] * 8 for m in clock.COUNTS}
    sizes = Profile(pieces, "cpu", 16, tuple(range(8)), 0.0)
    local = arm("muon local")
    assert memory.fastest(local, 0.0, sizes) == pytest.approx((3.59, 8))
    assert memory.fastest(local, 0.0, sizes, limit=7.9) == pytest.approx((3.63, 4))
    assert memory.fastest(local, 0.0, sizes, limit=2.0) == pytest.approx((3.71, 2))
    assert memory.fastest(local, 0.0, sizes, limit=1.9) is None
    late = arm("muon end-to-end-delay-2, extrapolated")
    assert memory.fastest(late, 0.0, sizes, limit=8.0) is None, "it keeps the activations of two mini-batches and more"


def test_memory_is_that_of_the_leanest_of_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search returns the first of the fastest schedules. A page once said 63 MiB for 2-wise-mean with a delay; 37 suffice."""
    steps = [(4.0, 63.0), (4.0 + 1e-12, 37.0), (4.1, 30.0)]

    def search(one: Arm, latency: float, sizes: Profile, limit: float = inf) -> tuple[float, float] | None:
        return next((step for step in steps if step[1] <= limit), None)

    monkeypatch.setattr(memory, "fastest", search)
    sizes = Profile({}, "cpu", 16, (), 0.0)
    assert memory.leanest(arm("muon local"), 0.0, sizes) == pytest.approx((4.0, 37))
    del steps[2]
    assert memory.leanest(arm("muon local"), 0.0, sizes) == pytest.approx((4.0, 37)), "nothing leaner fits"


def searched(losses: dict[str, dict[int, Sequence[float | None]]], seeds: Sequence[int]) -> tuple[Search, Runs]:
    """A search of the rates 1, 2 and 4, and its trials with these losses, by method and seed."""
    runs = [
        {"method": method, "part": f"rate {rate:g}", "seed": seed, "stages": 8, "tests": [{"loss": [loss]}]}
        for method, rows in losses.items()
        for seed, row in rows.items()
        for rate, loss in zip((1, 2, 4), row, strict=False)
    ]
    trials = {method: lambda rate: arm("muon local").trial(rate) for method in losses}
    return Search(title="Ours", grid=(1, 2, 4), trials=trials, seeds=tuple(seeds)), Runs(runs)


def test_best_rate_has_the_lowest_mean_of_all_seeds_and_a_star_at_an_end() -> None:
    rows = {"inside": (3.0, 1.0, 2.0), "at the end": (3.0, 2.0, 1.0), "not tried with all": (1.0, 2.0)}
    search, runs = searched({method: {TRIAL_SEED: row} for method, row in rows.items()}, [TRIAL_SEED])
    assert search.best(runs) == {"inside": 2, "at the end": 4}
    assert search.table(runs).splitlines()[2:5] == [
        "| inside | 3.000 | **1.000** | 2.000 |",
        r"| at the end | 3.000 | 2.000 | **1.000** \* |",
        "| not tried with all | 1.000 | 2.000 | – |",
    ]
    losses: dict[int, Sequence[float | None]] = {100: (1.0, 1.2, 9.0), 101: (3.0, 1.2, None)}  # None: it diverged
    search, runs = searched({"ours": losses}, [100, 101])
    assert search.best(runs) == {"ours": 2}
    assert search.best(Runs(runs.records[:3])) == {}
    assert [cell.recipe.seed for cell in search.cells] == [100] * 3 + [101] * 3


def test_records_without_a_cell_are_reported(tmp_path: Path) -> None:
    line = (FOLDER / "e1" / "discarded.jsonl").read_text().splitlines()[0]
    Store(tmp_path / "e1" / "medium.jsonl").add(json.loads(line))
    messages: list[str] = []
    EXPERIMENTS["e1"].reproduce(Job(folder=tmp_path, size="medium", redraw=True, on_skip=messages.append))
    assert len(messages) == 1
    assert "1 records are unused. Their cells have newer ones, or other settings now." in messages[0]


def test_a_trial_is_the_beginning_of_a_run() -> None:
    one = arm("muon 2-wise-mean")
    trial, run = one.trial(0.02), one.run(0.02, 0)
    assert (trial.optimizer, trial.model, trial.batch_size) == (run.optimizer, run.model, run.batch_size)
    assert (trial.max_steps, run.max_steps, trial.seed) == (500, 2500, 100)
    assert run.optimizer.lr / 100**0.5 == pytest.approx(0.003)
    assert run.optimizer.muon_lr / 100**0.5 == pytest.approx(0.02)  # type: ignore[union-attr] # Adam's settings
    switching = arm("muon local@half,end-to-end")
    assert switching.trial(0.02).strategy == "local@250,end-to-end"
    assert switching.run(0.02, 0).strategy == "local@1250,end-to-end"


def test_arms_train_the_same_network() -> None:
    deep = {one.blocks for one in ARMS if one.blocks != 1}
    assert deep == {8}
    assert {one.num_stages * one.model.blocks_per_stage for one in ARMS} == {1, 8}
    assert len({one.name for one in ARMS}) == len(ARMS)


def test_end_to_end_learns_the_same_for_every_cut() -> None:
    """Claims about four stages take the runs with eight, late ones too."""

    def train(num_stages: int) -> list[torch.Tensor]:
        one = replace(arm("muon end-to-end-delay-1, extrapolated"), num_stages=num_stages)
        run = one.run(0.02, seed=0)
        assert isinstance(run.data, EmbeddedText)
        data = replace(run.data, max_bytes=20_000, test_limit=None)
        model = replace(one.model, width=8, sequence_length=8)
        trainer = Trainer(replace(run, data=data, model=model, batch_size=4, max_steps=5, eval_every=1.0, device="cpu"))
        trainer.train()
        return [parameter.detach() for parameter in trainer.pipe.stages.parameters()]

    eight, four = train(8), train(4)
    assert all(torch.equal(a, b) for a, b in zip(eight, four, strict=True))


def test_steps_done_at_a_time() -> None:
    """Local training with heads of 0.55 slots: 3.59 slots a step, 3 for the stage, 0.55 for the head, 0.02 for two actions."""
    local, switching = arm("muon local"), arm("muon local@half,end-to-end")
    ((steps, period, count),) = clock.slots(local)
    assert (steps, count) == (2500, 1)
    assert period == pytest.approx(3.59)
    assert clock.steps_done(local, 359.0) == pytest.approx(100)
    (first, each, _), (second, later, _) = clock.slots(switching)
    assert (first, second) == (1250, 1250)
    assert each == pytest.approx(3.59)
    assert clock.steps_done(switching, 1250 * each + 10 * later) == pytest.approx(1260)
    assert clock.steps_done(switching, 1e9) == 2500
    assert clock.total(switching) == pytest.approx(1250 * (each + later))
    # F, I and W of eight stages but one I, eight heads or outputs: the work of end-to-end has only the last head.
    assert clock.work(arm("muon end-to-end")) == pytest.approx(8 * 3 - 1 + 0.55 + 1, abs=0.05)
    rotating = arm("muon rotating-2-microbatch, all heads")
    assert clock.work(rotating) == pytest.approx(clock.work(arm("muon rotating-2, all heads")))


def period(name: str, num_stages: int = 8) -> float:
    """Slots of a step."""
    return clock.slots(replace(arm(f"muon {name}"), num_stages=num_stages))[0][1]


BOTH = {"muon end-to-end": 2.0, "muon local": 2.0}
FOUR = {"muon end-to-end": 2.0, "muon local, 4 stages": 2.0}
LATE = {"muon end-to-end-delay-1, extrapolated": 2.0, "muon local, 4 stages": 2.0}
PRICE = {
    "muon end-to-end": 1.0, "muon end-to-end-delay-1": 1.02, "adam end-to-end": 1.5, "adam end-to-end-delay-1": 1.8,
}  # fmt: skip
AHEAD = "equal time, latency 0: end-to-end is worse than local"


@pytest.mark.parametrize(
    ("ends", "text", "effect", "verdict"),
    [
        # Both fall alike per step, so at equal time local leads by the steps that it has done more.
        (BOTH, f"muon, {AHEAD}", lambda: 1 - period("local") / period("end-to-end"), "holds"),
        (BOTH, "muon: local is worse than end-to-end", lambda: 0, "undecided"),
        (BOTH, "muon: local is worse than 2-wise-mean", None, "undecided"),
        # An end-to-end run learns the same for every cut, but a local one does not; a step has the length of four stages.
        (FOUR, f"muon, four stages, {AHEAD}", lambda: 1 - period("local", 4) / period("end-to-end", 4), "holds"),
        (FOUR, f"muon, {AHEAD}", None, "undecided"),
        (
            LATE,
            "muon, four stages, equal time, latency 1: end-to-end-delay-1, extrapolated is worse than local",
            lambda: 1 - period("local", 4) / 4.79,
            "holds",
        ),
        (PRICE, "delay 1 costs Muon less than Adam", lambda: 0.28, "holds"),
    ],
)
def test_claims_of_made_up_records(ends: dict[str, float], text: str, effect: Any, verdict: str) -> None:
    runs = Runs([record for name, end in ends.items() for record in records(name, end, 1 / STEPS)])
    claim = found(runs)[text]
    assert claim.verdict == verdict
    assert effect is None or claim.effect == pytest.approx(effect(), abs=0.001)


def test_number_of_claims_is_that_of_the_protocol() -> None:
    """Holm's correction counts all of them."""
    assert len(experiment.claims(Runs([]))) == 41


def test_page_and_figures_from_made_up_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The periods of all arms up to 32 stages take a minute.
    few = [one for one in ARMS if one.strategy in ("end-to-end", "local") and not one.head_blocks]
    monkeypatch.setattr(experiment, "ARMS", few)
    monkeypatch.setattr(plots, "ARMS", few)
    monkeypatch.setattr(experiment, "COMPARED", ("local",))
    assert {name for pair in experiment._PAIRS for name in pair} <= {one.name for one in ARMS}
    pairs = (("muon local", "muon end-to-end"), ("muon local", "muon 2-wise"))
    monkeypatch.setattr(experiment, "_PAIRS", pairs)
    monkeypatch.setattr(experiment, "LATER", "end-to-end")
    monkeypatch.setattr(experiment, "BETTER_LATE", "end-to-end")
    measured = tmp_path / "costs.jsonl"
    names = {one.name for one in few}
    Store(measured).add(*(record for record in Store(costs.RECORDS).read() if record["arm"] in names))
    monkeypatch.setattr(costs, "RECORDS", measured)
    runs = Runs([r for one in few for r in records(one.name, 1.0 + len(one.name) / 100, 1 / STEPS)], "medium")
    text = experiment.tables(runs)
    assert "| muon local | " in text
    losses, _, rest = text.partition("## E6's claims again")
    assert losses.count("–") == 2, (
        "exact training with either optimizer: with latency its first test comes after a quarter"
    )
    assert rest.partition("## Memory")[2].partition("## Steps by measured costs")[0].count("–") == 0
    ends = [1.1 + 1 / STEPS * (STEPS - STEPS * share) + 2.1 / 1000 for share in (0.25, 0.5, 0.75)]
    row = next(
        line for line in text.partition("## Earlier moments")[2].splitlines() if line.startswith("| muon local |")
    )
    assert [float(cell.split()[0]) for cell in row.split(" | ")[1:4]] == pytest.approx(ends, abs=0.001)
    assert "| muon local less muon end-to-end | -0.050 (-0.0" in text
    assert "less muon 2-wise" not in text, "an arm without runs"
    plots.draw_frontier(runs, tmp_path / "medium")
    for name in ("muon", "adam", "muon-four"):
        assert (tmp_path / f"medium-{name}.png").stat().st_size > 10_000


def test_size_that_an_experiment_lacks_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NothingMatches, match="`size` of frontier should be medium. Found small"):
        EXPERIMENTS["frontier"].check(Job(folder=tmp_path))
    assert reproduce(["e7", "--size", "medium", "--folder", str(tmp_path)]) != 0
    assert "`size` of e7 should be small or full. Found medium" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_method_without_a_rate_has_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A medium run needs the method's own rate, which the trials choose."""
    best: dict[str, float] = {"2-wise": 0.001}
    monkeypatch.setattr(Search, "rates", lambda self: best)
    cells = e1.cells("medium", 1)
    assert {(cell.method, cell.num_stages) for cell in cells} == {("2-wise", 3), ("2-wise", 6), ("2-wise", 10)}
    assert {cell.recipe.optimizer.lr for cell in cells} == {0.001}
    best.clear()
    with pytest.raises(
        NothingMatches,
        match=r"e1 should have a learning rate for each method of medium size in .*Found none; run `python",
    ):
        EXPERIMENTS["e1"].check(Job(folder=tmp_path, size="medium"))


@pytest.mark.parametrize("search", [e1.SEARCH, e1.SHORT_SEARCH, e2.SEARCH], ids=["e1", "e1 short", "e2"])
def test_trials_run_on_withheld_images(search: Search) -> None:
    reported = {cell.recipe.epochs for cell in (e2 if search is e2.SEARCH else e1).cells("medium", 1)}
    lengths = {cell.recipe.epochs for cell in search.cells}
    assert lengths == reported if search is e1.SEARCH else max(lengths) < min(reported)
    for cell in search.cells:
        data = cell.recipe.data
        assert isinstance(data, ImageSource)
        assert (data.withheld, data.train_limit) == (0.1, None)
        assert cell.recipe.seed in search.seeds
        assert cell.recipe.seed >= TRIAL_SEED
        assert cell.part == f"rate {cell.recipe.optimizer.lr:g}"


def test_arm_names_say_what_differs() -> None:
    """Only a run of the whole network learns the same for every cut."""
    assert Arm("adam", "local", num_stages=4, head_blocks=2).name == "adam local, 4 stages, heads of 2"
    assert arm("muon end-to-end, 1 block").run_name == "muon end-to-end, 1 block"
    for name in ("muon end-to-end-delay-1, extrapolated", "muon local", "muon local@half,end-to-end"):
        assert arm(name).run_name == name
        assert replace(arm(name), num_stages=4).run_name == name + ("" if "delay" in name else ", 4 stages")
    with pytest.raises(KeyError):
        arm("adam local, 4 stages, heads of 2")
