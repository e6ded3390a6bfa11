"""The weights of `examples/tiny.py` on four processes, by credit matrix."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tiny
from ranks.common import write

MATRICES = ("local", "2-wise-mean", "3-wise-mean", "end-to-end")

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    write({name: {what: w.tolist() for what, w in tiny.train(name).items()} for name in MATRICES})
    dist.destroy_process_group()
