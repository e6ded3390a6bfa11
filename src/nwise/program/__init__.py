"""The program of a pipeline: its arguments and settings, the plan of its steps, and what a step does with its batch."""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
