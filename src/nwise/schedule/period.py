"""The exact period of a schedule: the maximum cycle ratio of its waits, in max-plus algebra the eigenvalue.

Calls repeat the same lists. A node that a later call waits for is a *token*, and its *potential* is the time at which that
call may have it. One self-timed call maps the potentials ``x`` to ``D x``, which is linear in max-plus algebra, and the period is
the largest cycle mean of ``D``:

    machine 0 --- 5 ---> machine 0                              a cycle over one call, mean 5
    machine 0 --- 4 ---> machine 1 --- 8 ---> machine 0         a cycle over two calls, mean (4 + 8) / 2 = 6

If these are all cycles, the period is 6, although each machine works less. `period` never computes ``D``. It starts with a
cycle that always exists, the work of the busiest machine, and searches for potentials with ``D x <= x + period``, which prove
that no cycle has a larger mean. Without such potentials it finds a cycle with a larger mean and continues with that. Each round
is one simulated call, linear in the number of actions.
"""

from __future__ import annotations

import math

from nwise.schedule.clock import Clock, Token

# Times that differ by less than this share of the period are equal up to rounding.
_CLOSE = 1e-10


def period(clock: Clock, limit: float = math.inf) -> float:
    """Find the time per call (per cycle, for a rotating strategy) in the steady state, exact up to rounding.

    Args:
        clock: the clock.
        limit: time above which the search ends with any longer time that the period has at least; default: none.
    """
    used = {nodes[-1]: 1 for nodes in clock.lists if nodes}  # every machine begins a call after its last node
    for waits in clock.waits:
        for node, _, calls in waits:
            if calls:
                used[node] = max(calls, used.get(node, 1))
    tokens = [(node, calls) for node, most in used.items() for calls in range(1, most + 1)]
    longest = max((sum(clock.duration[node] for node in nodes) for nodes in clock.lists), default=0.0)
    oldest = max(used.values(), default=1)
    potential = dict.fromkeys(tokens, 0.0)
    # For a late token the one that delays it, and the time of the longest path from that: an arc of the graph of tokens.
    arcs: dict[Token, tuple[Token, float]] = {}
    # `longest` is the mean of a cycle that exists, so it never exceeds the period. It rises from cycle to cycle until the proof.
    while longest <= limit:
        # The ends of nodes in earlier calls, the last first, known only of tokens.
        ends = [[-math.inf] * len(clock.duration) for _ in range(oldest)]
        for (node, calls), time in potential.items():
            ends[calls - 1][node] = time
        batch = clock.run(ends)
        # A token of two calls was one of one call before.
        later = {(node, calls): batch.end[node] if calls == 1 else potential[node, calls - 1] for node, calls in tokens}
        slack = _CLOSE * longest
        risen = [token for token in tokens if later[token] - longest > potential[token] + slack]
        # No token is later than its potential plus `longest`. Add this up around any cycle, and the potentials cancel: the cycle
        # takes at most `longest` for each call. That is the proof.
        if not risen:
            return longest
        # As in Bellman and Ford's algorithm, remember for each late token the token that delays it, and raise its potential.
        origins: dict[int, Token] = {}
        for token in risen:
            node, calls = token
            origin = _origin(batch.cause, node, origins) if calls == 1 else (node, calls - 1)
            arcs[token] = origin, later[token] - potential[origin]
        for token in risen:
            potential[token] = later[token] - longest
        mean = _largest_mean(arcs)
        if mean is not None:
            # Tokens that raise each other lie on a cycle with a larger mean. If only rounding makes it larger, it is the largest.
            if mean <= longest:
                return longest
            longest = mean
            arcs = {}
    return longest


def _origin(cause: list[Token], node: int, origins: dict[int, Token]) -> Token:
    """Follow the critical path from a node back to the token at its start; `origins` has those of the nodes so far."""
    path: list[int] = []
    while (origin := origins.get(node)) is None:
        path.append(node)
        node, calls = cause[node]
        if calls:
            origin = node, calls
            break
    origins.update(dict.fromkeys(path, origin))
    return origin


def _largest_mean(arcs: dict[Token, tuple[Token, float]]) -> float | None:
    """Return the largest mean of a cycle of the arcs, None without a cycle; each token has at most one arc."""
    # With one arc per token, a walk ends either at a token without an arc or in its only cycle. `seen` has the first token of
    # the walk that came by, so every cycle is counted once.
    means: list[float] = []
    seen: dict[Token, Token] = {}
    for first in arcs:
        token = first
        path = []
        while token in arcs and token not in seen:
            seen[token] = first
            path.append(token)
            token = arcs[token][0]
        if token in seen and seen[token] == first and token in path:
            around = path[path.index(token) :]
            means.append(sum(arcs[t][1] for t in around) / len(around))
    return max(means, default=None)
