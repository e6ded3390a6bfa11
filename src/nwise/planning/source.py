"""What plans are made from: the pieces of a network with their costs, measured or given, the devices, and their links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from nwise.network.chain import Chain
from nwise.planning.devices import Device
from nwise.planning.partitions import Piece, pieces_of
from nwise.planning.plan import Plan
from nwise.planning.prepare import gather, slowest_link, speeds
from nwise.planning.profiling import Network, Profile, profile
from nwise.planning.search import search
from nwise.runtime.launch import check_same, launched
from nwise.schedule.costs import Costs
from nwise.strategies import Strategy

_PARTS = 24  # pieces of a network with given costs that unequal devices share
# The pieces of the network, by the number of micro-batches.
Pieces = Mapping[int, Sequence[Piece]]


@dataclass(frozen=True)
class Source:
    """What plans are made from.

    Args:
        pieces: function from a number of stages to the pieces of the network.
        devices: the devices.
        links: ``latency``, ``bandwidth`` and ``overhead`` of `nwise.schedule.Costs`.
        measured: the costs of every module; None (default) if costs were given.
        model: the network; default: none is known.
    """

    pieces: Callable[[int], Pieces]
    devices: tuple[Device, ...]
    links: dict[str, float]
    measured: Profile | None = None
    model: nn.Module | None = None

    def plan(
        self,
        name: str,
        method: Strategy | str,
        pieces: Pieces,
        num_stages: int,
        devices: tuple[Device, ...] | None = None,
        progress: Callable[[list[int]], Iterable[int]] = iter,
    ) -> Plan:
        """Return the best plan of a method, under its name in tables; see `nwise.planning.search.search`."""
        devices = self.devices if devices is None else devices
        cut = search(pieces, method, devices, num_stages, progress, **self.links)
        names = _names(pieces)
        at = tuple(names[i] for i in cut.starts[1:])
        if self.model is not None:
            at = _short(self.model, names, at)
        return Plan(at, cut.placement, devices, name, cut.schedule, self.measured)


def from_costs(costs: Costs, ms: Sequence[int], devices: tuple[Device, ...], links: dict[str, float]) -> Source:
    """Return a network with given costs: a piece for every stage, or smaller ones to share between unequal devices."""

    def pieces(num_stages: int) -> dict[int, list[Piece]]:
        parts, rest = divmod(num_stages, len(devices))
        if rest:
            raise ValueError(
                f"`num_stages` should be a multiple of the {len(devices)} devices if costs are given, which are those of equal "
                f"shares. Found {num_stages}."
            )
        finer = 1 if len(set(devices)) == 1 else -(-_PARTS // num_stages)
        return {m: pieces_of(costs.split_in(m), len(devices), parts * finer) for m in ms}

    return Source(lru_cache(pieces), devices, links)


def measure(
    network: Network,
    known: tuple[Device, ...] | None,
    latency: float | None,
    links: dict[str, float],
    ms: Sequence[int],
    same: dict[str, Any],
    rounds: int,
    progress: Callable[[list[Any]], Iterable[Any]],
) -> Source:
    """Measure a network, and under ``torchrun`` its devices and links."""
    if launched():
        facts = {
            "devices": [[one.speed, one.memory] for one in known or ()],
            "microbatches": ms,
            "example": [list(x.shape) for x in network.batch(network.batch_size)[0]],
            "model": list(network.pieces),
        }
        check_same(gather(facts | same))
    found = profile(network, ms, rounds=rounds, progress=progress)
    links = {**links, "overhead": found.overhead}
    if launched():
        # All processes use the first one's profile, the largest overhead, the slowest link, and all speeds.
        reports = gather((found.seconds, found.spread, found.overhead, found.as_json()))
        links["overhead"] = max(one[2] for one in reports)
        link = slowest_link()
        links["latency"] = link.latency if latency is None else latency
        links["bandwidth"] = min(link.bandwidth, links["bandwidth"])
        known = known or tuple(Device(speed=speed) for speed in speeds([one[:2] for one in reports]))
        found = Profile.from_json(reports[0][3])
    return Source(lambda _: found.pieces, known or (Device(),), links, found)


def _names(pieces: Pieces) -> list[str]:
    return [piece.name for piece in next(iter(pieces.values()))]


def _short(model: nn.Module, pieces: Sequence[str], at: Sequence[str]) -> tuple[str, ...]:
    """Name a sequence instead of its first module, where no other cut goes through it."""
    # "blocks.2.0" is the first module of the sequence "blocks.2", so "blocks.2" is a name of the same cut. It is not if there is
    # another cut inside, such as one at "blocks.2.1".
    chosen = list(at)
    for i in range(len(chosen)):
        while parent := chosen[i].rpartition(".")[0]:
            first = next(piece for piece in pieces if piece.startswith(f"{parent}."))
            others = [name for name in chosen if name != chosen[i] and name.startswith(f"{parent}.")]
            sequence = type(model.get_submodule(parent)) in (nn.Sequential, Chain)
            if others or not sequence or not f"{first}.".startswith(f"{chosen[i]}."):
                break
            chosen[i] = parent
    return tuple(chosen)
