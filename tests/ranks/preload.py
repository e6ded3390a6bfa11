"""What ranks need, imported before they are forked: torch's compiler, which the first optimizer imports, alone takes two seconds.

Where there is a GPU, that may make CUDA unusable in forks, so every rank imports it.
"""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import launch  # noqa: F401 - every rank runs a function of it
import nwise.app.cli.dispatch
import nwise.app.cli.training
import nwise.checkpoint
import nwise.pipeline
import nwise.training
from nwise.app.recipes import recipe

torch.set_num_threads(1)
if not torch.cuda.device_count():
    torch.optim.SGD(nwise.pipeline.Pipeline([nn.Linear(1, 1)], strategy="end-to-end").parameters())
recipe("digits").load()
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # torch takes every operator back at the end
    finalizer.atexit = False
gc.collect()
gc.freeze()  # no rank needs to look through it, or to copy its memory for that
