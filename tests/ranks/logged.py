"""A loop of its own that keeps a log, stops, and goes on from an older checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nwise
from nwise.app import Log
from ranks.common import batches, closed, digests, write


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) != target).float().mean()


def logged(folder: Path, last: int) -> tuple[nwise.Pipeline, list[dict[str, Any]]]:
    """Train to a step, with a checkpoint at step 2 and a test at every other step; return all records."""
    torch.manual_seed(0)
    stages = nwise.split(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)), at=3)
    pipe = nwise.Pipeline(stages, [nn.Linear(6, 4), nn.Linear(6, 4)], strategy="2-wise-mean", num_microbatches=2)
    optimizer = torch.optim.SGD(pipe.groups(network={}), lr=0.1)
    checkpoints = nwise.checkpoint.Checkpoints(folder / "checkpoints", pipe, optimizer)
    checkpoints.resume()
    data = batches(6)
    with Log(folder, pipe, batch_size=len(data[0][0]), every=1, timeline=2 if pipe.processes.size > 1 else 0) as log:
        for x, y in data[pipe.steps : last]:
            losses = pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            log.step(losses, lr=0.1)
            if pipe.steps == 2:
                checkpoints.save()
            if not pipe.steps % 2:
                log.test(pipe.score(data[:2], nn.functional.cross_entropy), 1 - pipe.score(data[:2], error))
        records = log.records()
    return pipe, records


if __name__ == "__main__":
    torch.set_num_threads(1)
    logged(Path(sys.argv[2]), 3)
    pipe, records = logged(Path(sys.argv[2]), 6)
    write({"records": records, "digests": closed(pipe, digests(pipe))})
