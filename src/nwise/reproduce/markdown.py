"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
