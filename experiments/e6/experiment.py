"""E6: Transformers on One Billion Word (figures 7 and 8); the runs of E7 too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median

from experiments.harness import markdown
from experiments.harness.cell import Cell, Record
from experiments.harness.claims import Claim, Seeds, difference, exact, greater, greater_at_all, mean_by_seed, slope
from experiments.harness.clock import describe_costs, network_costs, slots_text, step_time, work, work_table
from experiments.harness.experiment import Result, Size
from experiments.harness.plots import language_models, loss_over_time
from experiments.harness.runs import Runs, loss, loss_at, perplexity
from experiments.harness.store import Store
from experiments.harness.trained import Parts, Trained, on_a_gpu
from nwise.app.recipes import Gpt, Recipe, recipe
from nwise.schedule import PAPER as PAPERS_COSTS
from nwise.schedule import TRANSFORMER, Costs, DoesNotFit, Slot
from nwise.schedule.find import method_schedule

# The paper's N-wise runs of Transformers have the mean of the own and the far loss.
PAPER = ("1-wise", "2-wise-mean", "3-wise-mean", "end-to-end")
BEYOND = ("2-wise", "3-wise", "rotating-2", "geometric-0.5", "deep-supervision")
HOGWILD = (3, 4, 5)
HOGWILD_FORMS = ("hogwild", "hogwild-forward-least")
_STAGES = (3, 4, 5, 6)
_FOUR = 4  # stages of figure 8, and of what goes beyond the paper
_MOMENTS = 8  # of equal time
MEASURED_STEPS = "Transformers, a process for each stage"  # rows of `python -m experiments t` under torchrun
FIXED_TIME = "fixed time"  # part of the runs of figure 8
HOURS: dict[Size, float] = {"small": 35 / 60, "full": 192}  # of figure 8
_LEAN = 0.5  # mini-batches' activations of a stage, where memory is short


def _base(size: Size) -> tuple[Recipe, Gpt]:
    base = on_a_gpu(recipe("lm1b")) if size == "full" else recipe("lm1b-small")
    assert isinstance(base.model, Gpt)
    return base, base.model


def clocks(runs: Runs, stages: int = _FOUR) -> dict[str, Costs]:
    """Return the paper's costs, and honest ones of the network."""
    _, model = _base("small" if runs.size == "small" else "full")
    return {"paper's": PAPERS_COSTS, "honest": network_costs(model, stages)}


def settings(size: Size, num_stages: int, method: str, seed: int = 0) -> Recipe:
    """Return the recipe of a run."""
    base, model = _base(size)
    if method in HOGWILD_FORMS and size == "full":
        # Micro-batches would make its ages smaller than the paper's. Its first stage is whole mini-batches ahead; with copies of
        # their weights it keeps only their inputs. A captured step has no delay.
        base = replace(base, microbatches=1, capture=False, recompute=method != "hogwild")
    return replace(base, seed=seed, model=replace(model, num_stages=num_stages), strategy=method)


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: stages by methods by seeds, Hogwild (E7) among them."""
    cells = []
    for seed in range(seeds):
        for stages in reversed(_STAGES):
            methods = [*PAPER, *(BEYOND if stages == _FOUR else ()), *(HOGWILD_FORMS if stages in HOGWILD else ())]
            cells += [Cell(method=m, recipe=settings(size, stages, m, seed)) for m in methods]
    return cells


def cells_of_fixed_time(size: Size, seeds: int) -> list[Cell]:
    """Return the cells of figure 8: as many steps as each method makes in equal hours, on an accelerator a stage."""
    cells = []
    for seed, method in product(range(seeds), PAPER):
        steps = round(3600 * HOURS[size] / step_seconds(size, method))
        recipe = replace(settings(size, _FOUR, method, seed), epochs=1e6, max_steps=steps)
        cells.append(Cell(method=method, part=FIXED_TIME, recipe=recipe))
    return cells


def step_seconds(size: Size, method: str) -> float:
    """Return the seconds of a step with four stages: in full size measured, if T has rows; else by the paper's fitted clock."""
    rows = Store(Path(__file__).parents[1] / "t" / "full.jsonl").read() if size == "full" else []
    expected = Slot().seconds(1) * step_time(method, _FOUR, PAPERS_COSTS).slots
    return measured_steps(rows).get((method, _FOUR), expected)


def claims(runs: Runs) -> list[Claim]:
    """Test the claims of figures 7 and 8; losses in nats, the smaller the better; one about a curve on all its points."""

    def at(method: str, stages: int = _FOUR) -> dict[int, float]:
        return runs.scores(loss, method, stages)

    all_depths = {m: mean_by_seed([at(m, stages) for stages in _STAGES]) for m in PAPER}
    claims = []
    for worse, better in (("1-wise", "end-to-end"), *pairwise(PAPER)):
        text = f"at equal steps {worse} is worse than {better} (mean over 3 to 6 stages)"
        claims.append(greater(text, "figure 7", all_depths[worse], all_depths[better], unit="nats"))
    for stages in _STAGES:
        text = f"at equal steps 1-wise is worse than end-to-end, {stages} stages"
        claims.append(greater(text, "figure 7", at("1-wise", stages), at("end-to-end", stages), unit="nats"))
    gaps = {stages: difference(at("1-wise", stages), at("end-to-end", stages)) for stages in _STAGES}
    text = "the gap of 1-wise to end-to-end widens with the stages: nats for each more stage"
    claims.append(greater(text, "figure 7", slope(gaps), unit="nats"))
    claims += _at_every_step(runs)
    claims += _at_every_moment(runs, "paper's", "figure 8", ("1-wise", "2-wise-mean"))
    claims += _at_every_moment(runs, "honest", "ours", ("1-wise", "2-wise-mean", *BEYOND[2:]))
    text = "the mean variant helps: 2-wise is worse than 2-wise-mean"
    claims.append(greater(text, "appendix B.3", at("2-wise"), at("2-wise-mean"), unit="nats"))
    text = "rotating-2 is worse than 2-wise-mean, which it is in expectation"
    claims.append(greater(text, "ours", at("rotating-2"), at("2-wise-mean"), unit="nats"))
    claims += [
        greater(f"3-wise-mean is worse than {m}", "ours", at("3-wise-mean"), at(m), unit="nats") for m in BEYOND[3:]
    ]
    return claims + _about_time(runs)


def _about_time(runs: Runs) -> list[Claim]:
    """Return the claims that follow from costs alone, at four stages."""
    claims = []
    for name, costs in {"paper's costs": PAPERS_COSTS, "F = I = W, heads of half a stage": TRANSFORMER}.items():
        times = [
            method_schedule(m, num_stages=_FOUR, num_microbatches=1, costs=costs).period
            for m in ("2-wise-mean", "end-to-end")
        ]
        ratio = times[0] / times[1]
        text = f"2-wise takes less than half the step time of end-to-end, M = 1, {name}"
        # Ours: it tests the costs that we assume, not what the paper measured.
        claims.append(exact(text, "ours", ratio, holds=ratio < 0.5, wanted="< 0.5", unit="of it"))
    for clock, costs in clocks(runs).items():
        for plain in ("2-wise", "3-wise"):
            cost = step_time(f"{plain}-mean", _FOUR, costs).slots / step_time(plain, _FOUR, costs).slots - 1
            text = f"the mean variant of {plain} costs no step time, {clock} costs"
            claims.append(exact(text, "appendix B.3", 100 * cost, holds=abs(cost) < 1e-9, wanted="0", unit="%"))
    honest = clocks(runs)["honest"]
    for method in ("2-wise", "2-wise-mean", "3-wise-mean"):
        more = 100 * (work(method, _FOUR, honest) / work("end-to-end", _FOUR, honest) - 1)
        text = f"{method} computes more in total than end-to-end, four stages, by what is multiplied"
        claims.append(exact(text, "section 3", more, holds=more > 0, wanted="> 0", unit="%"))
    return claims


def _part_of(runs: Runs, clock: str) -> str:
    """Return the part of the runs for a figure of equal time: those of fixed time, if there are any and the clock is theirs."""
    return FIXED_TIME if clock == "paper's" and runs.records_for("end-to-end", _FOUR, FIXED_TIME) else ""


def moments(runs: Runs, costs: Costs, part: str = "", count: int = _MOMENTS) -> list[float]:
    """Return times, in slots, at which all methods of figure 8 can be compared.

    They begin with the first test of the slowest method after its begin, since nothing is known of its way there, and end with
    the run of the fastest.
    """
    records = {m: runs.records_for(m, _FOUR, part) for m in PAPER}
    known = [(found[0], step_time(m, _FOUR, costs).slots) for m, found in records.items() if found]
    if not known:
        return []
    last = min(record["steps"] * slots for record, slots in known)
    first = min(last, max(record["tests"][1]["step"] * slots for record, slots in known))
    return [last - (last - first) * i / (count - 1) for i in reversed(range(count))]


def _at_every_step(runs: Runs) -> list[Claim]:
    """Compare at equal steps, at every test after the one before training."""
    tested = [[test["step"] for test in record["tests"][1:]] for record in runs.records_for("end-to-end", _FOUR)]
    claims = []
    for method in PAPER[:-1]:
        text = f"at equal steps end-to-end is better than {method} at every test, four stages (the worst)"
        pairs = [
            (runs.scores(loss_at(step), method, _FOUR), runs.scores(loss_at(step), "end-to-end", _FOUR))
            for step in (tested[0] if tested else ())
        ]
        claims.append(greater_at_all(text, "figure 8", pairs, unit="nats"))
    return [claim for claim in claims if claim is not None]


def _at_every_moment(runs: Runs, clock: str, source: str, methods: Sequence[str]) -> list[Claim]:
    """Compare at equal time."""
    costs, part = clocks(runs)[clock], _part_of(runs, clock)

    def at(method: str, moment: float) -> Seeds:
        return runs.scores(loss_at(moment / step_time(method, _FOUR, costs).slots), method, _FOUR, part)

    ends, claims = moments(runs, costs, part), []
    for method in methods:
        text = (
            f"{method} is better than end-to-end at all of {_MOMENTS} moments of equal time, {clock} costs (the worst)"
        )
        pairs = [(at("end-to-end", moment), at(method, moment)) for moment in ends]
        claims.append(greater_at_all(text, source, pairs, unit="nats"))
    return [claim for claim in claims if claim is not None]


def tables(runs: Runs) -> str:
    """Return perplexity and step time by stages; at four stages also of the methods beyond the paper."""
    rows = [[m, *(runs.shown(perplexity, m, a) for a in _STAGES)] for m in (*PAPER, *HOGWILD_FORMS)]
    quality = markdown.table(["test perplexity per token", *markdown.stages(_STAGES)], rows)
    rows = [[m, *(_slots(m, a, clocks(runs, a)["honest"]) for a in _STAGES)] for m in PAPER]
    times = markdown.table(["slots a step: paper's costs, honest costs (M)", *markdown.stages(_STAGES)], rows)
    rows = [[m, *(_minutes(runs, m, a) for a in _STAGES)] for m in PAPER]
    minutes = markdown.table(["minutes of a run in one process, median", *markdown.stages(_STAGES)], rows)
    rows = [[m, runs.shown(perplexity, m, _FOUR, FIXED_TIME)] for m in PAPER]
    fixed = markdown.table(["four stages, fixed time, paper's costs", "test perplexity at the end"], rows)
    four = [fixed, "## Four stages: equal steps, equal time, equal memory", _four(runs)]
    four += ["## Four stages: work", work_table(PAPER, _FOUR, clocks(runs)["honest"])]
    return "\n\n".join([quality, times, minutes, *four, "## Steps of the paper's networks", _printed()])


def _minutes(runs: Runs, method: str, stages: int) -> str:
    seconds = [record["seconds"] for record in runs.records_for(method, stages)]
    return f"{median(seconds) / 60:.2f}" if seconds else "–"


def _slots(method: str, stages: int, honest: Costs) -> str:
    return f"{step_time(method, stages, PAPERS_COSTS).slots:g}, {slots_text(method, stages, honest)}"


def _printed() -> str:
    """Return slots a step of the paper's sizes by honest costs; no runs are needed."""
    model = _base("full")[1]
    counts = (4, 8, 16)
    costs = {count: network_costs(model, count) for count in counts}
    rows = [[method, *(slots_text(method, count, costs[count]) for count in counts)] for method in (*PAPER, "2-wise")]
    table = markdown.table(["slots a step, honest costs (M)", *markdown.stages(counts)], rows)
    heads = ", ".join(f"{head:g}" for head in costs[4].per_stage("head", 4))
    return f"{table}\n\nWith four stages the heads take {heads} slots; the other costs are those above."


def _four(runs: Runs) -> str:
    honest = clocks(runs)["honest"]
    times: list[tuple[Costs, float | None]] = [(PAPERS_COSTS, None), (honest, None), (honest, _LEAN)]
    rows = []
    for method in (*PAPER, *BEYOND):
        row = [method, runs.shown(loss, method, _FOUR, digits=3)]
        for costs, limit in times:
            ends = moments(runs, costs)
            try:
                steps = ends[-1] / step_time(method, _FOUR, costs, limit).slots if ends else 0.0
            except DoesNotFit:
                row.append("–")
            else:
                row.append(runs.shown(loss_at(steps), method, _FOUR, digits=3))
        rows.append([*row, slots_text(method, _FOUR, honest)])
    headings = ("equal steps", "equal time, paper's costs", "equal time, honest costs", f"equal time, memory {_LEAN:g}")
    note = (
        "Equal time is the time in which the fastest of the paper's methods has done all its steps; a method that is slower has "
        "done fewer, none has done more. Paper's costs: no micro-batches, a forward and a backward of one slot, heads free. "
        f"{describe_costs(honest)}"
    )
    return f"{markdown.table(['test loss, nats', *headings, 'slots a step (M)'], rows)}\n\n{note}"


def draw(runs: Runs, path: Path) -> None:
    """Draw figures 7 and 8."""
    seconds = measured_steps(Store(path.parents[1] / "t" / f"{path.name}.jsonl").read())
    language_models(runs, list(PAPER), _STAGES, path.with_suffix(".png"), seconds)
    parts = {name: (costs, _part_of(runs, name)) for name, costs in clocks(runs).items()}
    loss_over_time(runs, [*PAPER, *BEYOND], _FOUR, parts, path.with_name(f"{path.name}-time.png"))


def measured_steps(rows: Sequence[Record]) -> dict[tuple[str, int], float]:
    """Return the seconds of a step without micro-batches, by method and stages, of the rows that torchrun has measured (T).

    The paper compares training without micro-batches. At its best M end-to-end would make as many steps in a time as 2-wise.
    """
    seconds: dict[tuple[str, int], float] = {}
    for row in rows:
        if row.get("what") == MEASURED_STEPS and row["M"] == 1:
            seconds["end-to-end" if row["method"] == "gpipe" else row["method"], row["A"]] = row["seconds"]
    return seconds


def all_cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells of equal steps and of fixed time."""
    return cells(size, seeds) + cells_of_fixed_time(size, seeds)


EXPERIMENT = Trained(
    "e6",
    "E6, Transformers on One Billion Word",
    Parts(
        cells=all_cells,
        claims=claims,
        tables=tables,
        draw=draw,
        seeds={"small": 2, "full": 1},
        ours=(*BEYOND[1:], HOGWILD_FORMS[1]),
    ),
    [
        Result("figure 7", "perplexity and step time against stages (E6)", "figure 7"),
        Result("figure 8", "equal time against equal steps (E6)", "figure 8"),
        Result("", "text: work in total, Transformers", "section 3"),
        Result("", "text: the mean variant for language models", "appendix B.3"),
        Result("", "ours: other strategies and honest costs for Transformers", "ours"),
    ],
)
