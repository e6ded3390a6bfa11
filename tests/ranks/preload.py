"""What every rank needs, imported before it is forked; the first fake tensor alone takes seconds."""

from __future__ import annotations

import torch
from torch import nn

import nwise.cli.dispatch
import nwise.pipeline
import nwise.training
from nwise.runtime.channel import Spec
from nwise.runtime.shapes import output_specs

torch.set_num_threads(1)
output_specs(nn.Linear(1, 1), (Spec((1, 1), torch.float32),), torch.device("cpu"), 0)
nwise.pipeline.Pipeline([nn.Linear(1, 1)], strategy="end-to-end")
