"""Captured steps: recorded once on a GPU, and replayed without Python."""

from functools import partial

from nwise.capture.capture import Capture
from nwise.lazy import submodule

__all__ = ["Capture"]

__getattr__ = partial(submodule, __name__)
