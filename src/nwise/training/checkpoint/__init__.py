"""Checkpoints: the files of one, the state in it, and the policy of when to write which."""

from functools import partial

from nwise._lazy import submodule

__getattr__ = partial(submodule, __name__)
