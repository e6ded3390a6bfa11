"""Checkpoints for any training loop, and files of weights.

weights                    names of the unsplit network
optimizer, state           what a run needs to resume, under names that do not depend on the cut
files, lock, checkpoints   one checkpoint, one writer, and which of them to keep
"""

from functools import partial

from nwise.checkpoint.checkpoints import CheckpointInfo, Checkpoints, Resumed
from nwise.checkpoint.files import PARTIAL, DamagedError, read_tensors, read_values, replacing
from nwise.checkpoint.lock import FolderLock
from nwise.checkpoint.optimizer import add_momenta
from nwise.checkpoint.state import check_facts
from nwise.checkpoint.weights import (
    discard_unsaved_heads,
    gather_weights,
    load_main_state,
    main_state,
    save_tensors,
    under,
)
from nwise.lazy import submodule

__all__ = [
    "PARTIAL",
    "CheckpointInfo",
    "Checkpoints",
    "DamagedError",
    "FolderLock",
    "Resumed",
    "add_momenta",
    "check_facts",
    "discard_unsaved_heads",
    "gather_weights",
    "load_main_state",
    "main_state",
    "read_tensors",
    "read_values",
    "replacing",
    "save_tensors",
    "under",
]

__getattr__ = partial(submodule, __name__)
