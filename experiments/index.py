"""The experiments by name, and the index of the paper's results: ten figures, six tables."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from math import isnan
from pathlib import Path

from experiments.harness import markdown
from experiments.harness.claims import Claim, effect_text, holm
from experiments.harness.experiment import Experiment, Job, Result, Size
from experiments.harness.store import Store
from experiments.harness.trained import Trained
from experiments.pictures import PICTURES
from nwise.app.records import write_text
from nwise.checks import hint


def _import_experiments() -> list[Experiment]:
    """Import `EXPERIMENT` of every folder beside this file: the timing model first, experiments that reuse others' runs last."""
    names = [
        path.parent.name for path in Path(__file__).parent.glob("*/experiment.py") if path.parent.name != "harness"
    ]
    experiments: list[Experiment] = [import_module(f"experiments.{name}.experiment").EXPERIMENT for name in names]
    return sorted(experiments, key=lambda one: (isinstance(one, Trained), one.owner != one.name, one.name))


# In the order in which they are run.
EXPERIMENTS = {one.name: one for one in (*PICTURES, *_import_experiments())}


def experiment(name: str) -> Experiment:
    """Return the experiment of a name.

    >>> experiment("e1").title
    'E1, accuracy against the number of stages'
    """
    if name not in EXPERIMENTS:
        raise ValueError(
            f"`experiment` should be all or one of {', '.join(EXPERIMENTS)}. Found {name!r}.{hint(name, EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]


def verdict(claims: list[Claim]) -> str:
    """Return how many claims hold, as text.

    >>> verdict([])
    'no claims yet'
    >>> from experiments.harness.claims import exact
    >>> verdict([exact("the printed M is best", "table", 9, holds=False, wanted="0", unit="cells off")])
    '1 exact, of which 1 does not hold'
    """
    if not claims:
        return "no claims yet"
    # No run could have changed the verdict of an exact claim, so it is counted apart, also where it does not hold.
    exact = [claim for claim in claims if not claim.seeds and claim.verdict in ("exact", "does not hold")]
    counts = Counter(claim.verdict for claim in claims if claim not in exact)
    tested = len(claims) - len(exact)
    parts = [f"{counts['holds']} of {tested} claims hold"] if tested else []
    if counts["does not hold"]:
        parts.append(f"{counts['does not hold']} {'does' if counts['does not hold'] == 1 else 'do'} not")
    if counts["undecided"]:
        parts.append(f"{counts['undecided']} undecided")
    if exact:
        wrong = sum(claim.verdict != "exact" for claim in exact)
        parts.append(
            f"{len(exact)} exact" + (f", of which {wrong} {'does' if wrong == 1 else 'do'} not hold" if wrong else "")
        )
    return ", ".join(parts)


Claims = dict[tuple[str, Size], list[Claim]]  # by experiment and size
_BEGIN, _END = "<!-- the index: written by python -m experiments -->", "<!-- end of the index -->"


def write_index(folder: Path) -> None:
    """Write the table of all results into the folder's README, and the paper's claims into the manual, if it is beside it.

    The other words of these pages stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = claims(folder)
    _replace(folder / "README.md", table(folder, found), f"# The paper's results, run again\n\n{_BEGIN}\n{_END}\n")
    manual = folder.resolve().parent / "docs" / "paper.md"
    if manual.exists():
        _replace(manual, claims_table(found))


def claims(folder: Path) -> Claims:
    """Return the claims of every experiment and size."""
    jobs = [(one, Job(folder=folder, size=size)) for one in EXPERIMENTS.values() for size in one.sizes]
    return {(one.name, job.size): one.claims(job) for one, job in jobs}


def _replace(path: Path, table: str, empty: str = "") -> None:
    """Put a table between the two marks of a page."""
    text = path.read_text() if path.exists() else empty
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{path} should have the lines {_BEGIN} and {_END}, with the index between them. Found none.")
    write_text(path, f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}")


def claims_table(found: Claims) -> str:
    """Return a table in Markdown: every claim of the paper, what was found, and the verdict before and after Holm."""
    rows: list[tuple[object, ...]] = []
    for result, one in _results():
        for size in one.sizes:
            page = f"[{one.name}, {size}](../experiments/{one.name}/{size}.md)"
            tested = found[one.name, size]
            for claim, stays in zip(tested, holm(tested), strict=True):
                if claim.source == "ours" or not claim.source.startswith(result.source) or isnan(claim.effect):
                    continue
                falls = claim.seeds > 1 and not stays and claim.verdict != "undecided"
                verdict = f"{claim.verdict}; undecided after Holm" if falls else claim.verdict
                effect = effect_text(claim)
                rows.append((claim.source, claim.text, claim.wanted, effect, claim.seeds or "–", verdict, page))
    return markdown.table(("in the paper", "claim", "should be", "found", "seeds", "verdict", "record"), rows)


def _results() -> list[tuple[Result, Experiment]]:
    """Return all rows of the index with their experiments, in the order of the paper."""
    results = [(result, one) for one in EXPERIMENTS.values() for result in one.results]
    return sorted(results, key=lambda pair: _order(pair[0].place))


def _order(place: str) -> tuple[bool, str, int]:
    """Return a key that puts the paper's figures first, then its tables, each by number."""
    kind, _, number = place.partition(" ")
    return not place, kind, int(number or 0)


def table(folder: Path, found: Claims) -> str:
    """Return a table in Markdown: every result, its status, its verdict."""
    states = {key: EXPERIMENTS[key[0]].progress(Job(folder=folder, size=key[1])) for key in found}
    rows: list[tuple[object, ...]] = []
    for result, one in _results():
        status, verdicts = [], []
        for size in one.sizes:
            done, total = states[one.name, size]
            if done:
                own = [claim for claim in found[one.name, size] if claim.source.startswith(result.source)]
                status.append(size if done == total else f"{size} ({done} of {total} runs)")
                verdicts.append(f"{size}: {verdict(own)}")
        where = f"[{one.name}]({one.name}/)"
        rows.append((result.place, result.what, where, ", ".join(status) or "not run", "; ".join(verdicts) or "–"))
    for one in EXPERIMENTS.values():
        for waiting in one.waiting:
            records = Store(folder / one.name / "full.jsonl").read()
            runs = sum(record.get("config", {}).get("data", {}).get("source") in waiting.sources for record in records)
            outcome = (f"full: {runs} runs", "see full") if runs else ("not run: no data", "–")
            rows.append((waiting.place, waiting.what, f"[{one.name}]({one.name}/)", *outcome))
    return markdown.table(("in the paper", "result", "experiment", "status", "verdict"), rows)
