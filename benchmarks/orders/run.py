"""The quality of the orders: periods against the lower bound, for equal stages and for 400 random unequal ones.

Writes ``records/equal.jsonl``, ``records/unequal.jsonl`` and ``tables.md``, which lists every case above the bound.

    python -m benchmarks.orders
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

import nwise
from nwise.flow import flows_for
from nwise.schedule import Costs, best
from nwise.schedule.orders import depth_first, make_schedule, phase, skewed

HERE = Path(__file__).parent
REGIMES = ("A >= 2N-1", "N < A < 2N-1", "end-to-end")
_CLOSE = 1e-9


def regime(a: int, n: int) -> str:
    """Return the regime of an A and N, one of three."""
    return REGIMES[2] if n == a else REGIMES[0] if a >= 2 * n - 1 else REGIMES[1]


def equal() -> list[dict[str, Any]]:
    """Time every order and the fastest: A <= 12, N <= 5 and N = A, F = I = W = 1."""
    cases = [
        (a, n, m, head, share)
        for a in range(1, 13)
        for n in sorted({*range(1, min(5, a) + 1), a})
        for m in (1, 2, 3, 4, 6, 8, 16)
        for head in (0, 0.5, 1.3)
        for share in (0.0, 0.5, 1.0)
    ]
    rows = []
    for a, n, m, head, share in track(cases, "equal stages"):
        costs = Costs(1, head, 1, 1, chain_share=share)
        fastest = best(nwise.NWise(n), num_stages=a, num_microbatches=m, costs=costs)
        flows = flows_for(nwise.NWise(n), a, m)
        rules = {
            "phase": partial(phase, fuse=False),
            "skewed": partial(skewed, fuse=False, stride=1),
            "skewed, stride 2": partial(skewed, fuse=False, stride=2),
            "nearest first": partial(depth_first, fuse=False),
        }
        caps = {"nearest first": m}
        periods = {
            name: make_schedule(name, flows, rule, costs=costs, cap=caps.get(name)).period
            for name, rule in rules.items()
        }
        periods = {name: round(period, 9) for name, period in {**periods, "best": fastest.period}.items()}
        rows.append({
            "A": a, "N": n, "M": m, "head": head, "chain_share": share, "regime": regime(a, n), "order": fastest.order,
            "lower_bound": round(fastest.lower_bound, 9), "in_flight": max(fastest.in_flight), "periods": periods,
        })  # fmt: skip
    return rows


def unequal(count: int = 400) -> list[dict[str, Any]]:
    """Time the fastest order of random cases: stages 0.6 to 1.6 times as slow, latency 0 or 0.3, A <= 8, N <= A, M <= 8."""
    numbers = random.Random(0)
    rows = []
    for _ in track(range(count), "unequal stages"):
        a, m = numbers.randint(2, 8), numbers.choice([1, 2, 3, 4, 6, 8])
        n, head = numbers.randint(1, a), numbers.choice([0, 0.5, 1.3])
        factors = [numbers.uniform(0.6, 1.6) for _ in range(a)]
        latency = numbers.choice([0, 0.3])
        costs = Costs(factors, [head * f for f in factors], factors, factors, latency=latency)
        fastest = best(nwise.NWise(n), num_stages=a, num_microbatches=m, costs=costs)
        rows.append({
            "A": a, "N": n, "M": m, "head": head, "latency": latency, "factors": factors, "order": fastest.order,
            "period": fastest.period, "lower_bound": fastest.lower_bound,
        })  # fmt: skip
    return rows


def tables(same: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """Return the tables in Markdown."""
    lines = ["# How good the orders are", "", "Written by `python -m benchmarks.orders`.", ""]
    lines += ["Equal stages: cases whose period is the lower bound, and the worst gap.", ""]
    lines += [f"| order | {' | '.join(REGIMES)} |", "|---|---|---|---|"]
    for order in same[0]["periods"]:
        cells = []
        for name in REGIMES:
            gaps = [r["periods"][order] / r["lower_bound"] - 1 for r in same if r["regime"] == name]
            at_bound = sum(gap < _CLOSE for gap in gaps)
            cells.append(f"{at_bound}/{len(gaps)}" + (f", +{100 * max(gaps):.1f} %" if at_bound < len(gaps) else ""))
        lines.append(f"| {order} | {' | '.join(cells)} |")
    off = np.array([r["period"] / r["lower_bound"] - 1 for r in other])
    lines += ["", f"Unequal stages, {len(off)} random cases: {np.sum(off < _CLOSE)} at the bound, mean gap "
              f"{100 * off.mean():.2f} %, 95th percentile {100 * np.quantile(off, 0.95):.1f} %, largest "
              f"{100 * off.max():.1f} %.", ""]  # fmt: skip
    lines += ["All cases of equal stages with chain share 1 whose best schedule is above the bound:", ""]
    lines += ["| A | N | M | head | order | period | bound | gap |", "|---|---|---|---|---|---|---|---|"]
    for r in sorted(same, key=lambda r: r["lower_bound"] / r["periods"]["best"]):
        gap = r["periods"]["best"] / r["lower_bound"] - 1
        if gap >= _CLOSE and r["chain_share"] == 1:
            cells = [
                r["A"],
                r["N"],
                r["M"],
                r["head"],
                r["order"],
                f"{r['periods']['best']:g}",
                f"{r['lower_bound']:g}",
            ]
            lines.append(f"| {' | '.join(map(str, cells))} | +{100 * gap:.1f} % |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Time all cases and write records and tables: two or three minutes on one core."""
    same, other = equal(), unequal()
    for name, rows in (("equal", same), ("unequal", other)):
        (HERE / "records" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tables(same, other)
    (HERE / "tables.md").write_text(text)
    print(text)
