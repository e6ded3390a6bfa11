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

from dataclasses import dataclass

from nwise.schedule.network import Network, SimulatedRun, run

# Times that differ by less than this share of the period are equal up to rounding.
_CLOSE = 1e-10

# A node, and by how many calls its result is used later.
Token = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Arc:
    """A longest path through one call, from a token to a token."""

    origin: Token
    weight: float


def period(net: Network) -> float:
    """Find the time per call (per cycle, for a rotating strategy) in the steady state, exact up to rounding."""
    ends = {word[-1]: 1 for word in net.words if word}  # every machine begins a call after its last node
    for needs in net.needs:
        for node, _, calls in needs:
            if calls:
                ends[node] = max(calls, ends.get(node, 1))
    tokens = [(node, calls) for node, most in ends.items() for calls in range(1, most + 1)]
    longest = max((sum(net.duration[node] for node in word) for word in net.words), default=0.0)
    oldest = max(ends.values(), default=1)
    potential = dict.fromkeys(tokens, 0.0)
    arcs: dict[Token, _Arc] = {}
    back = _Back(net)
    while True:
        batch = run(net, _earlier(net, potential, oldest))
        # A token of two calls was one of one call before.
        later = {(node, calls): batch.end[node] if calls == 1 else potential[node, calls - 1] for node, calls in tokens}
        slack = _CLOSE * longest
        risen = [token for token in tokens if later[token] - longest > potential[token] + slack]
        # No token is later than its potential plus `longest`: these potentials are the proof.
        if not risen:
            return longest
        # As in Bellman and Ford's algorithm, remember for each late token the token that delays it, and raise its potential.
        for token in risen:
            node, calls = token
            origin = back(batch, node, potential) if calls == 1 else (node, calls - 1)
            arcs[token] = _Arc(origin, later[token] - potential[origin])
        for token in risen:
            potential[token] = later[token] - longest
        mean = _largest_mean(arcs)
        if mean is not None:
            # Tokens that raise each other lie on a cycle with a larger mean. If only rounding makes it larger, it is the largest.
            if mean <= longest:
                return longest
            longest, arcs = mean, {}


def _earlier(net: Network, potential: dict[Token, float], oldest: int) -> list[SimulatedRun]:
    """Return the calls before one as `run` expects them, with only the nodes that are tokens."""
    calls = []
    for age in range(oldest, 0, -1):
        end = [float("-inf")] * len(net.duration)
        for (node, one), time in potential.items():
            if one == age:
                end[node] = time
        calls.append(SimulatedRun([], end))
    return calls


class _Back:
    """Follows the critical path from a node back to the token at its start."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self._before = [-1] * len(net.duration)
        self._last = [0] * len(net.duration)
        for word in net.words:
            for i, node in enumerate(word):
                self._before[node] = word[i - 1] if i else -1
                self._last[node] = word[-1]

    def __call__(self, batch: SimulatedRun, node: int, potential: dict[Token, float]) -> Token:
        """Return the token that determines the start of a node.

        Args:
            batch: times of the call.
            node: number of the node.
            potential: time of every token.
        """
        # Equality is exact, because a start is a copy of one of these times.
        while True:
            start, before = batch.start[node], self._before[node]
            if before >= 0 and batch.end[before] == start:
                node = before
                continue
            step = None
            for other, lag, calls in self._net.needs[node]:
                if calls and potential[other, calls] + lag == start:
                    return other, calls
                if not calls and batch.end[other] + lag == start:
                    step = other
            if step is None:
                return self._last[node], 1
            node = step


def _largest_mean(arcs: dict[Token, _Arc]) -> float | None:
    """Return the largest mean of a cycle of the arcs, None without a cycle; each token has at most one arc."""
    # With one arc per token, a walk ends either at a token without an arc or in its only cycle. `seen` has the first token of
    # the walk that came by, so every cycle is counted once.
    means: list[float] = []
    seen: dict[Token, Token] = {}
    for first in arcs:
        token, path = first, []
        while token in arcs and token not in seen:
            seen[token] = first
            path.append(token)
            token = arcs[token].origin
        if token in seen and seen[token] == first and token in path:
            around = path[path.index(token) :]
            means.append(sum(arcs[t].weight for t in around) / len(around))
    return max(means, default=None)
