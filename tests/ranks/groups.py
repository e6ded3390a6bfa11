"""How many of gloo's threads a process has that only passes messages on, and which dimensions its mesh has."""

from __future__ import annotations

from pathlib import Path

import torch

from nwise.runtime.world import World
from ranks.common import write


def main() -> None:
    """Connect two stages."""
    world = World(2)
    world.ends(torch.device("cpu"))
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    write({"loops": threads.count("gloo_tcp_loop"), "mesh": list(world.mesh.mesh_dim_names or ())})


if __name__ == "__main__":
    main()
