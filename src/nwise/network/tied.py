"""Tied tensors: parameters and buffers that are used in two places, such as GPT-2's embedding and output."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


def untie(model: nn.Module) -> list[str]:
    """Copy, in place, every parameter and buffer that is used in two places, such as GPT-2's embedding and output.

    With losses on several stages a tied value would have several credits, and on two devices two values. For a Hugging Face
    network this also changes the configuration, so the network is saved and loaded untied.

    Args:
        model: the network, which is changed.

    Returns:
        Names of the copies.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> b.weight = a.weight
    >>> untie(nn.Sequential(a, b))
    ['1.weight']
    """
    # `seen` has every tensor and module that is in its first place.
    new: list[str] = []
    _copy_second_places(model, "", set(), new)
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if new and hasattr(config, "tie_word_embeddings"):  # of transformers
            config.tie_word_embeddings = False
            setattr(part, "all_tied_weights_keys", {})  # noqa: B010 - the names that save_pretrained omits
    return new


def _copy_second_places(module: nn.Module, path: str, seen: set[object], new: list[str]) -> None:
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and tensor in seen:
            copied = tensor.detach().clone()
            is_parameter = name in module._parameters
            setattr(module, name, nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied)
            new.append(path + name)
        seen.add(tensor)
    # A module in two places is copied at the second, with all that is in it:
    #
    #     a    Linear(weight, bias)
    #     b    the same Linear    ->    b    a copy, and the names b.weight, b.bias
    for name, child in list(module._modules.items()):  # named_children() omits a module's second place
        if child is None:
            continue
        if child in seen and child.state_dict():
            child = copy.deepcopy(child)
            module._modules[name] = child
            new.extend(f"{path}{name}.{inner}" for inner in child.state_dict())
        seen.add(child)
        _copy_second_places(child, f"{path}{name}.", seen, new)


def refuse_tied(stages: Sequence[nn.Module]) -> None:
    """Raise ValueError if stages share a parameter or buffer."""
    places: dict[Tensor, tuple[int, str]] = {}
    for k, stage in enumerate(stages):
        saved = stage.state_dict()
        for name, tensor in (*stage.named_parameters(), *(one for one in stage.named_buffers() if one[0] in saved)):
            first, other = places.setdefault(tensor, (k, name))
            if first != k:
                raise ValueError(
                    f"Every parameter and buffer should belong to one stage. Found that {name!r} of stage {k} is {other!r} of "
                    f"stage {first} (tied): with losses on several stages it would have several credits, and on two devices two "
                    "values. `nwise.untie(model)` makes a copy for each."
                )
