"""When nwise looks at what a user's code does: often at first, then ever more rarely."""

from __future__ import annotations


def is_due(number: int) -> bool:
    """Return whether to look at this step, graph or loss, counted from 1: at number 1, 2, 4, 8, ...

    >>> [number for number in range(20) if is_due(number)]
    [1, 2, 4, 8, 16]
    """
    return number > 0 and number & (number - 1) == 0
