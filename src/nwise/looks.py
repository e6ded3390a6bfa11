"""When nwise looks at what a user's code does: often at first, then ever more rarely.

>>> [number for number in range(20) if looks_at(number)]
[1, 2, 4, 8, 16]
"""

from __future__ import annotations

from collections.abc import Callable

# Whether to look at a step, graph or loss, counted from 1. A step asks for each graph, so there is no call in Python.
looks_at: Callable[[int], bool] = frozenset(1 << power for power in range(63)).__contains__
