"""Groups of a pipeline's parameters for one optimizer, the same number in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

Group = dict[str, Any]


def groups(
    network: Iterable[tuple[str, nn.Parameter]],
    heads: Iterable[tuple[str, nn.Parameter]],
    options: Mapping[str, Any] | None,
    head_options: Mapping[str, Any] | None,
    no_decay: Callable[[str, nn.Parameter], bool] | None,
) -> list[Group]:
    """Return the groups; see `Pipeline.groups`.

    Args:
        network, heads: parameters by name.
        options, head_options: options of their groups; None leaves them out.
        no_decay: function that tells from name and parameter whether it gets no weight decay; None for no such group.
    """
    found: list[Group] = []
    seen: set[nn.Parameter] = set()  # a head may share the network's output
    for named, given in ((network, options), (heads, head_options)):
        own = [(name, parameter) for name, parameter in named if parameter not in seen]
        seen |= {parameter for _, parameter in own}  # also of a part that is left out: another optimizer may have it
        if given is None:
            continue
        if "params" in given:
            raise ValueError("Options of a group should have no `params`, which are the pipeline's. Found some.")
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for name, parameter in own:
            parts[no_decay is not None and no_decay(name, parameter)].append(parameter)
        found.append({"params": parts[0], **given})
        if no_decay is not None:
            found.append({"params": parts[1], **given, "weight_decay": 0.0})
    return found
