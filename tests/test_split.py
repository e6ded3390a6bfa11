"""`nwise.split` and `nwise.Chain`: stages that keep the names of the network."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nwise


class Blocks(nn.Module):
    """A network with a list of blocks, as many are written."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))
        self.output = nn.Linear(4, 11)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.output(x)
        return 2 * y if self.twice else y


def test_split_cuts_sequential_at_given_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2))
    stages = nwise.split(model, at=["2.1", "3"], example=torch.randn(2, 3))
    assert [list(stage.pieces()) for stage in stages] == [["0", "1", "2.0"], ["2.1"], ["3"]]
    assert {n for stage in stages for n in stage.state_dict()} == set(model.state_dict())
    x = torch.randn(5, 3)
    y = x
    for stage in stages:
        y = stage(y)
    assert torch.equal(y, model(x))
    assert stages[0].get_submodule("0") is model[0]


def test_split_unrolls_module_list() -> None:
    model = Blocks()
    stages = nwise.split(model, at=["blocks.2"], example=torch.randint(0, 11, (2, 5)))
    assert [list(stage.pieces()) for stage in stages] == [
        ["embed", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "output"],
    ]
    state = {n: t for stage in stages for n, t in stage.state_dict().items()}
    Blocks().load_state_dict(state, strict=True)


def test_split_network_trains() -> None:
    stages = nwise.split(Blocks(), at=["blocks.1", "blocks.2", "blocks.3"], example=torch.randint(0, 11, (3, 5)))
    heads = [nn.Linear(4, 11) for _ in range(3)]

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    pipe = nwise.Pipeline(stages, heads, loss, "2-wise")
    pipe.step(torch.randint(0, 11, (3, 5)), target=torch.randint(0, 11, (3, 5)))
    assert pipe.stages[0].embed.weight.grad is not None  # type: ignore[union-attr]


class Residual(nn.Module):
    """Its children in order are another network: without the sums and the ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        y: Tensor = self.c(torch.relu(x + self.b(x)))
        return y


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * super().forward(x)  # type: ignore[no-untyped-call]
        return y


@pytest.mark.parametrize(
    ("model", "at", "who"),
    [
        (Residual(), 3, "`model` should run its children .* a Residual"),
        (Residual(), ["b"], "`model` should run its children .* a Residual"),
        (Doubled(nn.Linear(4, 4), nn.Linear(4, 4)), 2, "`model` should run its children .* a Doubled"),
        (
            nn.Sequential(Doubled(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)),
            ["0.1"],
            "'0' should run its children .* a Doubled",
        ),
    ],
)
def test_split_refuses_a_lost_forward(model: nn.Module, at: Any, who: str) -> None:
    """Regression: sums and functions between the children were dropped; a mere warning was not enough."""
    with pytest.raises(ValueError, match=f"{who}.* with a custom forward.*Give `example=`.*`unchecked=True`"):
        nwise.split(model, at=at)
    assert nwise.split(model, at=at, unchecked=True)
    with pytest.raises(ValueError, match="Found another output for `example`"):
        nwise.split(model, at=at, example=torch.randn(2, 4))


def test_example_whose_output_is_nan_compares_equal() -> None:
    """Regression: nan was another output than nan."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Threshold(torch.inf, torch.nan))
    assert len(nwise.split(model, at=["1"], example=torch.randn(2, 4))) == 2


@pytest.mark.parametrize("inside", [False, True])
def test_split_refuses_lost_modes(*, inside: bool) -> None:
    """Regression: a model that keeps its batch norms in evaluation mode had them in training mode after `pipe.train()`."""

    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self[0].eval()
            return self

    frozen = Frozen(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = nn.Sequential(frozen) if inside else frozen
    cut, example = ["0.1"] if inside else ["1"], torch.ones(2, 4)
    who = "'0'" if inside else "`model`"
    for given in (None, example):
        with pytest.raises(
            ValueError, match=f"{who} should change modes as `nn.Module` does.*a Frozen with its own `train`"
        ):
            nwise.split(model, at=cut, example=given)
    nwise.split(model, at=cut, unchecked=True)
    kept = nwise.split(nn.Sequential(frozen, nn.Linear(4, 4)), at=["1"])
    assert not nwise.Pipeline(kept, strategy="end-to-end").train().stages[0].get_submodule("0.0").training


def test_split_keeps_unopened_custom_sequential() -> None:
    model = nn.Sequential(Doubled(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert len(nwise.split(model, at=["1"])) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
@pytest.mark.parametrize("inside", [False, True])
def test_split_warns_of_lost_compilation(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if inside:
        model.compile()
    compiled = model if inside else torch.compile(model)
    with pytest.warns(UserWarning, match=r"`model` is compiled, and its stages are not.*`nwise.compile_module`"):
        nwise.split(compiled, at=2)  # type: ignore[arg-type]


class InTraining(nn.Module):
    """Its forward does something between the children in training only."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        y: Tensor = self.b(self.between(x) if self.training else x)
        return y


@pytest.mark.parametrize(
    "between", [lambda x: nn.functional.dropout(x, 0.5), lambda x: x + torch.randn_like(x), lambda x: 2 * x]
)
def test_example_finds_what_a_forward_does_in_training_only(between: Callable[[Tensor], Tensor]) -> None:
    """Stages were compared in eval mode only, so dropout by a function was lost without a word."""
    with pytest.raises(ValueError, match="Found another output for `example` in training mode"):
        nwise.split(InTraining(between), at=["b"], example=torch.randn(3, 4))


def test_example_in_training_mode_leaves_no_traces() -> None:
    model, x = InTraining(lambda x: x), torch.randn(3, 4)
    model.a.eval()
    buffers, before = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
    stages = nwise.split(model, at=["b"], example=x)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in (model, model.a, model.norm, *stages)] == [True, False, True, True, True]
    nwise.split(model, at=["b"], example=x[:1])  # batch norm does not train on one sample: nothing to compare with


def test_example_leaves_statistics_of_batch_norm() -> None:
    """Regression: the pass in training mode moved them, because batch norm gives them no new version."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    nwise.split(model, at=["2"], example=x)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class StochasticDepth(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 0.5 or np.random.rand() < 0.5 else x  # noqa: NPY002


def test_example_repeats_numbers_of_other_generators() -> None:
    before = random.getstate()
    assert nwise.split(nn.Sequential(*(StochasticDepth(4, 4) for _ in range(8))), at=4, example=torch.randn(3, 4))
    assert random.getstate() == before


def test_dropout_in_modules_draws_the_models_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    assert nwise.split(model, at=["2", "4"], example=torch.randn(3, 4))


def replaced(model: Any) -> None:
    model[1] = nn.Linear(4, 4)


def replaced_inside(model: Any) -> None:
    model[2][0] = nn.Linear(4, 4)


def list_replaced(model: Any) -> None:
    model[2] = nn.Sequential(*model[2])


def appended(model: Any) -> None:
    model.append(nn.Linear(4, 4))


def deleted(model: Any) -> None:
    del model[2][1]


def hooked(model: Any) -> None:
    model.register_forward_hook(lambda module, inputs, output: 2 * output)


def hooked_inside(model: Any) -> None:
    model[2].register_forward_pre_hook(lambda module, inputs: None)


def forward_replaced(model: Any) -> None:
    model[2].forward = lambda x: 2 * x


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced, "'1' of the network should be the module that was split.*another one, Linear, in its place"),
        (replaced_inside, "'2.0' of the network should be the module that was split"),
        (list_replaced, "'2' of the network should be the module that was split.*another one, Sequential"),
        (appended, "The network should have the 4 modules that were split. Found 5; change the network first"),
        (deleted, "'2' should have the 2 modules that were split. Found 1; change the network first"),
        (hooked, "The network should have no hooks.*register it on those modules"),
        (hooked_inside, "'2' should have no hooks"),
        (forward_replaced, "'2' should have the forward that it had when it was split.*replace it before the split"),
    ],
)
def test_later_changes_of_the_network_are_refused(change: Callable[[Any], None], message: str) -> None:
    """Stages hold the network's pieces: a new module in the network's place of one was never trained, nor called."""
    model, x = small(), torch.randn(3, 4)
    pipe = nwise.Pipeline(nwise.split(model, at=["1", "2.1"]), loss_fn=nn.functional.mse_loss, strategy="end-to-end")
    pipe.step(x, target=x)
    change(model)
    with pytest.raises(ValueError, match=message):
        pipe.step(x, target=x)
    with pytest.raises(ValueError, match=message):
        pipe(x)


def test_changes_inside_pieces_and_of_stages_take_effect() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)), torch.randn(3, 4)
    stages = nwise.split(model, at=["1"])
    first: Any = model[0]
    first[0] = nn.Linear(4, 4)
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    pipe = nwise.Pipeline(stages, loss_fn=nn.functional.mse_loss, strategy="end-to-end")
    assert torch.equal(pipe(x), model(x))
    copy.deepcopy(stages[0])(x)
    stages[0].place("0", nn.Identity())  # on purpose: a stage may have other modules than the network
    assert torch.equal(pipe(x), model[1](x))


class Backwards(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(self._modules.values()))


class Twice(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * torch.as_tensor(super().__call__(x))


@pytest.mark.parametrize(("kind", "method"), [(Backwards, "__iter__"), (Twice, "__call__")])
@pytest.mark.parametrize("inside", [False, True])
def test_sequences_that_run_otherwise_are_refused(kind: type[nn.Sequential], method: str, inside: bool) -> None:
    """Regression: their forward is that of `nn.Sequential`, which calls these, so the stages computed something else."""
    inner = kind(*(nn.Linear(4, 4) for _ in range(3)))
    model: nn.Module = nn.Sequential(inner, nn.Tanh()) if inside else inner
    with pytest.raises(ValueError, match=f"Found a {kind.__name__} with a custom {method}, whose"):
        nwise.split(model, at=["0.1" if inside else "1"])
    if inside:
        stages, x = nwise.split(model, at=["1"]), torch.randn(3, 4)
        assert torch.equal(stages[1](stages[0](x)), model(x)), "as a piece it runs as a whole"


def test_copies_of_stages_and_freed_networks_may_change() -> None:
    model, x = small(), torch.randn(3, 4)
    stages = nwise.split(model, at=["2.1"])
    copies, expected = copy.deepcopy(stages), model(x)
    model[3] = nn.Identity()
    assert torch.equal(copies[1](copies[0](x)), expected)
    del model
    assert torch.equal(stages[1](stages[0](x)), expected)


def test_hooks_and_forwards_of_the_network_are_refused_at_split() -> None:
    model: Any = small()
    hook = model.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ValueError, match="The network should have no hooks"):
        nwise.split(model, at=2)
    hook.remove()
    model.forward = lambda x: 2 * x
    with pytest.raises(ValueError, match="a Sequential with a custom forward"):
        nwise.split(model, at=2)


class Branches(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.values()]).sum(0)


class ResidualList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


@pytest.mark.parametrize("at", [["3"], 2, ["2"]])
def test_lists_with_a_forward_are_modules(at: Any) -> None:
    """Regression: `split` unrolled every list and dictionary, and lost the sums of their own forwards without a word."""

    def linear() -> nn.Linear:
        return nn.Linear(4, 4)

    model, x = (
        nn.Sequential(linear(), ResidualList([linear(), linear()]), Branches({"a": linear(), "b": linear()}), linear()),
        torch.randn(3, 4),
    )
    first, second = nwise.split(model, at=at)
    assert torch.equal(second(first(x)), model(x))


@pytest.mark.parametrize(
    ("model", "at"),
    [(ResidualList([nn.Tanh(), nn.Tanh()]), 2), (nn.Sequential(ResidualList([nn.Tanh(), nn.Tanh()])), ["0.1"])],
)
def test_cuts_through_lists_with_a_forward_are_refused(model: nn.Module, at: Any) -> None:
    with pytest.raises(ValueError, match="a ResidualList with a custom forward"):
        nwise.split(model, at=at)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


@pytest.mark.parametrize("chained", [False, True])
def test_to_empty_refuses_buffers_that_no_file_brings_back(chained: bool) -> None:
    """A buffer outside the state dict kept what was in the memory that `to_empty` had reserved."""
    with torch.device("meta"):
        model = nn.Sequential(Positions(), nn.Linear(4, 4))
    stages = nwise.split(model, at=["1"]) if chained else list(model)
    pipe = nwise.Pipeline(stages, loss_fn=nn.functional.mse_loss, strategy="end-to-end")
    pipe.double()
    with pytest.raises(ValueError, match="should have values before the network leaves.*'(0.)?table' without; build"):
        pipe.to_empty(device="cpu")
    assert all(buffer.is_meta for buffer in pipe.buffers())
    model[0].register_buffer("table", torch.zeros(4, device="meta"), persistent=True)
    assert not any(tensor.is_meta for tensor in pipe.to_empty(device="cpu").state_dict().values())


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


class Skips(nn.Module):
    """Its forward leaves out a child, which a stage cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten, self.a = nn.Flatten(2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


@pytest.mark.parametrize(
    ("model", "at", "example", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), ["7"], None, "`at` should name pieces of the network: 0. Found '7'"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0"], None, r"each once and not the first.*Found \['0'\]"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 3), ["2", "1"], None, r"in the order they run.*Found \['2', '1'\]"),
        (nn.Linear(2, 2), [2, 4], None, r"a list of module names, such as .* Found \[2, 4\]"),
        (nn.Linear(2, 2), 4.0, None, "a list of module names.* or a number of stages. Found 4.0"),
        (nn.Linear(2, 2), True, None, "a list of module names.* Found True"),
        (
            nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))),
            4,
            None,
            "from 1 to the network's 3 Linear modules.* Found 4",
        ),
        (nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), 0, None, "from 1 to .* Found 0"),
        (nn.Linear(2, 2), ["x"], None, "should be an nn.Sequential or have child modules.*Found no children"),
        (Loose(), ["b"], None, "Found 'scale' outside of them; move it into a child module"),
        (Skips(), ["a"], torch.zeros(2, 4), "in the order they were registered.*Found that they cannot: Dimension"),
        (Blocks(twice=True), ["blocks.1"], torch.zeros(2, 3, dtype=torch.long), "Found another output for `example`"),
        (
            nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)}),
            ["b"],
            torch.zeros(2, 2),
            "in the order they were registered.*Found that they cannot",
        ),
    ],
)
def test_split_rejects_invalid_arguments(model: nn.Module, at: Any, example: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        nwise.split(model, at, example=example)


def test_empty_chain_raises() -> None:
    with pytest.raises(ValueError, match="at least one module. Found none"):
        nwise.Chain({})


def test_split_into_n_stages_balances_blocks() -> None:
    layers = [layer for _ in range(7) for layer in (nn.Linear(2, 2), nn.ReLU())]
    stages = nwise.split(nn.Sequential(nn.Flatten(), *layers, nn.Tanh()), at=3)
    assert [sum(isinstance(p, nn.Linear) for p in stage.pieces().values()) for stage in stages] == [2, 2, 3]
    assert [next(iter(stage.pieces())) for stage in stages] == ["0", "5", "9"]
    assert list(stages[2].pieces())[-1] == "15"


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


class Common(nn.Module):
    """A stem, features in a sequence, a classifier: what most small networks for images look like."""

    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.features = nn.Sequential(*(Block(4, 4) for _ in range(5)))
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.features(self.stem(x)).mean((2, 3)))
        return y


@pytest.mark.parametrize(
    ("stem", "starts"),
    [(nn.Conv2d(3, 4, 1), ["stem", "features.1", "features.3"]), (Block(3, 4), ["stem", "features.1", "features.3"])],
)
def test_number_of_stages_counts_blocks_in_sequences(stem: nn.Module, starts: list[str]) -> None:
    """`at=3` found one block in a network of a stem, five blocks in a sequence and a classifier."""
    model, before = Common(stem), {"fc": lambda x: x.mean((2, 3))}
    stages = nwise.split(model, at=3, example=torch.randn(2, 3, 8, 8), before=before)
    assert [next(iter(stage.pieces())) for stage in stages] == starts
    with pytest.raises(ValueError, match="`at` should be from 1 to the network's [56] Block modules.* Found 7"):
        nwise.split(model, at=7, before=before)


class TimmLike(nn.Module):
    """Named as timm's networks with `stages` are: a stem, a sequence of sequences, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.stages = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1)) for _ in range(3))
        )
        self.norm_pre = nn.Identity()
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward_features(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm_pre(self.stages(self.stem(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.forward_features(x))
        return y


def test_split_timm_like_network_trains_and_loads_back() -> None:
    model, x = TimmLike(), torch.randn(4, 3, 8, 8)
    stages = nwise.split(model, at=["stages.1", "stages.2.2"], example=x)
    assert [list(stage.pieces()) for stage in stages] == [
        ["stem", "stages.0"],
        ["stages.1", "stages.2.0", "stages.2.1"],
        ["stages.2.2", "norm_pre", "head"],
    ]
    heads = nwise.heads.fitting(stages, x, 5)
    assert [head(torch.zeros(2, 8, 4, 4)).shape for head in heads] == [(2, 5), (2, 5)]
    pipe = nwise.Pipeline(stages, heads, strategy="2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        losses.append(pipe.step(x, target=torch.arange(4))[-1].item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    again = TimmLike()
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(again.eval()(x), pipe.eval()(x))


def test_tied_weights_are_refused_and_untied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"Found that '2.weight' of stage 1 is '0.weight' of stage 0 \(tied\)"):
        nwise.split(model, at=["2"])
    assert nwise.untie(model) == ["2.weight"]
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    assert torch.equal(last.weight, first.weight)
    assert last.weight is not first.weight
    nwise.split(model, at=["2"])


@pytest.mark.parametrize(
    ("shape", "per_token", "expected"),
    [((5, 6), False, (2, 3)), ((5, 6), True, (2, 5, 3)), ((6,), False, (2, 3)), ((6, 4, 4), False, (2, 3))],
)
def test_fitting_heads_match_stage_output_shapes(
    shape: tuple[int, ...], per_token: bool, expected: tuple[int, ...]
) -> None:
    stages = [nn.Dropout(), nn.Identity()]
    x = torch.randn(2, *shape)
    [head] = nwise.heads.fitting(stages, x, 3, per_token=per_token)
    assert head(x).shape == expected
    assert head(x, torch.ones(2, 5)).shape == expected, "what travels along is not looked at"
    assert stages[0].training, "modes come back as they were"


def test_fitting_heads_reject_unsupported_shapes() -> None:
    with pytest.raises(ValueError, match=r"Stage 0 should return .* \[B, T, D\] for a head to fit. Found \[2, 3\]"):
        nwise.heads.fitting([nn.Identity(), nn.Identity()], torch.zeros(2, 3), 4, per_token=True)
    with pytest.raises(ValueError, match=r"or \[B, C, H, W\] for a head to fit. Found \[2, 3, 4, 5, 6\]"):
        nwise.heads.fitting([nn.Identity(), nn.Identity()], torch.zeros(2, 3, 4, 5, 6), 4)


def test_copied_heads_need_a_module_after_the_last_block() -> None:
    stages = nwise.split(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), at=3)
    with pytest.raises(ValueError, match="a module behind its last block, '2', to copy. Found none"):
        nwise.heads.copied(stages)
    with pytest.raises(ValueError, match="from 0 to the network's 3 blocks. Found True"):
        nwise.heads.copied(stages, blocks=True)
    assert len(nwise.heads.copied(stages, blocks=1)) == 2


def test_untie_copies_shared_module() -> None:
    """Regression: `untie` saw each module once, so it did nothing where `split` recommended it."""
    shared, norm = nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(shared, norm, nn.ReLU(), shared, norm, nn.Linear(4, 2))
    with pytest.raises(ValueError, match="'3.weight' of stage 1 is '0.weight' of stage 0"):
        nwise.split(model, at=["2"])
    new = nwise.untie(model)
    assert {"3.weight", "3.bias", "4.running_mean"} <= set(new)
    assert nwise.untie(model) == []
    stages = nwise.split(model, at=["2"], example=torch.randn(3, 4))
    first, second = ({id(t) for t in (*s.parameters(), *s.buffers())} for s in stages)
    assert not first & second


def test_buffers_in_two_stages_are_refused() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(ValueError, match="'3.running_mean' of stage 1 is '1.running_mean' of stage 0"):
        nwise.split(nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm), at=["2"])


def test_copied_heads_need_stages_of_split() -> None:
    with pytest.raises(TypeError, match="should be `nwise.Chain`s, as from `nwise.split`"):
        nwise.heads.copied([nn.Linear(2, 2), nn.Linear(2, 2)])  # type: ignore[list-item]


def small_cnn(norm: Any) -> list[nn.Module]:
    """Two stages, of 4 and 8 channels, and a classifier."""
    first = [nn.Conv2d(3, 4, 3, padding=1), *norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    second = [nn.Conv2d(4, 8, 3, padding=1), *norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return [nn.Sequential(*first), nn.Sequential(*second), nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5))]


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda c: [], None),
        (lambda c: [nn.BatchNorm2d(c)], nn.BatchNorm2d),
        (lambda c: [nn.GroupNorm(2, c)], nn.GroupNorm),
        (lambda c: [nn.InstanceNorm2d(c)], nn.GroupNorm),
    ],
)
def test_fitting_heads_match_stage_size_and_norm(norm: Any, kind: Any) -> None:
    """Regression: heads were 11.8 times as large as a small CNN and added batch norm to a network without any."""
    stages = small_cnn(norm)
    heads = nwise.heads.fitting(stages, torch.zeros(2, 3, 8, 8), 5)
    sizes = [[sum(p.numel() for p in part.parameters()) for part in parts] for parts in (stages[:-1], heads)]
    assert all(head < 2 * stage for stage, head in zip(*sizes, strict=True)), sizes
    norms = {type(m) for head in heads for m in head.modules() if "Norm" in type(m).__name__}
    assert norms == ({kind} if kind else set())


def test_heads_are_never_wider_than_the_papers() -> None:
    [head] = nwise.heads.fitting([nn.Conv2d(3, 512, 1), nn.Identity()], torch.zeros(2, 3, 4, 4), 5)
    assert [m.out_channels for m in head.modules() if isinstance(m, nn.Conv2d)] == [128, 64]


class TorchvisionLike(nn.Module):
    """Named as torchvision's ResNets are: a stem, four layers, and a flatten that only the forward knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()
        for i in range(1, 5):
            self.add_module(f"layer{i}", nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def flat(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


@pytest.mark.parametrize("function", [flat, nn.Flatten()])
def test_functions_between_modules(function: Callable[..., Any]) -> None:
    model, x, y = TorchvisionLike(), torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    stages = nwise.split(model, at=3, example=x, before={"fc": function})
    assert list(stages[-1].pieces())[-2:] == ["before_fc", "fc"]
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())
    twin = copy.deepcopy(model)
    nn.functional.cross_entropy(twin(x), y).backward()
    nwise.Pipeline(stages, strategy="end-to-end").step(x, target=y)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=0)
    made = nwise.plan(model, x, y, devices=2, before={"fc": function}, microbatches=1, rounds=1, report=None)
    assert len(nwise.split(model, at=made.at, example=x, before={"fc": function})) == 2
    inner = nwise.split(model, at=["layer2.1", "fc"], example=x, before={"fc": function, "layer2": nn.Identity()})
    assert list(inner[0].pieces())[-2:] == ["before_layer2", "layer2.0"]


def test_invalid_functions_between_modules_raise() -> None:
    model, x = TorchvisionLike(), torch.randn(2, 3, 8, 8)
    with pytest.raises(ValueError, match="give the functions between them by `before=`"):
        nwise.split(model, at=2, example=x)
    with pytest.raises(
        ValueError, match="`before` should name pieces of the network: .* Found 'fcc'. Did you mean 'fc'"
    ):
        nwise.split(model, at=2, before={"fcc": flat})
    with pytest.raises(
        ValueError, match="`before` should have functions without parameters. Found Linear.* before 'fc'"
    ):
        nwise.split(model, at=2, before={"fc": nn.Linear(2, 2)})


def test_untie_copies_shared_buffers() -> None:
    """`split` advised it, and it did nothing."""
    table = torch.ones(2)
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for block in blocks:
        block.register_buffer("table", table)
    assert nwise.untie(nn.Sequential(*blocks)) == ["1.table"]
    assert blocks[1].table is not table


class Between(nn.Module):
    """Three layers with code between the first two."""

    def __init__(self, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.between(self.first, x)))
        return y


def _reversed(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    if y.requires_grad:
        y.register_hook(lambda g: -g)
    return y


@pytest.mark.parametrize(
    "between",
    [
        lambda layer, x: layer(x).detach(),
        lambda layer, x: 0.1 * layer(x) + 0.9 * layer(x).detach(),
        lambda layer, x: torch.no_grad()(layer)(x),
        _reversed,
    ],
)
def test_gradients_that_change_between_modules_are_refused(between: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Regression: only outputs were compared, which a `detach` between two modules does not change."""
    model = Between(between)
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="Found another gradient of 'first.weight' for `example`: the model detaches"):
        nwise.split(model, at=["second", "third"], example=x)
    assert all(p.grad is None for p in model.parameters())
    plain = Between(lambda layer, x: layer(x))
    plain.first.requires_grad_(False)
    assert len(nwise.split(plain, at=["second", "third"], example=x)) == 3
