"""Networks in stages: `split` for any network, chains of named modules, layers."""

from functools import partial

from nwise.lazy import submodule
from nwise.network.chain import Chain, group_pieces, join

__all__ = ["Chain", "group_pieces", "join"]

__getattr__ = partial(submodule, __name__)
