"""The runtime, which executes schedules in one process or several."""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
