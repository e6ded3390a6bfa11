"""The exact period of a schedule: the largest mean of a cycle of waits, in max-plus algebra the eigenvalue.

Mini-batches repeat the same lists. With ``x`` the times at which machines become free, one self-timed mini-batch
is a max-plus linear map ``x -> D x``, and the period is the largest cycle mean of ``D``. `period` never
writes ``D`` down: it starts from a cycle that is surely there (the busiest machine) and looks for potentials ``x``
with ``D x <= x + period``, which prove that no cycle is longer; as long as there are none, it finds a longer cycle
and goes on with that one's mean. Each look is one simulated mini-batch, linear in the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from nwise.schedule.network import Network, Run, run

# Times that differ by less than this share of the period are equal up to rounding.
_CLOSE = 1e-10


@dataclass(frozen=True, slots=True)
class _Arc:
    """A longest path through one mini-batch, from a token to a token."""

    origin: int
    weight: float


def period(net: Network) -> float:
    """Find the time per mini-batch (per cycle of them, for a rotating strategy) in the steady state, exact up to rounding."""
    # Tokens are what one mini-batch hands to the next: machines that are free, and activations that were taken.
    machines = len(net.words)
    takers = list(net.taken.items())
    token_of = {node: machines + i for i, (node, _) in enumerate(takers)}
    longest = max(sum(net.duration[node] for node in word) for word in net.words)
    potential = [0.0] * (machines + len(takers))
    arcs: dict[int, _Arc] = {}
    back = _Back(net, token_of)
    while True:
        found = run(net, potential[:machines], {node: potential[token] for node, token in token_of.items()})
        ends = [found.end[word[-1]] if word else 0.0 for word in net.words] + [found.start[u] for _, u in takers]
        slack = _CLOSE * longest
        risen = [token for token, end in enumerate(ends) if end - longest > potential[token] + slack]
        if not risen:
            return longest
        for token in risen:
            node = net.words[token][-1] if token < machines else takers[token - machines][1]
            origin = back(found, node, potential)
            arcs[token] = _Arc(origin, ends[token] - potential[origin])
        for token in risen:
            potential[token] = ends[token] - longest
        mean = _largest_mean(arcs)
        if mean is not None:
            # Tokens that drive each other up lie on a cycle that is longer; if only by rounding, it is the longest.
            if mean <= longest:
                return longest
            longest, arcs = mean, {}


class _Back:
    """Follows a time back to the token that it comes from."""

    def __init__(self, net: Network, token_of: dict[int, int]) -> None:
        self._net = net
        self._token_of = token_of
        self._before = [-1] * len(net.duration)
        self._machine = [0] * len(net.duration)
        for machine, word in enumerate(net.words):
            for i, node in enumerate(word):
                self._before[node] = word[i - 1] if i else -1
                self._machine[node] = machine

    def __call__(self, found: Run, node: int, potential: list[float]) -> int:
        while True:
            start, before = found.start[node], self._before[node]
            if before >= 0 and found.end[before] == start:
                node = before
                continue
            other = next((u for u, lag in self._net.needs[node] if found.end[u] + lag == start), None)
            if other is None:
                break
            node = other
        token = self._token_of.get(node, -1)
        return token if token >= 0 and potential[token] == start else self._machine[node]


def _largest_mean(arcs: dict[int, _Arc]) -> float | None:
    """The largest mean of a cycle among the arcs, of which each token has at most one; None if there is no cycle."""
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
