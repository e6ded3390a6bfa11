"""How many of gloo's threads a process has that only passes messages on, which dimensions its mesh has, and whose messages arrive
where."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from nwise.runtime.channel import Name
from nwise.runtime.connections import connected
from nwise.runtime.processes import Processes
from ranks.common import write

NAME = Name(0, 0, 0)


def first_message(processes: Processes, value: float) -> float:
    """Check a channel that is not closed."""
    (channel,) = connected(processes, torch.device("cpu")).values()
    if processes.place == 0:
        sent = (torch.tensor([value]),)
        channel.send(NAME, sent, sent)
        return value
    (received,) = channel.take(NAME).parts
    return received.item()


def main() -> None:
    """Connect two stages, twice, with a message of somebody else's in between."""
    processes = Processes(2, timeout=5.0)
    first = first_message(processes, 1.0)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    found = {"loops": threads.count("gloo_tcp_loop"), "mesh": list(processes.mesh.mesh_dim_names or ())}
    found["first"] = first
    other = torch.tensor([7.0])
    if processes.rank == 0:
        dist.send(other, 1)
    else:
        dist.recv(other := torch.zeros(1), 0)
    found["other"] = other.item()
    second = Processes(2, timeout=5.0)
    found["second"] = first_message(second, 2.0)
    dist.barrier()  # what has not been taken over would be lost with its sender
    write(found)


if __name__ == "__main__":
    main()
