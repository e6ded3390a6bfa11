"""Claims put to the test: the effect over seeds, its interval, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, sqrt
from statistics import mean, stdev
from typing import Literal

from experiments.harness import markdown

Verdict = Literal["holds", "exact", "does not hold", "undecided"]
Seeds = Mapping[int, float]
MANY = 100
_WORST = 1e6


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim and its test.

    Args:
        text: the claim.
        source: its place, such as ``"table 1"`` or ``"ours"``.
        effect: the mean difference that it is about.
        low: lower end of the 95 % interval.
        high: upper end.
        unit: of these numbers.
        seeds: pairs that were compared; 0 if nothing was drawn at random.
        verdict: ``"undecided"`` also where too little was run; ``"exact"`` if the claim holds and no run could deny it.
        wanted: what the effect should be, such as ``"> 0"``.
        p: smallest level at which an interval decides the claim; 1 if nothing was drawn at random.
    """

    text: str
    source: str
    effect: float
    low: float
    high: float
    unit: str
    seeds: int
    verdict: Verdict
    wanted: str
    p: float = 1.0


def greater(
    text: str, source: str, first: Seeds, second: Seeds | None = None, *, unit: str = "points", among: int = 1
) -> Claim:
    """Test whether the first is greater than the second, or than 0; runs of one seed are a pair.

    Args:
        text, source, unit: as in `Claim`.
        first: values by seed.
        second: values by seed; default: zeros.
        among: number of intervals of which all must be right with a probability of 95 % (Bonferroni); default: 1.

    >>> greater("", "", {0: 3.0, 1: 3.1, 2: 2.9}, {0: 1.0, 1: 1.0, 2: 1.0}).verdict
    'holds'
    """
    second = dict.fromkeys(first, 0.0) if second is None else second
    effect, low, high, seeds = interval(first, second, among=among)
    verdict: Verdict = "holds" if low > 0 else "does not hold" if high < 0 else "undecided"
    level = min(1.0, among * _level(first, second, 0.0))
    return Claim(text, source, effect, low, high, unit, seeds, verdict, "> 0", level)


def equal(text: str, source: str, first: Seeds, second: Seeds, *, within: float, unit: str = "points") -> Claim:
    """Test whether the two differ by less than `within`: holds if the whole interval does, not if none of it does.

    >>> equal("", "", {0: 3.0, 1: 3.1, 2: 2.9}, {0: 1.0, 1: 1.0, 2: 1.0}, within=1).verdict
    'does not hold'
    """
    effect, low, high, seeds = interval(first, second)
    inside, outside = -within < low and high < within, high < -within or low > within
    verdict: Verdict = "holds" if inside else "does not hold" if outside else "undecided"
    level = max(_level(first, second, bound) for bound in (within, -within))
    return Claim(text, source, effect, low, high, unit, seeds, verdict, f"within {within:g}", level)


def no_greater(text: str, source: str, first: Seeds, second: Seeds, *, by: float, unit: str = "points") -> Claim:
    """Test whether the first is greater than the second by less than `by`, if at all."""
    effect, low, high, seeds = interval(first, second)
    verdict: Verdict = "holds" if high < by else "does not hold" if low > by else "undecided"
    return Claim(text, source, effect, low, high, unit, seeds, verdict, f"< {by:g}", _level(first, second, by))


def greater_at_all(
    text: str, source: str, moments: Sequence[tuple[Seeds, Seeds]], *, unit: str = "points"
) -> Claim | None:
    """Test whether the first is greater than the second at every moment; return the test of the worst moment.

    The claim holds if the intervals of all moments do. One moment is enough to deny it, so the intervals that deny are corrected
    for the number of moments (Bonferroni).

    Args:
        text, source, unit: as in `Claim`.
        moments: both values by seed, at each moment.

    Returns:
        The claim, or None without a moment.
    """
    if not moments:
        return None
    worst = min((greater(text, source, *pair, unit=unit) for pair in moments), key=lambda claim: claim.low)
    if worst.verdict == "holds":
        return worst
    wide = [greater(text, source, *pair, unit=unit, among=len(moments)) for pair in moments]
    return min(wide, key=lambda claim: claim.high)


def exact(text: str, source: str, effect: float, *, holds: bool, wanted: str, unit: str) -> Claim:
    """State a claim about numbers that follow from definitions and costs."""
    return Claim(text, source, effect, effect, effect, unit, 0, "exact" if holds else "does not hold", wanted)


def measured(text: str, source: str, effect: float, *, holds: bool, wanted: str, unit: str) -> Claim:
    """State a claim about a single measurement, of whose spread nothing is known."""
    claim = exact(text, source, effect, holds=holds, wanted=wanted, unit=unit)
    return replace(claim, seeds=1, verdict="holds" if holds else "does not hold")


def interval(first: Seeds, second: Seeds, *, among: int = 1) -> tuple[float, float, float, int]:
    """Return the mean of the paired differences, its 95 % interval by Student's t, and the number of pairs.

    With `among` intervals each is so wide that all of them are right with a probability of 95 %.

    >>> effect, low, high, pairs = interval({0: 2.0, 1: 4.0}, {0: 1.0, 1: 1.0, 2: 1.0})
    >>> effect, pairs, round(low, 3), round(high, 3)
    (2.0, 2, -10.706, 14.706)
    """
    differences = _bounded(first, second)
    if not differences:
        return float("nan"), -inf, inf, 0
    effect = mean(differences)
    if len(differences) == 1:
        return effect, -inf, inf, 1
    from scipy.stats import t

    half = float(t.ppf(1 - 0.025 / among, len(differences) - 1)) * stdev(differences) / sqrt(len(differences))
    return effect, effect - half, effect + half, len(differences)


def _bounded(first: Seeds, second: Seeds) -> list[float]:
    """Return the paired differences; a run that diverged is worse than any other, by a large constant."""
    return [max(-_WORST, min(_WORST, d)) for d in difference(first, second).values() if not isnan(d)]


def _level(first: Seeds, second: Seeds, bound: float) -> float:
    """Return the level at which the interval of the mean paired difference just excludes a bound; 1 if there is no interval."""
    differences = _bounded(first, second)
    if len(differences) < 2:
        return 1.0
    error = stdev(differences) / sqrt(len(differences))
    if error == 0:
        return float(mean(differences) == bound)
    from scipy.stats import t

    return float(2 * t.sf(abs(mean(differences) - bound) / error, len(differences) - 1))


def holm(claims: Sequence[Claim], level: float = 0.05) -> list[bool]:
    """Tell which claims stay decided if all decisions together should be right with a probability of 95 % (Holm 1979).

    Claims in which nothing was drawn at random do not count. Claims that were written down but have too few runs do.

    >>> a, b, c = (Claim("", "", 1.0, 0.5, 1.5, "", 3, "holds", "> 0", p) for p in (0.01, 0.04, 0.03))
    >>> holm([a, b, c])
    [True, False, False]
    """
    counted = [i for i, claim in enumerate(claims) if claim.seeds > 1 or claim.verdict == "undecided"]
    decided = [False] * len(claims)
    for rank, i in enumerate(sorted(counted, key=lambda i: claims[i].p)):
        if claims[i].p * (len(counted) - rank) > level:
            break
        decided[i] = True
    return decided


def decided_with(claims: Sequence[Claim], seeds: int) -> int:
    """Estimate how many claims would stay decided after Holm's correction with so many pairs, means and spreads unchanged.

    >>> few = [greater("", "", {0: 3.0, 1: 3.5, 2: 2.5}), greater("", "", {0: 1.0, 1: 2.0, 2: 0.5})]
    >>> [decided_with(few, seeds) for seeds in (3, 4, 5)]
    [1, 1, 2]
    """
    from scipy.stats import t

    levels = []
    for claim in claims:
        if claim.seeds > 1:
            errors = float(t.isf(claim.p / 2, claim.seeds - 1)) * sqrt(seeds / claim.seeds)
            claim = replace(claim, p=float(2 * t.sf(errors, seeds - 1)))
        levels.append(claim)
    return sum(holm(levels))


def seeds_to_decide(claim: Claim) -> int | None:
    """Estimate how many pairs would decide an undecided claim, if their mean and spread stayed as they are.

    Returns:
        The smallest number whose 95 % interval excludes the bound; None for a decided claim, for fewer than two pairs,
        and where more than `MANY` would be needed.

    >>> seeds_to_decide(greater("", "", {0: 3.0, 1: 1.0, 2: -1.0}))
    18
    """
    if claim.verdict != "undecided" or claim.seeds < 2:
        return None
    from scipy.stats import t

    errors = float(t.isf(claim.p / 2, claim.seeds - 1))  # distance from the mean to the bound, in standard errors
    numbers = range(claim.seeds + 1, MANY + 1)
    return next((n for n in numbers if errors * sqrt(n / claim.seeds) > t.isf(0.025, n - 1)), None)


def difference(first: Seeds, second: Seeds) -> dict[int, float]:
    """Return the differences by seed, where both have a value."""
    return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}


def mean_by_seed(series: Sequence[Seeds]) -> dict[int, float]:
    """Return the means of several series by seed, where all have a value.

    >>> mean_by_seed([{0: 1.0, 1: 2.0}, {0: 3.0}])
    {0: 2.0}
    """
    seeds = set.intersection(*(set(values) for values in series)) if series else set()
    return {seed: mean(values[seed] for values in series) for seed in sorted(seeds)}


def slope(points: Mapping[int, Seeds]) -> dict[int, float]:
    """Return for each seed the slope of the straight line that fits its values best.

    Args:
        points: values by seed at each x.

    >>> slope({1: {0: 5.0}, 2: {0: 6.0}, 3: {0: 7.0, 1: 0.0}})
    {0: 1.0}
    """
    centre = mean(points)
    spread = sum((x - centre) ** 2 for x in points)
    weighted = [{seed: len(points) * (x - centre) / spread * v for seed, v in ys.items()} for x, ys in points.items()]
    return mean_by_seed(weighted)


def table(claims: list[Claim]) -> str:
    """Return a table in Markdown, and a note where claims are undecided."""
    headings = ("claim", "source", "should be", "found", "95 % interval", "seeds", "verdict", "after Holm")
    table = markdown.table(headings, map(_row, claims, holm(claims)))
    return f"{table}\n\n{NOTE}" if any(map(seeds_text, claims)) else table


def effect_text(claim: Claim) -> str:
    """Return what a claim is about, with its unit, as text."""
    return "–" if isnan(claim.effect) else f"{claim.effect:+.4g} {claim.unit}".rstrip()


def _row(claim: Claim, stays: bool) -> tuple[object, ...]:
    effect = effect_text(claim)
    between = f"{claim.low:+.4g} to {claim.high:+.4g}" if claim.seeds > 1 else "–" if claim.seeds else "exact"
    if isnan(claim.effect):
        between = "not run"
    verdict = claim.verdict if claim.verdict in ("holds", "exact") else f"**{claim.verdict}**"
    corrected = "–" if claim.seeds < 2 else verdict if stays else "undecided"
    verdict += seeds_text(claim)
    return claim.text, claim.source, claim.wanted, effect, between, claim.seeds or "–", verdict, corrected


def differences(
    headings: Sequence[str], rows: Iterable[tuple[str, Sequence[tuple[Seeds, Seeds]]]], digits: int = 3
) -> str:
    """Return a table in Markdown of mean paired differences that no claim is about: without verdicts and Holm's correction.

    Args:
        headings: of the columns.
        rows: the text of each row, and both values by seed for each column.
        digits: after the point.

    >>> values = {0: 2.0, 1: 3.0, 2: 2.5}, {0: 1.0, 1: 1.0, 2: 1.0}
    >>> print(differences(["", "nats"], [("local less 2-wise", [values])], digits=1).splitlines()[-1])
    | local less 2-wise | +1.5 (+0.3 to +2.7) |
    """

    def cell(first: Seeds, second: Seeds) -> str:
        effect, low, high, seeds = interval(first, second)
        number = f"{effect:+.{digits}f}"
        return "–" if not seeds else number if seeds == 1 else f"{number} ({low:+.{digits}f} to {high:+.{digits}f})"

    return markdown.table(headings, ([text, *(cell(*pair) for pair in pairs)] for text, pairs in rows))


def seeds_text(claim: Claim) -> str:
    """Return the number of seeds that would decide an undecided claim, as text in brackets; empty without one."""
    undecided = claim.verdict == "undecided" and claim.seeds > 1
    return f" ({seeds_to_decide(claim) or f'over {MANY}'})" if undecided else ""


NOTE = (
    "In brackets after *undecided*: the number of seeds whose interval would exclude the bound, if the mean and the spread "
    "of the differences stayed as they are."
)
