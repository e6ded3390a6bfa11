"""What may travel between stages, and how its shapes are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from launch import scripted
from nwise.runtime.shapes import Spec, check_sendable, from_json, make_spec, to_json, with_layout


def test_outputs_whose_size_depends_on_values_travel(tmp_path: Path) -> None:
    """Each message says its shapes. Regression: two steps with equal batches and other outputs ended the ranks."""
    text = (
        "import nwise, torch\nfrom torch import nn\n"
        "class Picks(nn.Module):\n    def forward(self, x):\n        return x[x[:, 0] > 0]\n"
        "torch.manual_seed(0)\n"
        "stages = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Picks()), nn.Identity()]\n"
        "pipe = nwise.Pipeline(stages, None, lambda y, _: y.sum(), 'end-to-end', checks='never')\n"
        "stages[1][0].weight.data, stages[1][0].bias.data = torch.eye(2), torch.zeros(2)\n"
        "stages[0].weight.data, stages[0].bias.data = torch.eye(2), torch.zeros(2)\n"
        "for x in ([[1, 1], [1, 1]], [[1, 1], [2, 2]], [[1, 1], [-1, 1]]):\n    pipe.step(torch.tensor(x).float())\n"
        "print('bias', stages[0].bias.grad)\n"
    )
    done = scripted(3, text, tmp_path)
    assert not done.returncode, done.stderr
    assert "bias tensor([5., 5.])" in done.stdout, "of five rows in all"


class Logs(torch.Tensor):
    """Numbers that the next stage takes for logarithms."""


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, "sparse_coo"),
    "nested": (lambda y: torch.nested.as_nested_tensor([y], layout=torch.jagged), "nested"),
    "quantized": (lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8), "quantized"),
    "meta": (lambda y: y.to("meta"), "on the device 'meta'"),
    "of a class": (lambda y: y.as_subclass(Logs), "a Logs, a class that would not travel with its values"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
def test_outputs_that_cannot_travel_are_named(kind: str) -> None:
    """Regression: torch's words about storages or JSON ended the ranks; an output on the device meta hung them."""
    function, found = ODD[kind]
    message = f"The output of stage 3 should be dense tensors on the device 'cpu'.*Found a tensor that is {found};"
    check_sendable((torch.ones(2), torch.ones(1, 3).T), 3, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        check_sendable((torch.ones(2), function(torch.ones(2, 2))), 3, torch.device("cpu"))


def test_nested_tensors_have_no_spec() -> None:
    """Regression: several processes ended with torch's words, such as that a SymInt is not JSON serializable."""
    with pytest.raises(ValueError, match="should have a shape that all of them know. Found a nested tensor; pass"):
        make_spec(torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))


def test_specs_survive_json() -> None:
    specs = (Spec((2, 3), torch.float32), None, Spec((2,), torch.int64, "mask"), Spec((2, 1), torch.bfloat16))
    assert from_json(json.loads(json.dumps(to_json(specs)))) == specs


@given(st.permutations(range(3)), st.tuples(*[st.integers(0, 3)] * 3))
def test_layouts_survive_a_journey(order: list[int], shape: tuple[int, ...]) -> None:
    """What travels is memory: a tensor arrives with its strides, and its values in their places."""
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(order)
    spec = with_layout(make_spec(tensor), tensor)
    assert from_json(json.loads(json.dumps(to_json([spec])))) == (spec,)
    sent = spec.in_memory(tensor)
    assert sent.is_contiguous()
    arrived = spec.empty(torch.device("cpu"))
    spec.in_memory(arrived).copy_(sent)
    assert torch.equal(arrived, tensor)
    assert arrived.is_contiguous() == tensor.is_contiguous()


def test_tensors_with_gaps_travel_as_in_their_shape() -> None:
    for tensor in (torch.ones(4, 4)[:, ::2].T, torch.ones(1, 3).expand(4, 3), torch.ones(3)[::2]):
        assert with_layout(make_spec(tensor), tensor) == make_spec(tensor)
