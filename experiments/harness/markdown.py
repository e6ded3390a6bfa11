"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table.

    >>> print(table(["", "3 stages"], [["1-wise", 2]]))
    |  | 3 stages |
    |---|---|
    | 1-wise | 2 |
    """
    lines = [_line(headings), "|" + "---|" * len(headings)]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def stages(numbers: Iterable[int]) -> list[str]:
    """Return headings.

    >>> stages([3, 4])
    ['3 stages', '4 stages']
    """
    return [f"{number} stages" for number in numbers]


def machines(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the machines and versions that wrote some records.

    >>> machines([{"machine": {"processor": "EPYC", "cores": "2"}, "versions": {"python": "3.11", "torch": "2.13"}}] * 2)
    'EPYC, 2 cores, Python 3.11, torch 2.13'
    """
    return "; ".join(dict.fromkeys(_machine(r["machine"], r["versions"]) for r in records))


def _machine(machine: Mapping[str, str], versions: Mapping[str, str]) -> str:
    parts = [machine["processor"], machine.get("instructions", ""), f"{machine['cores']} cores", machine.get("gpu", "")]
    parts += [f"Python {versions['python']}", f"torch {versions['torch']}"]
    return ", ".join(part for part in parts if part)
