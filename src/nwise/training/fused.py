"""Fused matrices: several logical matrices in one parameter, and how they lie in it.

Muon makes a matrix orthogonal as a whole, so it must know where one ends and the next begins::

    rows of the weight of a layer     q q q q k k k k v v v v      Fused((4, 4, 4))
    in blocks, one for each head      q q k k v v q q k k v v      Fused((2, 2, 2), blocks=2)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

__all__ = ["Fused"]


@dataclass(frozen=True)
class Fused:
    """The logical matrices of a parameter, side by side along the dimension of its outputs.

    Args:
        sizes: number of outputs of each logical matrix in a block.
        blocks: number of blocks; every logical matrix has a share of each. Default: 1.
        dim: dimension of the outputs; default: 0, as in `nn.Linear`.

    >>> import torch
    >>> [part.flatten().tolist() for part in Fused((1, 2), blocks=2).parts(torch.arange(6)[:, None])]
    [[0, 3], [1, 2, 4, 5]]
    """

    sizes: tuple[int, ...]
    blocks: int = 1
    dim: int = 0

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return views of the logical matrices, with a dimension for the blocks before that of the outputs."""
        return list(whole.unflatten(self.dim, (self.blocks, -1)).split(self.sizes, self.dim + 1))

    def check(self, parameter: Tensor, name: str) -> None:
        """Raise ValueError unless a parameter has these parts."""
        total = self.blocks * sum(self.sizes)
        shape = tuple(parameter.shape)
        if self.dim not in (0, 1) or min(self.sizes, default=0) < 1 or shape[self.dim] != total:
            raise ValueError(
                f"{name!r} should consist of the parts of {self}. Found shape {shape}; give sizes whose sum, times the blocks, "
                "is the number of outputs."
            )


# From the module that calls a layer of `outs` outputs and `ins` inputs to how the layer is fused, with outputs as rows.
Rule = Callable[[nn.Module, int, int], Fused | None]


def _as_wide_as_input(owner: nn.Module, outs: int, ins: int) -> Fused | None:
    """Queries, keys and values, or only keys and values, one after the other."""
    return Fused((ins,) * (outs // ins)) if outs in (2 * ins, 3 * ins) else None


def _halves(owner: nn.Module, outs: int, ins: int) -> Fused | None:
    return None if outs % 2 else Fused((outs // 2,) * 2)


def _groups(owner: nn.Module, outs: int, ins: int) -> Fused | None:
    """Queries, then keys and values of fewer heads."""
    keys = _number(owner, "num_key_value_heads") * _number(owner, "head_dim")
    return Fused((outs - 2 * keys, keys, keys)) if 0 < keys <= outs - 2 * keys else _as_wide_as_input(owner, outs, ins)


def _heads(owner: nn.Module, outs: int, ins: int) -> Fused | None:
    """Query, key and value of the first head, then of the second."""
    heads = _number(owner, "num_attention_heads") or _number(owner, "num_heads")
    return Fused((outs // (3 * heads),) * 3, heads) if heads and outs % (3 * heads) == 0 else None


def _number(owner: nn.Module, name: str) -> int:
    value = getattr(owner, name, getattr(getattr(owner, "config", None), name, 0))
    return value if isinstance(value, int) else 0


# Classes of `transformers` whose code we have read: their layers of one name are fused in different ways.
_READ: dict[str, Rule] = {
    "BloomAttention.query_key_value": _heads,
    "DbrxAttention.Wqkv": _groups,
    "DecisionTransformerGPT2Attention.c_attn": _as_wide_as_input,
    "Dinov2SwiGLUFFN.weights_in": _halves,
    "GPT2Attention.c_attn": _as_wide_as_input,
    "GPTNeoXAttention.query_key_value": _heads,
    "Glm4MLP.gate_up_proj": _halves,
    "GlmMLP.gate_up_proj": _halves,
    "ImageGPTAttention.c_attn": _as_wide_as_input,
    "ModernBertAttention.Wqkv": _as_wide_as_input,
    "ModernBertMLP.Wi": _halves,
    "MptAttention.Wqkv": _as_wide_as_input,
    "PersimmonAttention.query_key_value": _heads,
    "Phi3Attention.qkv_proj": _groups,
    "Phi3MLP.gate_up_proj": _halves,
}
# Layers of other modules, by name: what nwise, torch, timm and nanoGPT mean by it.
_NAMED: dict[str, Rule] = {
    **dict.fromkeys(("qkv", "Wqkv", "qkv_proj", "to_qkv", "c_attn"), _groups),
    **dict.fromkeys(("kv", "to_kv"), _as_wide_as_input),
    "gate_up_proj": _halves,
}
_SUSPECT = re.compile(r"kv|c_attn|gate_up|query_key|key_value|fused|weights_in|w12|^Wi$")


def known_parts(name: str, parameter: Tensor, layer: nn.Module, owner: nn.Module) -> Fused | None:
    """Return how a layer's matrix is fused, None if it is one matrix; the owner is the module around the layer.

    Raises:
        ValueError: the name or the shape says that it is fused, and nothing says how.
    """
    # "blocks.3.attn.qkv.weight" -> called "qkv", leaf "weight". A rule of the class counts first, then one of the name, and a
    # name or shape that looks fused without a rule is an error: to guess would train another matrix than the network has.
    *path, called, leaf = ["", *name.split(".")]
    dim = 1 if type(layer).__name__ == "Conv1D" else 0  # GPT-2's layer, whose weight is transposed
    outs = parameter.shape[dim]
    ins = parameter.shape[1 - dim]
    rows: Fused | None = None
    if isinstance(layer, nn.MultiheadAttention) and leaf == "in_proj_weight":
        rows = _as_wide_as_input(layer, outs, ins)
    elif isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        gates = outs // layer.hidden_size if leaf.startswith(("weight_ih", "weight_hh")) else 1
        return Fused((layer.hidden_size,) * gates) if gates > 1 else None
    elif type(owner).__module__.startswith("transformers."):
        rule = _READ.get(f"{type(owner).__name__}.{called}")
        rows = rule and rule(owner, outs, ins)
    elif called in _NAMED:
        rows = _NAMED[called](owner, outs, ins)
    if rows is not None:
        return replace(rows, dim=dim)
    in_attention = re.search("attn|attention", f"{'.'.join(path[-1:])} {type(owner).__name__}", re.IGNORECASE)
    wide = "in_proj" in called + leaf and outs >= 2 * ins
    if _SUSPECT.search(called) or wide or (in_attention and outs == 3 * ins):
        raise ValueError(
            f"Muon should get each logical matrix by itself. Found {name!r}, of shape {tuple(parameter.shape)}, which looks like "
            f"several in one; say how they lie in it with `hidden_matrices(pipe, fused={{'*.{called}.{leaf}': Fused((...))}})` "
            "(`nwise.training.fused.Fused`), or that it is one matrix with None instead of Fused."
        )
    return None
