"""What ranks need, imported before they are forked; the first fake tensor alone takes seconds, scikit-learn for digits one.

Where there is a GPU, the first fake tensor makes CUDA unusable in forks, so every rank makes its own.
"""

from __future__ import annotations

import torch
from torch import nn

import nwise.cli.dispatch
import nwise.cli.training
import nwise.pipeline
import nwise.training
import nwise.training.checkpoint
from nwise.recipes import recipe
from nwise.runtime.channel import Spec
from nwise.runtime.shapes import output_specs

torch.set_num_threads(1)
if not torch.cuda.device_count():
    output_specs(nn.Linear(1, 1), (Spec((1, 1), torch.float32),), torch.device("cpu"), 0)
    nwise.pipeline.Pipeline([nn.Linear(1, 1)], strategy="end-to-end")
recipe("digits").load()
