"""Networks in stages: `split` for any network, chains of named pieces, values carried past stages, Hugging Face."""

from functools import partial

from nwise.lazy import submodule
from nwise.network.carrying import carry
from nwise.network.chain import Chain, group_pieces, join
from nwise.network.splitting import cut_points, even_starts, repeated_blocks, split, untie

__all__ = [
    "Chain",
    "carry",
    "cut_points",
    "even_starts",
    "group_pieces",
    "join",
    "repeated_blocks",
    "split",
    "untie",
]

__getattr__ = partial(submodule, __name__)
