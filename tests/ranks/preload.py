"""What ranks need, imported before they are forked; scikit-learn for the digits alone takes a second."""

from __future__ import annotations

import torch
from torch import nn

import nwise.cli.dispatch
import nwise.cli.training
import nwise.pipeline
import nwise.training
import nwise.training.checkpoint
from nwise.recipes import recipe

torch.set_num_threads(1)
if not torch.cuda.device_count():
    nwise.pipeline.Pipeline([nn.Linear(1, 1)], strategy="end-to-end")
recipe("digits").load()
