"""The experiments by name, and the index of the paper's sixteen results."""

from __future__ import annotations

from pathlib import Path

from nwise.hint import hint
from nwise.reproduce import markdown
from nwise.reproduce.claims import Claim
from nwise.reproduce.drawn import FLOW, GRID, MICROBATCH_GRID, STALE
from nwise.reproduce.e1 import E1
from nwise.reproduce.e2 import E2
from nwise.reproduce.e3 import E3
from nwise.reproduce.e4 import E4
from nwise.reproduce.e5 import E5
from nwise.reproduce.e6 import E6
from nwise.reproduce.e7 import E7
from nwise.reproduce.experiment import Experiment, Job, Size
from nwise.reproduce.store import Store
from nwise.reproduce.t import T

# In the order in which they are run: pictures first, then what later ones look at.
EXPERIMENTS: dict[str, Experiment] = {
    found.name: found for found in (STALE, FLOW, GRID, MICROBATCH_GRID, T, E1, E2, E3, E5, E4, E6, E7)
}

# Number, what it is, the experiment, and what a claim's source begins with.
RESULTS: tuple[tuple[int, str, str, str], ...] = (
    (1, "figure: stale gradients of Hogwild", "stale-gradients", "figure 1"),
    (2, "figure: flow of activations and gradients", "flow", "figure 2"),
    (3, "figure: timing grid of four steps, time per batch", "timing-grid", "figure 3"),
    (4, "figure: predicted speed-up over GPipe", "t", "figure 4"),
    (5, "figure: accuracy against stages, double size (E1)", "e1", "figure 5"),
    (6, "figure: accuracy of every head (E3)", "e3", "figure 6"),
    (7, "figure: perplexity and step time against stages (E6)", "e6", "figure 7"),
    (8, "figure: equal time against equal steps (E6)", "e6", "figure 8"),
    (9, "figure: micro-batch grids", "microbatch-grid", "figure 9"),
    (10, "figure: measured against modelled time per batch", "t", "figure 10"),
    (11, "table: residual networks (E2)", "e2", "table 11"),
    (12, "table: equal time (E4)", "e4", "table 12"),
    (13, "table: ensembles (E5)", "e5", "table 13"),
    (14, "table: Hogwild (E7)", "e7", "table 14"),
    (15, "table: grid of fine-tuning (E4)", "e4", "table 15"),
    (16, "table: best M", "t", "table 16"),
)

# Claims of the text, and questions that it does not ask.
FURTHER: tuple[tuple[str, str, str, str], ...] = (
    ("", "text: work in total, residual networks", "e2", "section T"),
    ("", "text: work in total, Transformers", "e6", "section T"),
    ("", "text: the formula, growth of the best M, uneven costs", "t", "section T"),
    ("", "text: the mean variant for language models", "e6", "section 4"),
    ("", "ours: other strategies for residual networks", "e2", "ours"),
    ("", "ours: other strategies and honest costs for Transformers", "e6", "ours"),
)

# Rows of the paper's tables for which other data are needed.
_OTHER_DATA: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("11", "table: residual networks on CIFAR-100 and ImageNet", "e2", ("cifar100", "imagenet")),
    ("6, 13", "every head, and ensembles, on ImageNet", "e2", ("imagenet",)),
    ("12, 15", "tables: equal time, and grid of fine-tuning, on CIFAR-100", "e4", ("cifar100",)),
)


def experiment(name: str) -> Experiment:
    """The experiment of a name.

    >>> experiment("e1").title
    'E1, accuracy against the number of stages'
    """
    if name not in EXPERIMENTS:
        raise ValueError(
            f"`experiment` should be all or one of {', '.join(EXPERIMENTS)}. Found {name!r}.{hint(name, EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]


def verdict(claims: list[Claim]) -> str:
    """How many claims hold.

    >>> verdict([])
    'no claims yet'
    """
    if not claims:
        return "no claims yet"
    counts = {what: sum(claim.verdict == what for claim in claims) for what in ("holds", "does not hold", "undecided")}
    said = [f"{counts['holds']} of {len(claims)} claims hold"]
    said += [
        f"{counts['does not hold']} does not" if counts["does not hold"] == 1 else f"{counts['does not hold']} do not"
    ]
    said += [f"{counts['undecided']} undecided"]
    return ", ".join(text for text, count in zip(said, counts.values(), strict=True) if count or text is said[0])


_BEGIN, _END = "<!-- the index: written by nwise reproduce -->", "<!-- end of the index -->"


def write_index(folder: Path) -> None:
    """Write the table of all results into the folder's README, whose other words stay."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    text = path.read_text() if path.exists() else f"# The paper's results, run again\n\n{_BEGIN}\n{_END}\n"
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(
            f"{path} should have the lines {_BEGIN} and {_END}, with the index between them. Found no such."
        )
    path.write_text(f"{before}{_BEGIN}\n\n{table(folder)}\n\n{_END}{after}")


def table(folder: Path) -> str:
    """As Markdown: every result, its status, its verdict."""
    jobs: dict[Size, Job] = {"small": Job(folder=folder, size="small"), "full": Job(folder=folder, size="full")}
    found = {
        (name, size): (one.progress(job), one.claims(job))
        for name, one in EXPERIMENTS.items()
        for size, job in jobs.items()
    }
    rows: list[tuple[object, ...]] = []
    for number, what, name, source in (*RESULTS, *FURTHER):
        status, verdicts = [], []
        for size in jobs:
            (done, total), claims = found[name, size]
            if done:
                status.append(size if done == total else f"{size} ({done} of {total} runs)")
                verdicts.append(f"{size}: {verdict([c for c in claims if c.source.startswith(source)])}")
        rows.append((number, what, f"[{name}]({name}/)", ", ".join(status) or "not run", "; ".join(verdicts) or "–"))
    for number, what, name, sources in _OTHER_DATA:
        records = Store(folder / name / "full.jsonl").read()
        runs = sum(record["config"]["data"].get("source") in sources for record in records)
        said = (f"full: {runs} runs", "see full") if runs else ("not run: no data", "–")
        rows.append((number, what, f"[{name}]({name}/)", *said))
    return markdown.table(("", "result", "experiment", "status", "verdict"), rows)
