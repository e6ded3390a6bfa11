"""T: the timing model (figures 3, 4, 9 and 10, table 7), predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from experiments.e6.experiment import MEASURED_STEPS
from experiments.harness import claims as claiming
from experiments.harness import markdown
from experiments.harness.claims import Claim, exact
from experiments.harness.experiment import Experiment, Job, NothingMatches, Result
from experiments.t import plots as timing_plots
from experiments.t.printed import PRINTED_STAGES
from experiments.t.steps import measure_steps, step_pieces
from experiments.t.timing import SETTINGS, SMALLER, Piece, Row, fitted, measured, predicted
from nwise.schedule import PAPER, Costs, Slot, paper_time
from nwise.schedule.find import method_schedule
from nwise.schedule.paper import POWERS

KINDS = ("virtual, paper costs", "real", MEASURED_STEPS)


class Timing(Experiment):
    """The timing model."""

    def reproduce(self, job: Job) -> None:
        """Run the pieces that have no rows, one after the other since they measure; then write."""
        done = {row["piece"] for row in self.rows(job)}
        pieces = [piece for piece in _pieces(job) if _is_wanted(piece[0], job)]
        if not pieces:
            raise NothingMatches(
                f"`only` should be part of a piece's name, such as 'best M' or '4 stages'. Found {job.only}."
            )
        missing = [] if job.redraw else [piece for piece in pieces if piece[0] not in done]
        job.begin(self.title, len(pieces), len(missing))
        for name, work in missing:
            job.on_progress(name, 0, 1)
            self.store(job).add(*({"piece": name, **row} for row in work()))
            job.on_progress(name, 1, 1)
        self.write(job)

    def measure_steps(self, job: Job, num_stages: int, *, is_first: bool) -> None:
        """Measure steps of the paper's Transformers with a process for each stage; all call it, and the first one writes."""
        setting, done = SETTINGS[job.size], {row["piece"] for row in self.rows(job)}
        pieces = [piece for piece in step_pieces(num_stages, setting.fewer) if _is_wanted(piece[0], job)]
        missing = [piece for piece in pieces if piece[0] not in done]
        if is_first:
            job.begin(self.title, len(pieces), len(missing))
        for piece in missing:
            row = measure_steps(job.size, num_stages, piece, setting.timed_steps)
            if is_first:
                self.store(job).add(row)
                job.on_progress(piece[0], 1, 1)
        if is_first:
            self.write(job)

    def progress(self, job: Job) -> tuple[int, int]:
        done = {row["piece"] for row in self.rows(job)}
        names = [name for name, _ in _pieces(job)]
        return sum(name in done for name in names), len(names)

    def rows(self, job: Job) -> list[Row]:
        """Return the rows so far."""
        return self.store(job).read()

    def claims(self, job: Job) -> list[Claim]:
        done, total = self.progress(job)
        return claims(self.rows(job)) if done == total else []

    def write(self, job: Job) -> None:
        """Write tables and figures from the rows."""
        rows, claims = self.rows(job), self.claims(job)
        if claims:
            self.document(job, f"{tables(rows)}\n\n## Claims\n\n{claiming.table(claims)}")
            timing_plots.draw(rows, job.folder / self.name, job.size)


def _is_wanted(name: str, job: Job) -> bool:
    return not job.only or any(text in name for text in job.only)


def _pieces(job: Job) -> list[Piece]:
    return [*predicted(), *measured(SETTINGS[job.size])]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Test the claims of section 3.1 and appendix C, and those about the limits of the model."""
    cells = [row for row in rows if row["kind"] == "formula"]
    equal = sum(row["formula"] == row["ours"] for row in cells)
    off = len(
        {(row["method"], _group(row["num_stages"])) for row in rows if row["kind"] == "best M" and row["loss"] > 1e-12}
    )
    growth, wrong = _growth(), misjudged("gpipe")
    text = f"the formula is a schedule's period, in {len(cells)} cells"
    claims = [exact(text, "section 3.1", equal, holds=equal == len(cells), wanted=f"{len(cells)}", unit="cells")]
    text = "the table of best M follows from the formula"
    claims.append(exact(text, "table 7", off, holds=off == 0, wanted="0", unit="cells off"))
    longer = [(a, n) for a in range(1, 31) for n in range(1, a + 1) if paper_time(a, 1, n) > paper_time(a, 1, a)]
    text = "without micro-batches a step of N-wise is never longer than end-to-end's, N <= A <= 30"
    claims.append(exact(text, "section 3.1", len(longer), holds=not longer, wanted="0", unit="longer"))
    grows = [
        (a, n) for a in range(2, 30) for n in range(1, a + 1) if _over_end_to_end(a + 1, n) <= _over_end_to_end(a, n)
    ]
    text = "without micro-batches the speed-up of N-wise over end-to-end grows with the stages, N <= A <= 30"
    claims.append(exact(text, "section 4.1", len(grows), holds=not grows, wanted="0", unit="pairs that do not"))
    papers = Slot()
    least = min(papers.speedup(a, 1) for a in range(2, 31))
    text = "GPipe at its best M takes longer than local training, heads being free, A = 2 to 30: times as long at least"
    claims.append(exact(text, "section 2", least, holds=least > 1, wanted="> 1", unit="times"))
    for n in (1, 2, 3, 4):
        halved = papers.batch_seconds(8, 2, n) / papers.batch_seconds(8, 1, n)
        text = f"two micro-batches make a step of {n}-wise shorter than one, eight stages: times as long"
        claims.append(exact(text, "section 3.1", halved, holds=halved < 1, wanted="< 1", unit="times"))
    faster = min(100 * (papers.speedup(a, 2) - 1) for a in range(15, 31))
    text = "2-wise is at least 50 % faster than GPipe from A = 15 to 30, in whole per cent"
    claims.append(exact(text, "figure 4", faster, holds=round(faster) >= 50, wanted=">= 50", unit="%"))
    text = "the best M of end-to-end grows like the square root of A: exponent from A = 4 to 256"
    claims.append(exact(text, "section 3.1", growth, holds=abs(growth - 0.5) < 0.05, wanted="0.5", unit=""))
    text = "with forwards twice as fast as backwards the model misjudges end-to-end by 25 %"
    claims.append(exact(text, "appendix C", wrong, holds=abs(wrong - 25) < 0.5, wanted="25", unit="%"))
    falls = falling()
    text = "the larger c0 / c1, the larger the speed-up over GPipe, from 0 to 10, A <= 30, N <= 5"
    claims.append(exact(text, "appendix C", len(falls), holds=not falls, wanted="0", unit="pairs A, N that fall"))
    for what in KINDS:
        slot = fitted(rows, what)
        if slot is not None:
            text = f"the fitted model explains measured times within 10 %: {what}"
            error, unit = 100 * slot.error, "% (r.m.s.)"
            # Virtual devices wait for as long as the model says: they test nwise's runtime, not the paper's measurement.
            source = "ours" if "virtual" in what else "figure 10"
            claims.append(claiming.measured(text, source, error, holds=error < 10, wanted="< 10", unit=unit))
    return claims


def _over_end_to_end(num_stages: int, n: int) -> float:
    """Return the speed-up of N-wise over end-to-end training, both without micro-batches."""
    return paper_time(num_stages, 1, num_stages) / paper_time(num_stages, 1, n)


def _group(num_stages: int) -> int:
    """Return the column of the printed table, whose cells may stand for several A."""
    return next(i for i, group in enumerate(PRINTED_STAGES) if num_stages in group)


def _growth() -> float:
    """Return the exponent of the best M of end-to-end against A, M any whole number, by the fitted slot."""
    slot, stages = Slot(), (4, 8, 16, 32, 64, 128, 256)
    best = [slot.best_microbatches(a, a, range(1, 400)) for a in stages]
    return math.log(best[-1] / best[0]) / math.log(stages[-1] / stages[0])


def misjudged(name: str, m: int = 4) -> float:
    """Return the per cent by which the model's time is too long if a forward takes half a slot and a backward a slot."""
    half = Costs(forward=0.5, head=0, input_grad=1, weight_grad=0)
    times = [method_schedule(name, num_stages=4, num_microbatches=m, costs=costs).period for costs in (half, PAPER)]
    return 100 * (1 - times[0] / times[1])


def falling(ratios: Sequence[float] = (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)) -> list[tuple[int, int]]:
    """Return the pairs of A and N whose speed-up over GPipe falls somewhere as c0 / c1 rises, each at its best M."""
    pairs = [(a, n) for a in range(2, 31) for n in range(1, min(5, a) + 1)]
    curves = {(a, n): [Slot(ratio, 1.0).speedup(a, n) for ratio in ratios] for a, n in pairs}
    return [pair for pair, curve in curves.items() if any(b < a - 1e-12 for a, b in pairwise(curve))]


def tables(rows: Sequence[Row]) -> str:
    """Return all tables, in Markdown."""
    return "\n\n".join([_per_batch(rows), _best(rows), _speedup(), _honest(rows), _cheaper(rows), _measured(rows)])


def _per_batch(rows: Sequence[Row]) -> str:
    batch_rows = [row for row in rows if row["kind"] == "per batch"]
    lines = []
    for r in batch_rows:
        paper = r["formula"] if r["formula"].isdigit() else f"{r['formula']} = {r['printed']}"
        lines.append((r["method"], paper, f"{r['ours']:g}"))
    cells = [row for row in rows if row["kind"] == "formula"]
    equal = sum(row["formula"] == row["ours"] for row in cells)
    formula = f"T(A, M, N): the chosen schedule's period equals the formula in {equal} of {len(cells)} cells."
    return f"## Slots per batch, M = 1, A = 8\n\n{markdown.table(('method', 'paper', 'ours'), lines)}\n\n{formula}"


def _best(rows: Sequence[Row]) -> str:
    cells = [row for row in rows if row["kind"] == "best M"]
    lines = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method]
        lines.append((method, *(_cell([c for c in own if c["num_stages"] in group]) for group in PRINTED_STAGES)))
    table = markdown.table(("A", "2", "3", "4", "5", "6-11", "12-30"), lines)
    return f"## Best M among powers of two\n\npaper / formula where they differ, with what the paper's M costs more\n\n{table}"


def _cell(cells: Sequence[Row]) -> str:
    """Return a cell of the printed table, which may stand for several A; marked where the formula differs for one of them."""
    off = [cell for cell in cells if cell["loss"] > 1e-12]
    if not off:
        return str(cells[0]["printed"])
    formula = ", ".join(f"{c['formula']} at {c['num_stages']}" if len(cells) > 1 else str(c["formula"]) for c in off)
    return f"**{cells[0]['printed']} / {formula}** (+{100 * max(c['loss'] for c in off):.1f} %)"


def _speedup() -> str:
    slot = Slot()
    lines = [
        (a, *(f"{100 * (slot.speedup(a, n) - 1):+.1f} %" for n in range(1, 6))) for a in (3, 4, 8, 12, 15, 16, 20, 30)
    ]
    table = markdown.table(("A", *(f"{n}-wise" for n in range(1, 6))), lines)
    return f"## Predicted speed-up over GPipe, paper's model\n\n{table}"


def _honest(rows: Sequence[Row]) -> str:
    title = "## Time at the best M with F = I = W = 1, head 0.5, 0.02 an action (M in brackets)"
    note = "Every W finds the cotangents of all layers kept."
    return f"{title}\n\n{note}\n\n{_times(rows, 'honest')}"


def _cheaper(rows: Sequence[Row]) -> str:
    return f"## The same with {SMALLER:g} an action\n\n{_times(rows, 'smaller overhead')}"


def _times(rows: Sequence[Row], kind: str) -> str:
    own = [row for row in rows if row["kind"] == kind]
    names = list(dict.fromkeys(r["method"] for r in own))
    lines = [(a, *(f"{r['time']:.2f} ({r['M']})" for r in own if r["A"] == a)) for a in sorted({r["A"] for r in own})]
    return markdown.table(("A", *names), lines)


def _measured(rows: Sequence[Row]) -> str:
    measured_rows = [row for row in rows if row["kind"] == "measured"]
    parts = ["## Measured | modelled, milliseconds per mini-batch", f"{markdown.machines(measured_rows)}."]
    for what in dict.fromkeys(row["what"] for row in measured_rows):
        slot = fitted(rows, what) if what in KINDS else None
        if slot is None and what in KINDS:
            continue  # one M fits no formula
        parts.append(what if slot is None else f"{what}: {_fit(slot)}")
        sizes = [m for m in POWERS if any(r["M"] == m for r in measured_rows)]
        lines = []
        for a in sorted({r["A"] for r in measured_rows if r["what"] == what}):
            for method in dict.fromkeys(r["method"] for r in measured_rows):
                own = {r["M"]: r for r in measured_rows if (r["what"], r["A"], r["method"]) == (what, a, method)}
                if own:
                    lines.append((f"{method}, A = {a}", *(_pair(own.get(m), slot) for m in sizes)))
        parts.append(markdown.table(("", *(f"M = {m}" for m in sizes)), lines))
    return "\n\n".join(parts) if measured_rows else ""


def _fit(slot: Slot) -> str:
    return f"c0 = {1e3 * slot.c0:.2f} ms, c1 = {1e3 * slot.c1:.1f} ms, error {100 * slot.error:.1f} %"


def _pair(row: Row | None, slot: Slot | None) -> str:
    if row is None:
        return "–"
    model = timing_plots.modelled(row, slot)
    return f"{1e3 * row['seconds']:.1f} | {1e3 * model:.1f}".replace("|", "\\|")


EXPERIMENT = Timing(
    "t",
    "T, the timing model",
    [
        Result("figure 4", "predicted speed-up over GPipe", "figure 4"),
        Result("figure 10", "measured against modelled time per batch", "figure 10"),
        Result("", "ours: measured times of virtual devices against the model", "ours"),
        Result("table 7", "best M", "table 7"),
        Result("", "text: the formula, N-wise never longer, growth of the best M", "section 3.1"),
        Result("", "text: the overhead's share, uneven costs", "appendix C"),
        Result("", "text: the speed-up grows with the stages", "section 4.1"),
        Result("", "text: GPipe takes longer than local training", "section 2"),
    ],
)
