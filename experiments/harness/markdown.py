"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(headings: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table.

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
    """Headings.

    >>> stages([3, 4])
    ['3 stages', '4 stages']
    """
    return [f"{number} stages" for number in numbers]


def machines(records: Iterable[Mapping[str, Any]]) -> str:
    """Where records were made, and with what.

    >>> machines([{"machine": {"processor": "EPYC", "cores": "2"}, "versions": {"python": "3.11", "torch": "2.13"}}] * 2)
    'EPYC, 2 cores, Python 3.11, torch 2.13'
    """
    return "; ".join(dict.fromkeys(_machine(r["machine"], r["versions"]) for r in records))


def _machine(found: Mapping[str, str], versions: Mapping[str, str]) -> str:
    parts = [found["processor"], found.get("instructions", ""), f"{found['cores']} cores", found.get("gpu", "")]
    parts += [f"Python {versions['python']}", f"torch {versions['torch']}"]
    return ", ".join(part for part in parts if part)
