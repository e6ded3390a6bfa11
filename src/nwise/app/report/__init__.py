"""Output for people: displays, tables, figures, pages."""

from functools import partial

from nwise._lazy import submodule

__getattr__ = partial(submodule, __name__)
