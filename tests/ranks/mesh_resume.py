"""Goes on from a checkpoint with stages that tensor parallelism cuts up, or not; writes what was loaded, and what comes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nwise
from nwise.checkpoint import Checkpoints
from nwise.network.chain import Chain
from nwise.runtime.launch import start
from ranks.common import batches, closed, write


def main(source: Path, target: Path, parts: int, steps: int) -> dict[str, Any]:
    """Two stages, each cut into so many parts; 0 for one process."""
    torch.manual_seed(0)
    layers: list[dict[str, nn.Module]] = [{f"{k}.in": nn.Linear(6, 8), f"{k}.out": nn.Linear(8, 6)} for k in range(2)]
    layers[1]["output"] = nn.Linear(6, 4)
    blocks = [Chain(pieces) for pieces in layers]
    mesh = init_device_mesh("cpu", (2, 1, parts), mesh_dim_names=("pp", "dp", "tp")) if parts else None
    pipe = nwise.Pipeline(blocks, [nn.Linear(6, 4)], nn.functional.cross_entropy, "2-wise-mean", 2, seed=1, mesh=mesh)
    if mesh is not None and parts > 1:
        k = pipe.processes.place
        parallelize_module(pipe.stages[k], mesh["tp"], {f"{k}.in": ColwiseParallel(), f"{k}.out": RowwiseParallel()})
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01, foreach=False)
    Checkpoints(source, pipe, optimizer).resume()
    Checkpoints(target / "loaded", pipe, optimizer).save()
    for x, y in batches(10)[pipe.steps : pipe.steps + steps]:
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    Checkpoints(target / "after", pipe, optimizer).save()
    return closed(pipe, {"cut": sum(isinstance(p, DTensor) for p in pipe.parameters())})


if __name__ == "__main__":
    torch.set_num_threads(1)
    start()
    write(main(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
