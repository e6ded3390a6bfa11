"""How many of gloo's threads a process has that only passes messages on, which dimensions its mesh has, and whose messages arrive
where, since activations travel through the default group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from nwise.runtime.channel import MessagePlan, Spec
from nwise.runtime.world import World
from ranks.common import write

ONE = MessagePlan(((0, None, 0),), ((Spec((1,), torch.float32),),))


def first_message(world: World, value: float) -> float:
    """Of a forward channel that is not closed, so that its receives stay posted."""
    ends = world.ends(torch.device("cpu"))
    if ends.activations_out is not None:
        ends.activations_out.start(ONE, 0)
        ends.activations_out.send((0, None, 0), [torch.tensor([value])])
        return value
    assert ends.activations_in is not None
    ends.activations_in.start(ONE, 0)
    return ends.activations_in.take((0, None, 0))[0].item()


def main() -> None:
    """Connect two stages, twice, with a message of somebody else's in between."""
    world = World(2, timeout=20.0)
    world.ends(torch.device("cpu"))
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    found = {"loops": threads.count("gloo_tcp_loop"), "mesh": list(world.mesh.mesh_dim_names or ())}
    found["first"] = first_message(world, 1.0)
    other = torch.tensor([7.0])
    if world.rank == 0:
        dist.send(other, 1)
    else:
        dist.recv(other := torch.zeros(1), 0)
    found["other"] = other.item()
    second = World(2, timeout=20.0)
    found["second"] = first_message(second, 2.0)
    dist.barrier()  # what has not been taken over would be lost with its sender
    write(found)


if __name__ == "__main__":
    main()
