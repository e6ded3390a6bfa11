"""Planning: a network, measured piece by piece and cut for the devices at hand."""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
