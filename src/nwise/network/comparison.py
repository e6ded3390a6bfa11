"""Comparison of stages with the network that they were cut from, once, on an example in training mode."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nwise._torch import pytree
from nwise.differences import differences
from nwise.modes import training
from nwise.network.outline import StandIn
from nwise.network.route import buffers_of
from nwise.network.section import Section
from nwise.randomness import preserved, random_states, restoring, seed_all
from nwise.tensors import Tensors, as_tuple, each, invoke


def refuse_difference(
    model: nn.Module, whole: Callable[[], Any], stages: Sequence[nn.Module], example: Tensors, device: torch.device
) -> None:
    """Raise ValueError unless the stages compute what the network does: outputs, gradients of parameters, and buffers.

    Args:
        model: the network.
        whole: function that runs it on the example, and returns what the last stage should.
        stages: the stages.
        example: the inputs of the first stage.
        device: device of the network, whose generator is restored afterwards.
    """

    def in_stages() -> Any:
        message = each(example, torch.clone)
        for k, stage in enumerate(stages):
            own = stage.pieces() if isinstance(stage, Section) else {"": stage}
            with _seeding(k, own, {*message}, device):
                output = invoke(stage, message)
            if k + 1 < len(stages):
                message = as_tuple(output, f"The output of stage {k}")
        return output

    def at_once() -> Any:
        with _seeding(0, {}, set(), device):
            return whole()

    with training(model, *stages), torch.enable_grad():
        with preserved(device), restoring([*random_states(), *buffers_of((model, *stages))]):
            expected = _results(model, at_once)
        with preserved(device), restoring([*random_states(), *buffers_of((model, *stages))]):
            try:
                found = _results(model, in_stages)
            except Exception as error:
                raise ValueError(
                    "The stages should run on `example` as the network does. Found that they cannot; cut elsewhere, or write the "
                    f"stages yourself. {type(error).__name__}: {error}"
                ) from error
    # Values that are not finite are equal to all others for `differences`, so where they stand is compared as well.
    finite = [{f"{name}, finite or not,": x.isfinite() for name, x in one.items()} for one in (found, expected)]
    if apart := differences(found, expected) or differences(*finite):
        raise ValueError(
            f"The stages should compute what the network does on `example` in training mode. Found another {apart[0]}; cut "
            "elsewhere, or write the stages yourself."
        )


@contextmanager
def _seeding(stage: int, own: Mapping[str, nn.Module], known: set[Tensor], device: torch.device) -> Iterator[None]:
    """Seed all generators around every module, so random numbers do not depend on which modules ran before.

    What the network's own code draws before a stage's modules has another seed in every stage, as in a step. So a value that is
    drawn once and used in two stages shows.

    Args:
        stage: number of the stage.
        own: modules that the stage calls, by name.
        known: what the stage received.
        device: device of the network.
    """

    inside = {part for module in own.values() for part in module.modules()}

    def seed(module: nn.Module | None = None, inputs: object = None, output: object = None) -> None:
        same = (
            module in inside
            or (isinstance(module, StandIn) and module.name in own)
            or any(x in known for x in pytree.tree_leaves(output) if isinstance(x, Tensor))
        )
        number = 0 if same else stage
        # `torch.manual_seed` would format a traceback each time, which takes longer than a layer.
        seed_all(number, device)
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002 - networks draw from it, too

    hooks = [register_module_forward_pre_hook(seed), register_module_forward_hook(seed)]
    try:
        seed()
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _results(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """Run the network or its stages, and return outputs, gradients and buffers by name."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    paths, _ = pytree.tree_flatten_with_path(run())
    outputs = {f"output{pytree.keystr(path)}": x for path, x in paths if isinstance(x, Tensor)}
    # Weighted by cos(0), cos(1), ...: a plain sum has no gradient behind a softmax or a norm, and no symmetry cancels these.
    roots = [x for x in outputs.values() if x.requires_grad]
    weights = [torch.arange(x.numel(), device=x.device).cos().to(x.dtype).view(x.shape) for x in roots]
    grads = torch.autograd.grad(roots, list(learned.values()), weights, allow_unused=True) if roots and learned else ()
    named = zip(learned, grads, strict=False)
    return {
        **{name: x.detach() for name, x in outputs.items()},
        **{f"gradient of {name!r}": g.detach().to_dense() for name, g in named if g is not None},
        **{f"buffer {name!r}": x.clone() for name, x in model.named_buffers()},
    }
