"""Confidence: how sure a head is of its answer, a number from 0 to 1 for each sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nwise.losses import TokenCrossEntropy
from nwise.tensors import Tensors, as_argument, names
from nwise.terms import unwrapped

__all__ = ["Confidence", "confidence", "confidence_of", "confidences", "default_confidence"]

# How confidence follows from an output: one of `CONFIDENCES`, or a function of it; None for that of the loss.
Rule = str | Callable[..., Tensor]
Confidence = Rule | None
CONFIDENCES = ("classes", "tokens", "label", "labels")
_RULES = f"one of {', '.join(map(repr, CONFIDENCES))}, or a function of the output that returns [B] numbers from 0 to 1"
_MASK = "attention_mask"
_BY_LOSS: dict[Any, str] = {
    **dict.fromkeys((nn.CrossEntropyLoss, functional.cross_entropy), "classes"),
    nn.NLLLoss: "classes",  # a softmax leaves log-probabilities as they are
    functional.nll_loss: "classes",
    TokenCrossEntropy: "tokens",
    nn.BCEWithLogitsLoss: "label",
    functional.binary_cross_entropy_with_logits: "label",
}


def confidence(logits: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return the probability of the likeliest class, ``[B]``; of several positions, that of the least certain one.

    Args:
        logits: ``[B, ...]`` with the classes along one dimension.
        dim: dimension of the classes; default: the last.
        mask: 0 at the positions that do not count, of the shape of the logits without the classes; default: all count.

    >>> confidence(torch.tensor([[0.0, 0.0], [0.0, 9.0]])).round(decimals=2)
    tensor([0.5000, 1.0000])
    """
    top = _wide(logits).softmax(dim).amax(dim)
    return _least(top if mask is None else top.masked_fill(mask == 0, 1.0))


def default_confidence(loss_fn: Callable[..., Tensor], stage: int) -> str:
    """Return the confidence that fits a loss, one of `CONFIDENCES`.

    Args:
        loss_fn: the loss of the stage's head; partial, compiled and decorated losses count like the loss inside.
        stage: index of the stage.

    Raises:
        ValueError: the loss is unknown, so the meaning of the output is, too.

    >>> default_confidence(nn.BCEWithLogitsLoss(), 0)
    'label'
    """
    # A loss takes logits, so it says what they mean: one class of several, or yes and no for each label.
    inner, *_ = unwrapped(loss_fn)
    # A subclass with a forward of its own may take other outputs.
    known = _BY_LOSS.get(type(inner) if isinstance(inner, nn.Module) else inner) if inner.__hash__ else None
    if known is None:
        name = getattr(inner, "__name__", type(inner).__name__)
        raise ValueError(
            f"`confidence` should be given for a loss without a default. Found {name} at stage {stage}; pass {_RULES}."
        )
    return known


def checked_confidence(given: Confidence) -> Rule:
    """Return the confidence if it is a name or a function; raise ValueError otherwise."""
    if given is None or not (given in CONFIDENCES if isinstance(given, str) else callable(given)):
        raise ValueError(f"`confidence` should be {_RULES}. Found {given!r}.")
    return given


def confidences(losses: Sequence[Callable[..., Tensor]], exits: Collection[int], given: Confidence) -> dict[int, Rule]:
    """Return the confidence of every exit and of the last stage: the given one, or the one that fits its loss."""
    stages = (*exits, len(losses) - 1)
    if given is not None:
        return dict.fromkeys(stages, checked_confidence(given))
    return {k: default_confidence(losses[k], k) for k in stages}


def confidence_of(
    rule: Rule, output: Any, seen: Tensors, stage: int, called: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Return an output as a tensor, and its confidence, ``[B]``.

    Args:
        rule: how to compute it. ``"classes"``: the probability of the likeliest class, classes along dimension 1, as in torch's
            cross-entropy; ``"tokens"``: likewise, along the last dimension; ``"label"``: the probability of the likelier side
            of a sample's only logit; ``"labels"``: likewise, of several independent logits. Of several positions or labels, the
            least certain one decides. Classes skip positions where an input named ``attention_mask`` is 0. A function gets the
            output, and if it has a second parameter without default, the stage's inputs as well.
        output: output of a head, or of the last stage.
        seen: the inputs of the stage.
        stage: index of the stage.
        called: names of inputs by position, if the stage has any. Default: none.

    Raises:
        ValueError: the output or the function's result does not have the shape that the rule needs.
    """
    logits = single(output, stage, 2 if rule in ("classes", "tokens") else 1)
    dim = 1 if rule == "classes" else -1
    if callable(rule):
        return logits, _in_range(rule(logits, as_argument(seen)) if _takes_two(rule) else rule(logits), logits, stage)
    known = dict(zip(names(seen) or called, seen, strict=False))
    mask = known.get("decoder_attention_mask" if "decoder_input_ids" in known else _MASK)
    if rule in ("label", "labels"):
        if rule == "label" and logits[0].numel() > 1:
            raise ValueError(
                "`confidence` should be given for several labels or positions, because nwise cannot tell how sure of them all a "
                f"sample should be. Found logits {list(logits.shape)} at stage {stage}; pass 'labels' for the least certain one, "
                "or a function."
            )
        if mask is not None and logits.dim() > 1 and mask.shape == logits.shape[:2]:  # positions, or as many labels
            raise _refuse_mask(mask, logits.shape[:2], stage)
        return logits, _least(torch.maximum(_wide(logits).sigmoid(), _wide(-logits).sigmoid()))
    if logits.shape[dim] == 1:
        raise ValueError(
            f"`confidence` {rule!r} should have at least two classes along dimension {dim}. Found shape {list(logits.shape)} at "
            f"stage {stage}; pass 'label' if the output is one logit."
        )
    # Logits [B, C, T] of "classes" and [B, T, C] of "tokens" have positions [B, T], as a mask has; [B, C] has none.
    positions = logits.shape[:1] + logits.shape[2:] if rule == "classes" else logits.shape[:-1]
    mask = mask if len(positions) > 1 else None
    if mask is not None and mask.shape != positions:
        raise _refuse_mask(mask, positions, stage)
    return logits, confidence(logits, dim, mask)


def _refuse_mask(mask: Tensor, positions: Sequence[int], stage: int) -> ValueError:
    return ValueError(
        f"`{_MASK}` should be [B, positions], of logits with classes. Found shape {list(mask.shape)}, with positions or labels "
        f"{list(positions)} at stage {stage}; pass `confidence`, a function of the output and the stage's inputs."
    )


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function has a second parameter without default."""
    # Does it take one argument? sure(logits) and sure(logits, scale=1.0) do; sure(logits, inputs) raises TypeError.
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:  # a function of C has no signature, a ValueError
        return isinstance(error, TypeError)
    return False


def _in_range(sure: Any, logits: Tensor, stage: int) -> Tensor:
    """Return what a function gave; raise ValueError unless it is a number from 0 to 1, up to rounding, for every sample."""
    found = f"shape {list(sure.shape)}" if isinstance(sure, Tensor) else type(sure).__name__
    if isinstance(sure, Tensor) and sure.shape == logits.shape[:1]:
        # Sums of probabilities may end a little above 1. The slack is 0.03 in float16 and 0.0003 in float32.
        slack = torch.finfo(sure.dtype).eps ** 0.5 if sure.is_floating_point() else 0
        diverged = logits[:, None].isnan().flatten(1).any(1).to(sure.device)  # nan of nan is no fault
        wrong = sure[~diverged & ~((sure >= -slack) & (sure <= 1 + slack))]
        if not len(wrong):
            return sure
        found = f"{float(wrong[0]):.3g}"
    raise ValueError(
        f"`confidence` should return [{len(logits)}] numbers from 0 to 1. Found {found} at stage {stage}; give one per sample."
    )


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _least(sure: Tensor) -> Tensor:
    return sure.flatten(1).amin(dim=1) if sure.dim() > 1 else sure


def single(output: Any, stage: int, dims: int = 2) -> Tensor:
    """Return an output if it is one tensor with enough dimensions; raise ValueError otherwise."""
    tensor = output[0] if isinstance(output, tuple) and len(output) == 1 else output
    if not isinstance(tensor, Tensor) or tensor.dim() < dims:
        what = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(output).__name__
        raise ValueError(f"Stage {stage}'s head or output should be logits [B, ..., classes] to exit. Found {what}.")
    return tensor
