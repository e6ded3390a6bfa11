"""The parts of a recipe: its device, its network as a pipeline, its precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from nwise import capture, compile_module
from nwise.app.data import Images, Tokens
from nwise.app.models import initialize
from nwise.app.recipes import Recipe
from nwise.app.training.optimizers import make_optimizer
from nwise.batchnorm import defer_batchnorm
from nwise.compression import named
from nwise.losses import TokenCrossEntropy
from nwise.network import Chain
from nwise.pipeline import Pipeline
from nwise.planning.profiling import Network
from nwise.process import choose_gpu
from nwise.runtime.launch import launched, local_gpu
from nwise.schedule.placement import parse_placement
from nwise.stage import LossFn
from nwise.strategies import Strategy
from nwise.tensors import Tensors


def pick_device(recipe: Recipe) -> torch.device:
    """Return the recipe's device; ValueError if there is none."""
    count = torch.cuda.device_count()
    name = recipe.device
    found = f"Found {name!r}; leave it out to take what there is."
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ValueError(f"`device` should be auto, cpu, cuda or cuda:<number>. {found}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"`device` should be auto, cpu, cuda or cuda:<number>. {found}")
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"`device` should be one of the {count} GPUs, or cpu. {found}")
    if device.type == "cuda" and launched():
        device = torch.device("cuda", local_gpu() if device.index is None else device.index)
        choose_gpu(device.index)  # before data are moved: that starts CUDA, and then the GPU stays
    return device


def make_loss(data: Images | Tokens, fraction: float = 1.0) -> LossFn:
    """Return the cross-entropy of classes or of tokens, perhaps of a fraction of the tokens."""
    return TokenCrossEntropy(fraction=fraction) if isinstance(data, Tokens) else nn.functional.cross_entropy


def _loss(recipe: Recipe, data: Images | Tokens) -> LossFn:
    return make_loss(data, getattr(recipe.model, "loss_fraction", 1.0))  # networks of images have no tokens


def make_pipeline(recipe: Recipe, data: Images | Tokens, strategy: Strategy) -> Pipeline:
    """Build the recipe's network as a pipeline, on the CPU; each of several processes builds only its own stages.

    Raises:
        ValueError: `stage_lr` does not have one factor per stage.
    """
    # A network of `nwise.app.models` gets its values again, each by its name; a user's network keeps those that it was made with.
    without_memory = launched() and not recipe.network
    with torch.device("meta") if without_memory else nullcontext():
        model = recipe.build(data)
    if recipe.stage_lr and len(recipe.stage_lr) != len(model.stages):
        raise ValueError(
            f"`stage_lr` should have a factor for each of the {len(model.stages)} stages. Found {len(recipe.stage_lr)}."
        )

    def build(module: nn.Module, name: str = "") -> nn.Module:
        if without_memory:
            initialize(module.to_empty(device="cpu"), recipe.seed, name)
        return defer_batchnorm(module) if recipe.defer_batchnorm else module

    pipe = Pipeline(
        [partial(build, stage) for stage in model.stages],
        [partial(build, head, f"heads.{k}") for k, head in enumerate(model.heads)],
        _loss(recipe, data),
        strategy,
        recipe.microbatches,
        schedule=None if recipe.schedule == "best" else recipe.schedule,
        recompute=recipe.recompute,
        seed=recipe.seed,
        placement=parse_placement(recipe.placement),
        compress=named(recipe.compress),
    )
    return capture(pipe) if recipe.capture else pipe


def measurable(recipe: Recipe, data: Images | Tokens, device: torch.device) -> Network:
    """Return the recipe's network for `nwise.planning.profiling.profile`, with the data's first samples."""
    model = recipe.build(data)
    samples = data.to(device)
    stages = [stage.pieces() for stage in model.stages]
    pieces = {name: piece.to(device) for stage in stages for name, piece in stage.items()}

    def batch(size: int) -> tuple[Tensors, Tensor]:
        x, target = samples.batch(torch.arange(size) % len(samples), None)
        return (x,), target

    heads = [*(model.make_head(name).to(device) for name in list(pieces)[:-1]), None]
    return Network(
        pieces,
        heads,
        batch,
        recipe.batch_size,
        _loss(recipe, data),
        lambda parameters: make_optimizer(recipe.optimizer, parameters),
        device,
        tuple(accumulate(map(len, stages[:-1]), initial=0)),
        lambda: autocast(recipe, device),
    )


def check_channels_last(module: nn.Module, device: torch.device) -> None:
    """Raise ValueError for convolutions with which oneDNN writes past its memory.

    https://github.com/uxlfoundation/oneDNN/issues/6035

    >>> check_channels_last(nn.Conv2d(16, 32, 1, stride=2), torch.device("cpu"))
    """
    for name, conv in module.named_modules() if device.type == "cpu" else ():
        strided = isinstance(conv, nn.Conv2d) and conv.kernel_size == (1, 1) and max(conv.stride) > 1
        if strided and conv.in_channels < 16:
            raise ValueError(
                "With `channels_last` on a CPU, strided 1x1 convolutions should have at least 16 input channels: with fewer, "
                f"gradients corrupt memory (oneDNN's issue 6035). Found {conv.in_channels} in "
                f"{name or 'the module'}; leave `channels_last` out, or make the network wider."
            )


def autocast(recipe: Recipe, device: torch.device) -> Any:
    """Return a context of bf16 autocast if the recipe requires it."""
    return torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()


def compile_blocks(pipe: Pipeline, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every piece of every stage, and every head, with a backend of `torch.compile`."""
    pieces = [stage.pieces().values() if isinstance(stage, Chain) else [stage] for stage in pipe.stages]
    for module in chain(*pieces, pipe.heads.values()):
        compile_module(module, backend)
