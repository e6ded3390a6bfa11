"""Captured steps: recorded once on a GPU, and replayed without Python."""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
