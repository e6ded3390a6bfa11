"""`nwise.split` and `nwise.Chain`: stages that keep the names of the network."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from operator import delitem, setitem
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise

Run = Callable[[Any, Tensor], Tensor]


class Own(nn.Module):
    """Children by name, and a forward that is a function of the module and its input."""

    def __init__(self, run: Run, **children: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def in_order(model: nn.Module, x: Tensor) -> Tensor:
    for child in model.children():
        for piece in child if isinstance(child, nn.ModuleList) else [child]:
            x = piece(x)
    return x


def between(function: Callable[[Tensor], Tensor], where: str = "") -> nn.Module:
    """Three layers with a function behind the first, perhaps in training mode only."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.norm(model.first(x))
        return model.third(model.second(function(x) if model.training or not where else x))

    return Own(run, first=linear(), norm=nn.BatchNorm1d(4) if where else nn.Identity(), second=linear(), third=linear())


def reversed_gradient(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda g: -g)
    return x


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 2 * super().forward(x)  # type: ignore[no-untyped-call]
        return y


class Frozen(nn.Sequential):
    """Keeps its batch norm in evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[0].eval()
        return self


class Backwards(nn.Sequential):
    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(self._modules.values()))


class Twice(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * torch.as_tensor(super().__call__(x))


class Branches(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.values()]).sum(0)


class ResidualList(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


class StochasticDepth(nn.Linear):
    """Draws in training mode, from generators that are not torch's."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = not self.training or random.random() < 0.5 or np.random.rand() < 0.5  # noqa: NPY002
        return super().forward(x) if drawn else x


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


def common(stem: nn.Module) -> nn.Module:
    """A stem, features in a sequence, a classifier: what most small networks for images look like."""
    features = nn.Sequential(*(Block(4, 4) for _ in range(5)))
    return Own(lambda m, x: m.fc(m.features(m.stem(x)).mean((2, 3))), stem=stem, features=features, fc=nn.Linear(4, 3))


def timm_like() -> nn.Module:
    """Named as timm's networks with `stages` are: a stem, a sequence of sequences, a norm, a head."""
    parts = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1)) for _ in range(3)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    ends = {"norm_pre": nn.Identity(), "head": head}
    return Own(in_order, stem=nn.Conv2d(3, 8, 2, stride=2), stages=nn.Sequential(*parts), **ends)


def torchvision_like() -> nn.Module:
    """Named as torchvision's ResNets are: a stem, four layers, and a flatten that only the forward knows."""
    parts = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 1)) for _ in range(4)]
    layers = {f"layer{i}": part for i, part in enumerate(parts, 1)}
    ends = {"avgpool": nn.AdaptiveAvgPool2d(2), "fc": nn.Linear(16, 3)}

    def run(m: Any, x: Tensor) -> Tensor:
        for name, child in m.named_children():
            x = child(flat(x) if name == "fc" else x)
        return x

    return Own(run, conv1=nn.Conv2d(3, 4, 3, padding=1), relu=nn.ReLU(), **layers, **ends)


def flat(x: Tensor) -> Tensor:
    return torch.flatten(x, 1)


def pooled(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def blocks(twice: bool = False) -> nn.Module:
    """A network with a list of blocks, as many are written."""
    parts = nn.ModuleList(nn.Sequential(linear(), nn.ReLU()) for _ in range(4))
    run: Run = (lambda m, x: 2 * in_order(m, x)) if twice else in_order
    return Own(run, embed=nn.Embedding(11, 4), blocks=parts, output=nn.Linear(4, 11))


torch.manual_seed(0)
ROWS, TOKENS, IMAGES = torch.randn(3, 4), torch.randint(0, 11, (2, 5)), torch.randn(2, 3, 8, 8)
SEVEN = [nn.Flatten(), *(layer for _ in range(7) for layer in (linear(), nn.ReLU())), nn.Tanh()]
NAMED = nn.Sequential(linear(), nn.ReLU(), nn.Sequential(linear(), nn.Tanh()), nn.Linear(4, 2))
LISTS = nn.Sequential(linear(), ResidualList([linear(), linear()]), Branches({"a": linear(), "b": linear()}), linear())
HALF, IDENTITIES = between(lambda x: x), {"fc": nn.Flatten(), "layer2": nn.Identity()}
HALF.first.requires_grad_(False)
# A network, where to cut it, an example, functions before pieces, and the first piece of each stage.
NETWORKS: dict[str, tuple[nn.Module, Any, Tensor, dict[str, Any], list[str]]] = {
    "inside a sequence": (NAMED, ["2.1", "3"], ROWS, {}, ["0", "2.1", "3"]),
    "a list of blocks": (blocks(), ["blocks.1", "blocks.2"], TOKENS, {}, ["embed", "blocks.1", "blocks.2"]),
    "a number": (nn.Sequential(*SEVEN), 3, ROWS, {}, ["0", "5", "9"]),
    "another class": (nn.Sequential(Doubled(linear()), linear()), ["1"], ROWS, {}, ["0", "1"]),
    "another order": (nn.Sequential(Backwards(linear(), nn.ReLU(), linear()), nn.Tanh()), ["1"], ROWS, {}, ["0", "1"]),
    "a frozen norm": (nn.Sequential(Frozen(nn.BatchNorm1d(4)), linear()), ["1"], ROWS, {}, ["0", "1"]),
    "lists with a forward": (LISTS, ["2"], ROWS, {}, ["0", "2"]),
    "frozen parameters": (HALF, ["second", "third"], ROWS, {}, ["first", "second", "third"]),
    "batch norm": (nn.Sequential(linear(), nn.BatchNorm1d(4), linear()), ["2"], ROWS, {}, ["0", "2"]),
    "batch norm of one sample": (nn.Sequential(linear(), nn.BatchNorm1d(4), linear()), 2, ROWS[:1], {}, ["0", "2"]),
    "dropout": (nn.Sequential(linear(), nn.Dropout(), linear(), nn.Dropout()), ["2"], ROWS, {}, ["0", "2"]),
    "other generators": (nn.Sequential(*(StochasticDepth(4, 4) for _ in range(8))), 2, ROWS, {}, ["0", "4"]),
    "nan": (nn.Sequential(linear(), nn.Threshold(torch.inf, torch.nan)), ["1"], ROWS, {}, ["0", "1"]),
    "a stem": (common(nn.Conv2d(3, 4, 1)), 3, IMAGES, {"fc": pooled}, ["stem", "features.1", "features.3"]),
    "a stem that is a block": (common(Block(3, 4)), 3, IMAGES, {"fc": pooled}, ["stem", "features.1", "features.3"]),
    "as in timm": (timm_like(), ["stages.1", "stages.2.2"], IMAGES, {}, ["stem", "stages.1", "stages.2.2"]),
    "as in torchvision": (torchvision_like(), 3, IMAGES, {"fc": flat}, ["conv1", "layer2", "layer3"]),
    "modules between": (torchvision_like(), ["layer2.1", "fc"], IMAGES, IDENTITIES, ["conv1", "layer2.1", "fc"]),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_stages_compute_what_the_network_does(name: str) -> None:
    """Under its names, with its gradients; a comparison on an example leaves modes, buffers, gradients and generators alone.

    Regressions: `at=3` found one block in a network of a stem, five blocks and a classifier; nan was another output than nan; and
    the comparison moved the statistics of batch norm, which get no new version.
    """
    model, at, example, before, starts = NETWORKS[name]
    first = next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    state, numbers = copy.deepcopy(model.state_dict()), (random.getstate(), torch.get_rng_state().tolist())
    stages = nwise.split(model, at=at, example=example, before=before)
    assert (random.getstate(), torch.get_rng_state().tolist()) == numbers
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())

    assert [next(iter(stage.pieces())) for stage in stages] == starts
    assert {n: t.data_ptr() for stage in stages for n, t in stage.state_dict().items()} == {
        n: t.data_ptr() for n, t in model.state_dict().items()
    }
    assert first in [module for stage in stages for module in stage.modules()]
    model.eval()
    twin = copy.deepcopy(model)
    expected = twin(example)
    pipe = nwise.Pipeline(stages, None, lambda output, target: output.square().mean(), "end-to-end").eval()
    torch.testing.assert_close(pipe(example), expected, rtol=0, atol=0, equal_nan=True)
    expected.square().mean().backward()
    pipe.step(example)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, equal_nan=True)
    pipe.train(), twin.train()
    trains = {name: module.training for name, module in twin.named_modules()}
    for name, piece in [item for stage in stages for item in stage.pieces().items() if item[0] in trains]:
        assert all(trains[f"{name}.{inner}".rstrip(".")] == module.training for inner, module in piece.named_modules())


def with_hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def with_forward(model: nn.Module) -> nn.Module:
    model.forward = lambda x: 2 * x
    return model


def three() -> nn.Sequential:
    return nn.Sequential(linear(), linear(), linear())


RESIDUAL = Own(lambda m, x: m.c(torch.relu(x + m.b(x + m.a(x)))), a=linear(), b=linear(), c=linear())
TANHS = ResidualList([nn.Tanh(), nn.Tanh()])
LOOSE = Own(in_order, a=linear(), b=linear())
LOOSE.scale = nn.Parameter(torch.ones(1))
INNER = nn.Sequential(Doubled(linear(), linear()), linear())
FROZEN = Frozen(nn.BatchNorm1d(4), linear())
DICTIONARY = nn.ModuleDict({"a": nn.Flatten(2), "b": linear()})
LOST = "with a custom forward.*Give `example=`.*`unchecked=True`"
OTHER, GRADIENT = "Found another output for `example`", "another gradient of 'first.weight' .* the model detaches"
RANGE, FEW = "from 1 to the network's 3 Linear modules.* Found", "from 1 to the network's 6 Block modules.* Found 7"
X: dict[str, Any] = {"example": ROWS}
REFUSED: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
    # sums and functions between the children, which were dropped; a mere warning was not enough
    (RESIDUAL, 3, {}, f"`model` should run its children .* a Own {LOST}"),
    (RESIDUAL, ["b"], X, OTHER),
    (Doubled(linear(), linear()), 2, {}, f"`model` should run its children .* a Doubled {LOST}"),
    (INNER, ["0.1"], {}, f"'0' should run its children .* a Doubled {LOST}"),
    (INNER, ["0.1"], X, OTHER),
    (blocks(twice=True), ["blocks.1"], {"example": TOKENS}, OTHER),
    (torchvision_like(), 2, {"example": IMAGES}, "give the functions between them by `before=`"),
    (with_forward(three()), 2, {}, "a Sequential with a custom forward"),
    (with_hook(three()), 2, {}, "The network should have no hooks"),
    (TANHS, 2, {}, "a ResidualList with a custom forward"),
    (nn.Sequential(TANHS), ["0.1"], {}, "a ResidualList with a custom forward"),
    # sequences with the forward of `nn.Sequential`, which calls what they have otherwise
    (Backwards(*three()), ["1"], {}, "Found a Backwards with a custom __iter__, whose"),
    (nn.Sequential(Twice(*three()), nn.Tanh()), ["0.1"], {}, "Found a Twice with a custom __call__, whose"),
    # what happens in training mode only, or to gradients only
    (between(functional.dropout, "training"), ["second"], X, f"{OTHER} in training mode"),
    (between(lambda x: x + torch.randn_like(x), "training"), ["second"], X, f"{OTHER} in training mode"),
    (between(lambda x: 2 * x, "training"), ["second"], X, f"{OTHER} in training mode"),
    (between(Tensor.detach), ["second"], X, GRADIENT),
    (between(lambda x: x - 0.9 * (x - x.detach())), ["second"], X, GRADIENT),
    (between(reversed_gradient), ["second", "third"], X, GRADIENT),
    # batch norms that were in evaluation mode, and in training mode after `pipe.train()`
    (FROZEN, ["1"], {}, "`model` should change modes as `nn.Module` does.*a Frozen with its own `train`"),
    (nn.Sequential(FROZEN), ["0.1"], X, "'0' should change modes as `nn.Module` does"),
    # arguments
    (three(), ["7"], {}, "`at` should name pieces of the network: 0, 1, 2. Found '7'"),
    (three(), ["0"], {}, r"each once and not the first.*Found \['0'\]"),
    (three(), ["2", "1"], {}, r"in the order they run.*Found \['2', '1'\]"),
    (three(), [2, 4], {}, r"a list of module names, such as .* Found \[2, 4\]"),
    (three(), True, {}, "a list of module names.* or a number of stages. Found True"),
    (three(), 4, {}, f"{RANGE} 4"),
    (three(), 0, {}, f"{RANGE} 0"),
    (common(Block(3, 4)), 7, {"before": {"fc": pooled}}, FEW),
    (linear(), ["x"], {}, "should be an nn.Sequential or have child modules.*Found no children"),
    (LOOSE, ["b"], {}, "Found 'scale' outside of them; move it into a child module"),
    (DICTIONARY, ["b"], X, "in the order they were registered.*Found that they cannot"),
    (torchvision_like(), 2, {"before": {"fcc": flat}}, "`before` should name pieces .* Found 'fcc'. Did you mean 'fc'"),
    (torchvision_like(), 2, {"before": {"fc": linear()}}, "functions without parameters. Found Linear.* before 'fc'"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3][:40])
def test_what_stages_would_lose_is_refused(case: tuple[nn.Module, Any, dict[str, Any], str]) -> None:
    model, at, options, message = case
    with pytest.raises((ValueError, TypeError), match=message):
        nwise.split(model, at, **options)
    if LOST in message or "modes" in message:
        assert nwise.split(model, at, unchecked=True)


def test_empty_chain_raises() -> None:
    with pytest.raises(ValueError, match="at least one module. Found none"):
        nwise.Chain({})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
@pytest.mark.parametrize("inside", [False, True])
def test_split_warns_of_lost_compilation(inside: bool) -> None:
    model = three()
    if inside:
        model.compile()
    compiled: Any = model if inside else torch.compile(model)
    with pytest.warns(UserWarning, match=r"`model` is compiled, and its stages are not.*`nwise.compile_module`"):
        stages = nwise.split(compiled, at=2)
    assert stages[0].pieces()["0"] is model[0]


def small() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), linear()), linear())


SPLIT = "of the network should be the module that was split"
LATER: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: setitem(m, 1, linear()), f"'1' {SPLIT}.*another one, Linear, in its place"),
    (lambda m: setitem(m[2], 0, linear()), f"'2.0' {SPLIT}"),
    (lambda m: setitem(m, 2, nn.Sequential(*m[2])), f"'2' {SPLIT}.*another one, Sequential"),
    (
        lambda m: m.append(linear()),
        "The network should have the 4 modules that were split. Found 5; change the network",
    ),
    (lambda m: delitem(m[2], 1), "'2' should have the 2 modules that were split. Found 1; change the network first"),
    (with_hook, "The network should have no hooks.*register it on those modules"),
    (lambda m: m[2].register_forward_pre_hook(lambda *_: None), "'2' should have no hooks"),
    (lambda m: with_forward(m[2]), "'2' should have the forward that it had when it was split.*before the split"),
]


@pytest.mark.parametrize(("change", "message"), LATER)
def test_later_changes_of_the_network_are_refused(change: Callable[[Any], object], message: str) -> None:
    """Stages hold the network's pieces: a new module in the network's place of one was never trained, nor called."""
    model, x = small(), torch.randn(3, 4)
    pipe = nwise.Pipeline(nwise.split(model, at=["1", "2.1"]), loss_fn=functional.mse_loss, strategy="end-to-end")
    pipe.step(x, target=x)
    change(model)
    with pytest.raises(ValueError, match=message):
        pipe.step(x, target=x)
    with pytest.raises(ValueError, match=message):
        pipe(x)


def test_other_changes_take_effect() -> None:
    """Those inside pieces and of stages; copies, and stages whose network is gone, may have others."""
    model, x = nn.Sequential(nn.Sequential(linear(), nn.Tanh()), linear()), torch.randn(3, 4)
    stages = nwise.split(model, at=["1"])
    setattr(model[0], "0", linear())
    with_hook(model[1])
    pipe = nwise.Pipeline(stages, loss_fn=functional.mse_loss, strategy="end-to-end")
    assert torch.equal(pipe(x), model(x))
    stages[0].place("0", nn.Identity())  # on purpose: a stage may have other modules than the network
    assert torch.equal(pipe(x), model[1](x))
    model = small()
    stages = nwise.split(model, at=["2.1"])
    copies, expected = copy.deepcopy(stages), model(x)
    model[3] = nn.Identity()
    assert torch.equal(copies[1](copies[0](x)), expected)
    del model
    assert torch.equal(stages[1](stages[0](x)), expected)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def test_to_empty_refuses_buffers_that_no_file_brings_back() -> None:
    """A buffer outside the state dict kept what was in the memory that `to_empty` had reserved."""
    with torch.device("meta"):
        model = nn.Sequential(Positions(), linear())
    pipe = nwise.Pipeline(nwise.split(model, at=["1"]), loss_fn=functional.mse_loss, strategy="end-to-end")
    pipe.double()
    with pytest.raises(ValueError, match="should have values before the network leaves.*'(0.)?table' without; build"):
        pipe.to_empty(device="cpu")
    assert all(buffer.is_meta for buffer in pipe.buffers())
    model[0].register_buffer("table", torch.zeros(4, device="meta"), persistent=True)
    assert not any(tensor.is_meta for tensor in pipe.to_empty(device="cpu").state_dict().values())


def test_a_plan_names_pieces_behind_functions() -> None:
    model, y = torchvision_like(), torch.tensor([0, 1])
    made = nwise.plan(model, IMAGES, y, devices=2, before={"fc": flat}, microbatches=1, rounds=1, report=None)
    assert len(nwise.split(model, at=made.at, example=IMAGES, before={"fc": flat})) == 2


# Tied tensors


def tied_weight() -> nn.Module:
    model = three()
    model[2].weight = model[0].weight
    return model


def tied_modules() -> nn.Module:
    shared, norm = linear(), nn.BatchNorm1d(4, affine=False)
    return nn.Sequential(shared, norm, nn.ReLU(), shared, norm, nn.Linear(4, 2))


def tied_buffers() -> nn.Module:
    table, model = torch.ones(2), three()
    for one in (0, 2):
        model[one].register_buffer("table", table)
    return model


@pytest.mark.parametrize(
    ("make", "found", "names"),
    [
        (tied_weight, r"'2.weight' of stage 1 is '0.weight' of stage 0 \(tied\)", {"2.weight"}),
        (tied_modules, "'3.weight' of stage 1 is '0.weight' of stage 0", {"3.weight", "3.bias", "4.running_mean"}),
        (tied_buffers, "'2.table' of stage 1 is '0.table' of stage 0", {"2.table"}),
    ],
)
def test_tied_tensors_are_refused_and_untied(make: Callable[[], nn.Module], found: str, names: set[str]) -> None:
    """Regressions: `untie` saw each module once, and no buffers, so it did nothing where `split` recommended it."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"Found that {found}"):
        nwise.split(model, at=["2"])
    assert names <= set(nwise.untie(model))
    assert nwise.untie(model) == []
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    first, second = ({*s.parameters(), *s.buffers()} for s in nwise.split(model, at=["2"], example=ROWS))
    assert not first & second


# Heads that fit


@pytest.mark.parametrize(
    ("shape", "per_token", "expected"),
    [((5, 6), False, (2, 3)), ((5, 6), True, (2, 5, 3)), ((6,), False, (2, 3)), ((6, 4, 4), False, (2, 3))],
)
def test_fitting_heads_match_stage_output_shapes(
    shape: tuple[int, ...], per_token: bool, expected: tuple[int, ...]
) -> None:
    stages, x = [nn.Dropout(), nn.Identity()], torch.randn(2, *shape)
    [head] = nwise.heads.fitting(stages, x, 3, per_token=per_token)
    assert head(x).shape == expected
    assert head(x, torch.ones(2, 5)).shape == expected, "what travels along is not looked at"
    assert stages[0].training, "modes come back as they were"


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Stage 0 should return .* \[B, T, D\] for a head to fit. Found \[2, 3\]"):
        nwise.heads.fitting([nn.Identity(), nn.Identity()], torch.zeros(2, 3), 4, per_token=True)
    with pytest.raises(ValueError, match=r"or \[B, C, H, W\] for a head to fit. Found \[2, 3, 4, 5, 6\]"):
        nwise.heads.fitting([nn.Identity(), nn.Identity()], torch.zeros(2, 3, 4, 5, 6), 4)
    stages = nwise.split(three(), at=3)
    with pytest.raises(ValueError, match="a module behind its last block, '2', to copy. Found none"):
        nwise.heads.copied(stages)
    with pytest.raises(ValueError, match="from 0 to the network's 3 blocks. Found True"):
        nwise.heads.copied(stages, blocks=True)
    assert len(nwise.heads.copied(stages, blocks=1)) == 2
    with pytest.raises(TypeError, match="should be `nwise.Chain`s, as from `nwise.split`"):
        nwise.heads.copied(list(three()))  # type: ignore[arg-type]


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
    first = [nn.Conv2d(3, 4, 3, padding=1), *norm(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    second = [nn.Conv2d(4, 8, 3, padding=1), *norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    stages = [nn.Sequential(*first), nn.Sequential(*second), nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5))]
    heads = nwise.heads.fitting(stages, torch.zeros(2, 3, 8, 8), 5)
    sizes = [[sum(p.numel() for p in part.parameters()) for part in parts] for parts in (stages[:-1], heads)]
    assert all(head < 2 * stage for stage, head in zip(*sizes, strict=True)), sizes
    norms = {type(m) for head in heads for m in head.modules() if "Norm" in type(m).__name__}
    assert norms == ({kind} if kind else set())
    [head] = nwise.heads.fitting([nn.Conv2d(3, 512, 1), nn.Identity()], torch.zeros(2, 3, 4, 4), 5)
    assert [m.out_channels for m in head.modules() if isinstance(m, nn.Conv2d)] == [128, 64], (
        "never wider than the paper's"
    )
