"""The connections of a rank: a channel to every rank with a neighbouring stage."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping

import torch

from nwise.runtime.channel import Carrier, Channel, host_of
from nwise.runtime.launch import backend_for, default_store
from nwise.runtime.links import measured
from nwise.runtime.processes import Processes

Channels = Mapping[int, Channel]  # by the pipeline place of the other end


def connected(processes: Processes, device: torch.device) -> Channels:
    """Return this rank's channels, by place; all ranks make the first call together, to connect.

    Args:
        processes: the processes.
        device: device of the stages' tensors.
    """
    key = device, processes.placement
    if processes.num_ranks > 1 and key not in processes.channels:
        processes.channels[key] = _connect(processes, device)
    return processes.channels.get(key, {})


def _connect(processes: Processes, device: torch.device) -> Channels:
    placement = processes.placement
    here = processes.place
    ranks = processes.ranks
    pairs = {frozenset(pair) for pair in itertools.pairwise(placement) if pair[0] != pair[1]}
    others = sorted({place for pair in pairs if here in pair for place in pair} - {here})
    carriers = _carriers(processes, device, pairs)
    token = processes.exchange("token", secrets.token_hex(8))[0].encode()
    host = host_of(default_store())
    channels = {
        place: Channel(ranks[place], host, token, processes.watch.check, carriers.get(place)) for place in others
    }
    addresses = processes.exchange("addresses", {str(one.peer): one.addresses for one in channels.values()})
    for channel in channels.values():
        channel.connect(addresses[channel.peer][str(processes.rank)])
    if not carriers:
        processes.links.update(measured(channels, here))
    return channels


def _carriers(processes: Processes, device: torch.device, pairs: set[frozenset[int]]) -> dict[int, Carrier]:
    """Return what carries bytes between GPUs, by place; nothing for tensors on CPUs."""
    if device.type == "cpu":
        return {}
    # One group for each direction, from lower to higher places and back: neither waits behind the other.
    up, down = (processes.group_of(backend=backend_for(device)) for _ in range(2))
    # nccl connects at the first use and waits for the other end. Two ranks that first use different links would wait for each
    # other forever.
    number = torch.zeros(1, device=device)
    for group, column, (low, high) in itertools.product((up, down), processes.columns(), sorted(map(sorted, pairs))):
        sender, receiver = (column[low], column[high])[:: 1 if group is up else -1]
        if processes.rank == sender:
            group.send([number], receiver, 0).wait()
        elif processes.rank == receiver:
            group.recv([number], sender, 0).wait()
    torch.cuda.synchronize(device)
    here = processes.place
    return {
        place: Carrier(*((up, down) if place > here else (down, up)), device)
        for pair in pairs
        if here in pair
        for place in pair - {here}
    }
