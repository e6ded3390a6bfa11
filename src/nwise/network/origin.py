"""The network that stages were cut from: changes of it that its stages would not see.

Stages hold the network's pieces, and call none of the modules around them::

    model              called by the network's forward only
      layers           a list
        0, 1, 2, 3     pieces: a change inside them reaches the stages
      lm_head          a piece: a new module in its place would not
      rotary_emb       each stage has a copy of it
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nwise._torch import has_hooks, versions

_SEQUENCES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Origin:
    """The places of a stage's pieces in the network that they come from. It does not keep the network alive.

    Of the pieces named in `copied` the stage has a copy.
    """

    def __init__(self, model: nn.Module, pieces: Iterable[str], copied: Iterable[str] = ()) -> None:
        # Every piece and every module around one, and each of these in its own module around it: a.b.c -> a, a.b, a.b.c
        places = dict.fromkeys(place for name in pieces for place in accumulate(name.split("."), "{}.{}".format))
        modules = {name: model.get_submodule(name) for name in ("", *places)}
        held: dict[str, dict[str, ref[nn.Module]]] = {}
        for name in places:
            owner, _, key = name.rpartition(".")
            held.setdefault(owner, {})[key] = ref(modules[name])
        # Of every module around a piece: what it held, how many children, and whether its instance had a forward of its own.
        self._around = [
            (name, ref(modules[name]), children, len(modules[name]._modules), "forward" in vars(modules[name]))
            for name, children in held.items()
        ]
        self._copied = [(name, ref(modules[name]), _values(modules[name])) for name in copied]

    def check(self) -> None:
        """Raise ValueError if the network has other modules, another forward or hooks, which its stages never call."""
        # A module that is gone cannot be changed any more.
        for name, around, children, size, patched in self._around:
            module = around()
            if module is None:
                continue
            for key, child in children.items():
                if (found := module._modules.get(key)) is not child():
                    raise ValueError(
                        f"{f'{name}.{key}'.lstrip('.')!r} of the network should be the module that was split, which the stages "
                        f"hold. Found {'none' if found is None else f'another one, {type(found).__name__}'}, in its place; "
                        "change the network first, then split it."
                    )
            who = repr(name) if name else "The network"
            if len(module._modules) != size and isinstance(module, _SEQUENCES):
                raise ValueError(
                    f"{who} should have the {size} modules that were split. Found {len(module._modules)}; change the network "
                    "first, then split it."
                )
            if ("forward" in vars(module)) != patched:
                raise ValueError(
                    f"{who} should have the forward that it had when it was split, because its stages call the modules inside it "
                    "and never itself. Found another one; replace it before the split."
                )
            if has_hooks(module):
                raise ValueError(
                    f"{who} should have no hooks, because its stages call the modules inside it and never itself. Found a hook; "
                    "remove it, or register it on those modules."
                )
        for name, copied, values in self._copied:
            module = copied()
            for key, before in values.items() if module is not None else ():
                if _differs(getattr(module, key, None), before):
                    raise ValueError(
                        f"{name!r} of the network should have the values that it had when it was split, because the stages have "
                        f"copies. Found another `{key}`; change the network first, then split it."
                    )


def _values(module: nn.Module) -> dict[str, Any]:
    """Return the numbers in a module's attributes, and its buffers, each with its version and a copy."""
    numbers = {name: x for name, x in vars(module).items() if isinstance(x, int | float) and name != "training"}
    buffers = {name: (x, versions([x]), x.clone()) for name, x in module.named_buffers(recurse=False)}
    return {**numbers, **buffers}


def _differs(now: Any, before: Any) -> bool:
    """Return whether a value has changed; one that was only moved or cast is the same."""
    if not isinstance(before, tuple):
        return bool(now != before)
    tensor, version, values = before
    if (now is tensor and versions([now]) == version) or values.is_meta:
        return False
    if not isinstance(now, Tensor) or now.shape != values.shape:
        return True
    return not now.is_meta and not torch.equal(now.detach().cpu(), values.to("cpu", now.dtype))
