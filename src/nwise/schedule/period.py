"""The exact period of a schedule: the maximum cycle ratio of its waits, in max-plus algebra the eigenvalue.

Mini-batches repeat the same lists. With ``x`` the times at which machines become free, one self-timed mini-batch
is a max-plus linear map ``x -> D x``, and the period is the largest cycle mean of ``D``:

    machine 0 --- 5 ---> machine 0                              a cycle over one mini-batch, mean 5
    machine 0 --- 4 ---> machine 1 --- 8 ---> machine 0         a cycle over two mini-batches, mean (4 + 8) / 2 = 6

If these are all cycles, the period is 6, although each machine works less. `period` never computes ``D``. It starts with a
cycle that always exists, the work of the busiest machine, and searches for potentials ``x`` with ``D x <= x + period``,
which prove that no cycle has a larger mean. Without such potentials it finds a cycle with a larger mean and continues with
that. Each round is one simulated mini-batch, linear in the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from nwise.schedule.network import Network, SimulatedRun, run

# Times that differ by less than this share of the period are equal up to rounding.
_CLOSE = 1e-10


@dataclass(frozen=True, slots=True)
class _Arc:
    """A longest path through one mini-batch, from a token to a token."""

    origin: int
    weight: float


def period(net: Network) -> float:
    """Find the time per mini-batch (per cycle, for a rotating strategy) in the steady state, exact up to rounding."""
    # Tokens connect a mini-batch with the next: a machine that is free, or an activation that was taken. A potential is the
    # time of a token at the start of a mini-batch; `longest` is the largest mean so far, a lower bound on the period.
    machines = len(net.words)
    takers = list(net.taken.items())
    token_for = {node: machines + i for i, (node, _) in enumerate(takers)}
    longest = max(sum(net.duration[node] for node in word) for word in net.words)
    potential = [0.0] * (machines + len(takers))
    arcs: dict[int, _Arc] = {}
    back = _Back(net, token_for)
    while True:
        batch = run(net, potential[:machines], {node: potential[token] for node, token in token_for.items()})
        ends = [batch.end[word[-1]] if word else 0.0 for word in net.words] + [batch.start[u] for _, u in takers]
        slack = _CLOSE * longest
        risen = [token for token, end in enumerate(ends) if end - longest > potential[token] + slack]
        # No token is later than its potential plus `longest`: these potentials are the proof.
        if not risen:
            return longest
        # As in Bellman and Ford's algorithm, remember for each late token the token that delays it, and raise its potential.
        for token in risen:
            node = net.words[token][-1] if token < machines else takers[token - machines][1]
            origin = back(batch, node, potential)
            arcs[token] = _Arc(origin, ends[token] - potential[origin])
        for token in risen:
            potential[token] = ends[token] - longest
        mean = _largest_mean(arcs)
        if mean is not None:
            # Tokens that raise each other lie on a cycle with a larger mean. If only rounding makes it larger, it is the largest.
            if mean <= longest:
                return longest
            longest, arcs = mean, {}


class _Back:
    """Follows the critical path from a node back to the token at its start."""

    def __init__(self, net: Network, token_for: dict[int, int]) -> None:
        self._net = net
        self._token_for = token_for
        self._before = [-1] * len(net.duration)
        self._machine = [0] * len(net.duration)
        for machine, word in enumerate(net.words):
            for i, node in enumerate(word):
                self._before[node] = word[i - 1] if i else -1
                self._machine[node] = machine

    def __call__(self, batch: SimulatedRun, node: int, potential: list[float]) -> int:
        """Return the token that determines the start of a node.

        Args:
            batch: times of the mini-batch.
            node: number of the node.
            potential: time of every token.
        """
        # Equality is exact, because a start is a copy of one of these times.
        while True:
            start, before = batch.start[node], self._before[node]
            if before >= 0 and batch.end[before] == start:
                node = before
                continue
            other = next((u for u, lag in self._net.needs[node] if batch.end[u] + lag == start), None)
            if other is None:
                break
            node = other
        token = self._token_for.get(node, -1)
        return token if token >= 0 and potential[token] == start else self._machine[node]


def _largest_mean(arcs: dict[int, _Arc]) -> float | None:
    """Return the largest mean of a cycle of the arcs, None without a cycle; each token has at most one arc."""
    # With one arc per token, a walk ends either at a token without an arc or in its only cycle. `seen` has the first token of
    # the walk that came by, so every cycle is counted once.
    means: list[float] = []
    seen: dict[int, int] = {}
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
