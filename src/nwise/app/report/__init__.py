"""Output for people: displays, tables, figures, pages."""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
