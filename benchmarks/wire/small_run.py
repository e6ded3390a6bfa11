"""One rank of a small run that something happens to: it trains, saves checkpoints, and prints its steps and its weights' digest.

    python -m benchmarks.wire.small_run FOLDER [STEPS]

With one process it has all stages, and prints the digest of each.
"""

from __future__ import annotations

import hashlib
import os
import sys
from itertools import chain
from pathlib import Path

import torch
from torch import nn

import nwise
from nwise.checkpoint import Checkpoints

STAGES, STEPS, EVERY = 3, 60, 20


def main(folder: Path, steps: int = STEPS) -> None:
    """Train one rank, from the newest checkpoint of a folder if there is one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(STAGES)]
    stages = nwise.split(nn.Sequential(*layers), at=STAGES)
    heads = [nn.Linear(64, 64) for _ in range(STAGES - 1)]
    pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, "2-wise-mean", 2, seed=0, checks="never")
    optimizer = torch.optim.Adam(pipe.parameters())
    checkpoints = Checkpoints(folder, pipe, optimizer)
    checkpoints.resume()
    print(f"ready {pipe.steps}", flush=True)
    while pipe.steps < steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(pipe.steps))
        pipe.step(x, target=x.roll(1, 1))
        optimizer.step()
        optimizer.zero_grad()
        if pipe.steps % EVERY == 0:
            checkpoints.save()
        if pipe.steps == 1:
            for peer, link in pipe.processes.links.items():
                print(f"link {peer} {link.latency} {link.bandwidth}", flush=True)
            for channel in chain(*(channels.values() for channels in pipe.processes.channels.values())):
                print(f"port {channel.addresses[-1]}", flush=True)
        print(f"step {pipe.steps}", flush=True)
    for k in pipe.processes.here:
        weights = torch.cat([p.detach().flatten() for p in pipe.stages[k].parameters()])
        print(f"weights {k} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}", flush=True)
    pipe.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ.get("NWISE_STEPS", STEPS)))
