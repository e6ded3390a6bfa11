"""Skips past a stage: `nwise.carry` against the network without stages, and what crosses each boundary."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import UNet


def stages_of(network: nn.Module, at: list[str]) -> list[nn.Module]:
    return list(nwise.carry(dict(network.named_children()), at))


def test_unet_has_the_gradients_of_the_network_without_stages() -> None:
    """End-to-end and bitwise; `full` travels through three stages that do not read it."""
    torch.manual_seed(0)
    network = UNet().double()
    plain = copy.deepcopy(network)
    x, y = torch.randn(2, 4, 8, dtype=torch.float64)
    pipe = nwise.Pipeline(
        stages_of(network, ["down2", "middle", "up2", "up1"]), None, nn.functional.mse_loss, "end-to-end"
    )
    losses = pipe.step(x, target=y)
    loss = nn.functional.mse_loss(plain(x), y)
    loss.backward()
    assert losses[-1].item() == loss.item()
    assert {name: p.grad.tolist() for name, p in network.named_parameters()} == {  # type: ignore[union-attr] # has one
        name: p.grad.tolist()  # type: ignore[union-attr] # likewise
        for name, p in plain.named_parameters()
    }
    plain.load_state_dict({name: p for stage in pipe.stages for name, p in stage.state_dict().items()})


def test_only_what_a_later_piece_reads_crosses() -> None:
    stages = stages_of(UNet(), ["down2", "middle", "up2", "up1"])
    made: dict[str, Tensor] = stages[0](torch.ones(1, 8))
    crossing = [{name: x.shape[1] for name, x in made.items()}]
    for stage in stages[1:-1]:
        made = stage(**made)
        crossing.append({name: x.shape[1] for name, x in made.items()})
    assert crossing == [
        {"hidden": 4, "full": 8},
        {"hidden": 2, "full": 8, "half": 4},
        {"hidden": 2, "full": 8, "half": 4},
        {"hidden": 4, "full": 8},  # `half` was read, and nothing later reads it
    ]


class Residual(nn.Module):
    """A block that reads the outputs of all blocks before it, as attention residuals do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.layer = nn.Linear(3, 3)
        self.weights = nn.Parameter(torch.randn(index + 1))

    def forward(self, hidden: Tensor, **earlier: Tensor) -> dict[str, Tensor]:
        blocks = [earlier[f"block{i}"] for i in range(self.index)]
        mixed = torch.stack([*blocks, hidden]).mul(self.weights.softmax(0)[:, None, None]).sum(0)
        output = torch.tanh(self.layer(mixed))
        return {"hidden": output, f"block{self.index}": output}


@pytest.mark.parametrize("strategy", ["local", "2-wise-mean", "end-to-end", "rotating-2"])
def test_attention_residuals_follow_the_definition(strategy: str) -> None:
    torch.manual_seed(0)
    blocks = {f"blocks.{i}": Residual(i) for i in range(4)}
    stages = nwise.carry({**blocks, "output": Last()}, at=["blocks.1", "blocks.2", "blocks.3"])
    heads = [nwise.heads.OnFirstOutput(nn.Linear(3, 2)) for _ in range(3)]
    stages, heads = [stage.double() for stage in stages], [head.double() for head in heads]
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    pipe = nwise.Pipeline(stages, heads, nn.functional.mse_loss, strategy, 2)
    expected = nwise.reference_grads(stages, heads, nn.functional.mse_loss, x, y, pipe.credit, 2)
    pipe.step(x, target=y)
    for name, parameter in pipe.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(parameter)), rtol=1e-12, atol=1e-15)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)


def test_inputs_of_the_network_can_be_read_later() -> None:
    class Embed(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return ids * mask

    class Masked(nn.Module):
        def forward(self, hidden: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
            assert scale is None, "the network has no such input"
            return hidden + mask

    stages = nwise.carry({"embed": Embed(), "relu": nn.ReLU(), "last": Masked()}, at=["relu", "last"])
    ids, mask = torch.tensor([[-1.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "end-to-end")
    expected = torch.tensor([[1.0, 9.0]])
    assert torch.equal(pipe(ids, mask), expected)
    assert torch.equal(pipe(mask=mask, ids=ids), expected)


def test_reading_what_nothing_writes_raises() -> None:
    stages = nwise.carry({"a": nn.ReLU(), "b": nn.Bilinear(2, 2, 2)}, at=["b"])
    with pytest.raises(TypeError, match=r"'b' should read names .* Found hidden: missing a required .*'input2'"):
        stages[1](stages[0](torch.ones(1, 2)))
    with pytest.raises(ValueError, match="`at` should name pieces of the network: a, b. Found 'c'"):
        nwise.carry({"a": nn.ReLU(), "b": nn.ReLU()}, at=["c"])


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(hidden) if mask is None else self.layer(hidden) * mask


class Writes(nn.Module):
    def __init__(self, mask: bool = True) -> None:
        super().__init__()
        self.mask = mask
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        return {"mask": x * 1.5 if self.mask else None, "hidden": self.layer(x)}


class Wrapped(nn.Module):
    """As torch's `checkpoint_wrapper` makes it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = inner

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self._checkpoint_wrapped_module(*inputs, **named)


def in_a_chain(piece: nn.Module) -> nn.Module:
    return nwise.Chain({"inner": piece})


def compiled(piece: nn.Module) -> nn.Module:
    return torch.compile(piece, backend="eager")  # type: ignore[return-value] # a module


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
@pytest.mark.parametrize("wrap", [Wrapped, compiled, in_a_chain])
def test_optional_skips_reach_wrapped_pieces(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Regression: an optional skip of a compiled or wrapped piece was dropped, and the piece computed something else."""
    torch.manual_seed(0)
    first, last, x = Writes(), Reads(), torch.randn(3, 4)
    expected = last(**first(x))
    stages = nwise.carry({"a": first, "b": wrap(last)}, ["b"])
    with torch.no_grad():
        assert torch.equal(stages[1](**stages[0](x)), expected)
    assert sorted(stages[0](x)) == ["hidden", "mask"]


def test_absent_optional_skip() -> None:
    first, last, x = Writes(mask=False), Reads(), torch.randn(3, 4)
    stages = nwise.carry({"a": first, "b": last}, ["b"])
    made = stages[0](x)
    assert isinstance(made, Tensor), "only the hidden state crosses"
    assert torch.equal(stages[1](made), last(made))


def test_later_pieces_read_inputs_that_the_first_does_not_take() -> None:
    first, last, x = nn.Linear(4, 4), Reads(), torch.randn(3, 4)
    pipe = nwise.Pipeline(nwise.carry({"a": first, "b": last}, ["b"]), None, nn.functional.mse_loss, "end-to-end")
    assert torch.equal(pipe(input=x, mask=x), last(first(x), x))
    with pytest.raises(TypeError, match="inputs should be read by a piece. Found other, which none reads"):
        pipe(input=x, other=x)
    with pytest.raises(TypeError, match="'a' should get the inputs that its forward takes. Found otherwise: missing"):
        pipe(mask=x)
    with pytest.raises(
        TypeError, match=r"Found 2 inputs and no target; pass the target by name, `pipe.step\(x, target=y\)`"
    ):
        pipe.step(x, x)


def test_pieces_that_say_too_little_are_refused() -> None:
    class Bare(nn.Module):
        def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
            raise AssertionError("it runs")

    class NoHidden(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x}

    with pytest.raises(ValueError, match="'b' should name its arguments, or at least the first"):
        nwise.carry({"a": nn.ReLU(), "b": Bare()}, ["b"])
    for piece, found in ((NoHidden(), "names logits"), (nn.GRU(4, 4), "tuple")):
        stages = nwise.carry({"a": piece, "b": nn.ReLU()}, ["b"])
        with pytest.raises(TypeError, match=f"'a' should return a tensor, or a dictionary .* Found {found}"):
            stages[0](torch.ones(2, 4))
    with pytest.raises(TypeError, match="`at` should be a list of names of pieces. Found 2"):
        nwise.carry({"a": nn.ReLU(), "b": nn.ReLU()}, 2)  # type: ignore[arg-type] # the error
    with pytest.raises(TypeError, match="`pieces` should be a dictionary of modules by name. Found Sequential"):
        nwise.carry(nn.Sequential(nn.ReLU()), [])  # type: ignore[arg-type] # likewise
    stages = nwise.carry({"begins": nn.ReLU(), "later": nn.ReLU()}, ["later"])
    assert [list(stage.pieces()) for stage in stages] == [["begins"], ["later"]], "attributes take no name"


def test_head_error_names_the_wrapper() -> None:
    stages = nwise.carry({"a": Writes(), "b": Reads()}, ["b"])
    pipe = nwise.Pipeline(stages, [nn.Linear(4, 4)], nn.functional.mse_loss, "local")
    with pytest.raises(TypeError) as caught:
        pipe.step(torch.ones(2, 4), target=torch.ones(2, 4))
    assert any("`nwise.heads.OnFirstOutput` takes the hidden state alone" in note for note in caught.value.__notes__)


def test_what_nothing_reads_any_more_is_freed() -> None:
    stages = nwise.carry({"a": Writes(), "b": Reads(), "c": nn.ReLU(), "d": nn.ReLU()}, ["d"])
    kept: list[weakref.ref[Tensor]] = []
    stages[0].pieces()["a"].register_forward_hook(lambda module, given, made: kept.append(weakref.ref(made["mask"])))
    seen: list[bool] = []
    stages[0].pieces()["c"].register_forward_pre_hook(lambda module, given: seen.append(kept[0]() is None))
    with torch.no_grad():
        stages[0](torch.ones(2, 4))
    assert seen == [True]
