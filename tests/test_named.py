"""Inputs, targets and outputs of stages by name."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import ZOO, Net
from nwise import exits
from nwise.tensors import Named, as_inputs, as_tuple

A = 4


def pipe_of(net: Net, strategy: str = "2-wise-mean", **options: Any) -> nwise.Pipeline:
    return nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, 2, seed=0, **options)


def made(name: str) -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    net = ZOO[name](A)
    return net, *net.draw(5)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"strategy": "end-to-end-delay-1"}])
def test_names_do_what_places_do(options: dict[str, Any]) -> None:
    """`names` is `tuples` with dictionaries, whose entries are in another order."""
    results = []
    for name in ("tuples", "names"):
        net, x, y = made(name)
        pipe = pipe_of(net, **options)
        losses = [pipe.step(*([x] if name == "tuples" else []), target=y, **({"x": x} if name == "names" else {}))]
        losses.append(pipe.step(x, target=y))
        results.append((losses, [p.grad for p in pipe.parameters()], pipe(x)))
    (losses, grads, output), (named_losses, named_grads, named_output) = results
    torch.testing.assert_close(named_losses, losses, rtol=0, atol=0, equal_nan=True)
    for gradient, named in zip(grads, named_grads, strict=True):
        assert (gradient is None) == (named is None)
        assert gradient is None or named is None or torch.equal(gradient, named)
    assert list(named_output) == ["side", "index", "x"]
    assert torch.equal(named_output["x"], output[0])


def test_one_dictionary_is_the_named_inputs() -> None:
    class Batch(UserDict[str, Tensor]):
        """As a tokenizer of transformers returns."""

    net, x, y = made("names")
    for batch in ({"x": x}, Batch(x=x)):
        pipe = pipe_of(copy.deepcopy(net))
        assert torch.equal(pipe.step(batch, target=y), pipe_of(copy.deepcopy(net)).step(x=x, target=y))
        assert torch.equal(pipe(batch)["x"], pipe(x=x)["x"])


def test_target_by_name() -> None:
    """The loss gets the dictionary, cut along with the inputs, and counts by a method of its own."""
    seen: list[Any] = []

    class Weighted:
        def __call__(self, output: Tensor, target: dict[str, Tensor]) -> Tensor:
            seen.append(sorted(target))
            loss = nn.functional.mse_loss(output, target["value"], reduction="none").mean(1)
            return (loss * target["weight"]).sum() / target["weight"].sum()

        def count(self, target: dict[str, Tensor]) -> float:
            return float(target["weight"].sum())

    torch.manual_seed(0)
    layer, x = nn.Linear(3, 3), torch.randn(5, 3)
    target = {"value": torch.randn(5, 3), "weight": torch.arange(5.0)}
    pipe = nwise.Pipeline([layer, nn.Linear(3, 3)], [None], Weighted(), "end-to-end", 2, seed=0)
    losses = pipe.step(x, target=target)
    assert {*map(tuple, seen)} == {("value", "weight")}
    assert losses[-1].item() == pytest.approx(Weighted()(pipe(x), target).item())
    expected = nwise.reference_grads(
        list(pipe.stages), None, Weighted(), x, target, pipe.credit, 2, count=Weighted().count
    )
    torch.testing.assert_close(layer.weight.grad, expected["stages.0.weight"])
    with pytest.raises(ValueError, match="`target` should have the input's 5 samples. Found 4"):
        pipe.step(x, target={name: value[:4] for name, value in target.items()})


def test_exits_by_name() -> None:
    net, x, y = made("names")
    net.stages[-1] = copy.deepcopy(net.heads[-1])  # type: ignore[assignment] # a head
    pipe = pipe_of(net, "2-wise")
    pipe.step(x=x, target=y)
    thresholds = dict.fromkeys(pipe.needed_heads(), 0.3)
    expected = exits.exit(pipe, x, threshold=0.3, confidence="classes")
    assert len(set(expected.stage.tolist())) > 0
    for answers in (
        exits.exit(pipe, x=x, threshold=0.3, confidence="classes"),
        exits.EarlyExit(pipe.stages, pipe.heads, thresholds, "classes").answers(x=x),
    ):
        assert torch.equal(answers.output, expected.output)
        assert torch.equal(answers.stage, expected.stage)


def test_wrong_names_are_refused_before_anything_runs() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            raise AssertionError("it runs")

    x = torch.randn(4, 3)
    pipe = nwise.Pipeline([Two(), nn.Linear(3, 3)], [None], nn.functional.mse_loss, "end-to-end")
    with pytest.raises(TypeError, match="the inputs that its forward takes. Found labels, mask, x and no target"):
        pipe.step(x=x, mask=x, labels=x)
    with pytest.raises(TypeError, match="by position or by name. Found 1 by position and mask by name"):
        pipe.step(x, mask=x, target=x)
    with pytest.raises(TypeError, match="should have a tensor under every name. Found NoneType under 'mask'"):
        pipe.step({"x": x, "mask": None}, target=x)  # type: ignore[dict-item] # the error
    with pytest.raises(TypeError, match="a tensor, a tuple of tensors or a dictionary of them. Found tuple of nothing"):
        pipe.step(target=x)
    pipe.num_microbatches = 2
    with pytest.raises(ValueError, match=r"the same number of samples in every tensor. Found \[3, 4\]"):
        pipe.step(x=x, mask=x[:3], target=x)


def test_named_tensors_are_a_tuple_with_names() -> None:
    values = {"x": torch.ones(2), "y": torch.zeros(2)}
    named = as_tuple(values, "")
    assert isinstance(named, Named)
    assert (named.names, len(named), named.by_name().keys()) == (("x", "y"), 2, values.keys())
    assert torch.equal(as_tuple({"y": values["y"], "x": values["x"]}, "")[0], values["x"]), "the order means nothing"
    assert all(
        isinstance(n, Named) and n.names == named.names for n in (copy.deepcopy(named), as_inputs([values], {}, ""))
    )


def test_heads_look_at_the_hidden_state() -> None:
    """Regression: the first entry of a dictionary was taken, even if it was a mask."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"a_mask": mask, "hidden": self.layer(x)}

    x = torch.randn(4, 3)
    stages: list[nn.Module] = [Stage(), nn.Identity()]
    (head,) = nwise.heads.fitting(stages, {"x": x, "mask": torch.ones(4, 1, dtype=torch.bool)}, 5)
    made = stages[0](x, x > 0)
    assert torch.equal(head(**made), head(made["hidden"]))
    assert head(**made).shape == (4, 5)
