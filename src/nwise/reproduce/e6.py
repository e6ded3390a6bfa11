"""E6: Transformers on One Billion Word (figures 7 and 8); the runs of E7 too."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from nwise.recipes import Gpt, recipe
from nwise.reproduce import markdown
from nwise.reproduce.cell import Cell
from nwise.reproduce.claims import Claim, exact, greater, mean_of
from nwise.reproduce.clock import Clock, slots_text, step_time
from nwise.reproduce.experiment import Size
from nwise.reproduce.plots import language_models, loss_over_time
from nwise.reproduce.runs import Runs, loss, loss_at, perplexity
from nwise.reproduce.trained import Parts, Trained, on_a_gpu
from nwise.schedule.best import DoesNotFit

# The paper's N-wise runs of Transformers have the mean of the own and the far loss.
PAPER = ("1-wise", "2-wise-mean", "3-wise-mean", "end-to-end")
BEYOND = ("2-wise", "3-wise", "rotating-2", "geometric-0.5", "deep-supervision")
HOGWILD = (3, 4, 5)
_STAGES = (3, 4, 5, 6)
_FOUR = 4  # stages of figure 8, and of what goes beyond the paper
_LEAN = 0.5  # mini-batches' activations of a stage, where memory is short


def cells(size: Size, seeds: int) -> list[Cell]:
    """Stages by methods by seeds, Hogwild (E7) among them."""
    base = on_a_gpu(recipe("lm1b")) if size == "full" else recipe("lm1b-small")
    assert isinstance(base.model, Gpt)
    found = []
    for seed in range(seeds):
        for stages in reversed(_STAGES):
            settings = replace(base, seed=seed, model=replace(base.model, num_stages=stages))
            methods = [*PAPER, *(BEYOND if stages == _FOUR else ()), *(("hogwild",) if stages in HOGWILD else ())]
            found += [Cell(method=m, recipe=replace(settings, strategy=m)) for m in methods]
    return found


def claims(runs: Runs) -> list[Claim]:
    """Figures 7 and 8; losses in nats, and the smaller is the better. A claim about a curve is tested on all its points."""

    def at(method: str, stages: int = _FOUR) -> dict[int, float]:
        return runs.scores(loss, method, stages)

    all_depths = {m: mean_of([at(m, stages) for stages in _STAGES]) for m in PAPER}
    found = []
    for worse, better in (("1-wise", "end-to-end"), *pairwise(PAPER)):
        text = f"at equal steps {worse} is worse than {better} (mean over 3 to 6 stages)"
        found.append(greater(text, "figure 7", all_depths[worse], all_depths[better], unit="nats"))
    found += _at_every_moment(runs, "paper", "figure 8") + _at_every_moment(runs, "honest", "ours")
    ratio = step_time("2-wise-mean", _FOUR, "paper").slots / step_time("end-to-end", _FOUR, "paper").slots
    text = "2-wise takes less than half the step time of end-to-end, four stages, paper's costs"
    found.append(exact(text, "figure 7", ratio, holds=ratio < 0.5, wanted="< 0.5", unit="of it"))
    text = "the mean variant helps: 2-wise is worse than 2-wise-mean"
    found.append(greater(text, "section 4", at("2-wise"), at("2-wise-mean"), unit="nats"))
    for clock in ("paper", "honest"):
        cost = step_time("2-wise-mean", _FOUR, clock).slots / step_time("2-wise", _FOUR, clock).slots - 1
        text = f"the mean variant costs no step time, {clock} costs"
        found.append(exact(text, "section 4", 100 * cost, holds=abs(cost) < 1e-9, wanted="0", unit="%"))
    found += [
        greater(f"3-wise-mean is worse than {m}", "ours", at("3-wise-mean"), at(m), unit="nats") for m in BEYOND[2:]
    ]
    return found


def moments(runs: Runs, clock: Clock, count: int = 4) -> list[float]:
    """Times, in slots, at which all methods of figure 8 can be compared: until the fastest has ended."""
    ends = [
        runs.of(method, _FOUR)[0]["steps"] * step_time(method, _FOUR, clock).slots
        for method in PAPER
        if runs.of(method, _FOUR)
    ]
    return [min(ends) * (i + 1) / count for i in range(count)] if ends else []


def _at_every_moment(runs: Runs, clock: Clock, source: str) -> list[Claim]:
    """Equal time: the moment at which it is least certain decides; one at which it is certainly not so is enough."""
    found = []
    for method in ("1-wise", "2-wise-mean"):
        leads = []
        for moment in moments(runs, clock):
            scores = [
                runs.scores(loss_at(moment / step_time(m, _FOUR, clock).slots), m, _FOUR)
                for m in ("end-to-end", method)
            ]
            text = f"{method} is better than end-to-end at every moment of equal time, {clock} costs (least certain)"
            leads.append(greater(text, source, *scores, unit="nats"))
        wrong = [claim for claim in leads if claim.verdict == "does not hold"]
        found += [min(wrong or leads, key=lambda claim: claim.low)] if leads else []
    return found


def tables(runs: Runs) -> str:
    """Perplexity and step time by stages; at four stages also what goes beyond the paper."""
    rows = [[m, *(runs.shown(perplexity, m, a) for a in _STAGES)] for m in (*PAPER, "hogwild")]
    quality = markdown.table(["test perplexity per token", *markdown.stages(_STAGES)], rows)
    rows = [[m, *(_slots(m, a) for a in _STAGES)] for m in PAPER]
    times = markdown.table(["slots a step: paper's costs, honest costs (M)", *markdown.stages(_STAGES)], rows)
    return "\n\n".join([quality, times, "## Four stages: equal steps, equal time, equal memory", _four(runs)])


def _slots(method: str, stages: int) -> str:
    paper, honest = step_time(method, stages, "paper"), step_time(method, stages, "honest")
    return f"{paper.slots:g}, {honest.slots:.2f} ({honest.num_microbatches})"


def _four(runs: Runs) -> str:
    times: list[tuple[Clock, float | None]] = [("paper", None), ("honest", None), ("honest", _LEAN)]
    rows = []
    for method in (*PAPER, *BEYOND):
        row = [method, runs.shown(loss, method, _FOUR, digits=3)]
        for clock, limit in times:
            ends = moments(runs, clock)
            try:
                steps = ends[-1] / step_time(method, _FOUR, clock, limit).slots if ends else 0.0
            except DoesNotFit:
                row.append("–")
            else:
                row.append(runs.shown(loss_at(steps), method, _FOUR, digits=3))
        rows.append([*row, slots_text(method, _FOUR)])
    headings = ("equal steps", "equal time, paper's costs", "equal time, honest costs", f"equal time, memory {_LEAN:g}")
    note = (
        "Equal time is the time in which the fastest of the paper's methods has done all its steps; a method that is slower has "
        "done fewer, none has done more. Paper's costs: no micro-batches, a forward and a backward of one slot, heads free. "
        "Honest costs: F = I = W, a head of half a stage, 0.02 an action, best M, end-to-end as zero-bubble. Memory: "
        "mini-batches' activations on a stage at once; the cotangents that zero-bubble keeps besides are not counted."
    )
    return f"{markdown.table(['test loss, nats', *headings, 'slots a step (M)'], rows)}\n\n{note}"


def draw(runs: Runs, path: Path) -> None:
    """Figure 7 and figure 8."""
    language_models(runs, list(PAPER), _STAGES, path.with_suffix(".png"))
    loss_over_time(runs, [*PAPER, *BEYOND], _FOUR, path.with_name(f"{path.name}-time.png"))


E6 = Trained(
    "e6",
    "E6, Transformers on One Billion Word",
    Parts(cells=cells, claims=claims, tables=tables, draw=draw, seeds={"small": 3, "full": 1}),
)
