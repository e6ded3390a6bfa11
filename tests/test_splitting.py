"""`nwise.split`: stages that compute what the network does, under its names; what cannot be cut, and why."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import cutting
import nwise
from cutting import VOCABULARY, Gpt, UNet
from launch import results
from nwise.network import group_pieces
from nwise.network.splitting import cut_points
from test_contract import assert_same, gradients

Run = Callable[[Any, Tensor], Any]


class Own(nn.Module):
    """Children by name, and a forward that is a function of the module and its input."""

    def __init__(self, run: Run, **children: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(self, x)
        return y


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
HALF = between(lambda x: x)
HALF.first.requires_grad_(False)
RESIDUAL = Own(lambda m, x: m.c(torch.relu(x + m.b(x + m.a(x)))), a=linear(), b=linear(), c=linear())
BACKWARDS = nn.Sequential(Backwards(linear(), nn.ReLU(), linear()), nn.Tanh())
FROZEN_NORM = nn.Sequential(Frozen(nn.BatchNorm1d(4)), linear())
# A network, where to cut it, an example, and the first module of each stage.
NETWORKS: dict[str, tuple[nn.Module, Any, Tensor, list[str]]] = {
    "inside a sequence": (NAMED, ["2.1", "3"], ROWS, ["0", "2.1", "3"]),
    "a list of blocks": (blocks(), ["blocks.1", "blocks.2"], TOKENS, ["embed", "blocks.1", "blocks.2"]),
    "a list by a number": (blocks(), 3, TOKENS, ["embed", "blocks.1", "blocks.2"]),
    "twice what the blocks give": (blocks(twice=True), 2, TOKENS, ["embed", "blocks.2"]),
    "a number": (nn.Sequential(*SEVEN), 3, ROWS, ["0", "5", "9"]),
    "another class": (nn.Sequential(Doubled(linear()), linear()), ["1"], ROWS, ["0", "1"]),
    "inside another class": (nn.Sequential(Doubled(linear(), linear()), linear()), ["0.1"], ROWS, ["0.0", "0.1"]),
    "another order": (BACKWARDS, ["1"], ROWS, ["0", "1"]),
    "inside another order": (BACKWARDS, ["0.1"], ROWS, ["0.2", "0.1"]),
    "a frozen norm": (FROZEN_NORM, ["1"], ROWS, ["0", "1"]),
    "lists with a forward": (LISTS, ["2"], ROWS, ["0", "2"]),
    "inside a list with a forward": (LISTS, ["1.1"], ROWS, ["0", "1.1"]),
    "a residual sum": (RESIDUAL, ["b", "c"], ROWS, ["a", "b", "c"]),
    "frozen parameters": (HALF, ["second", "third"], ROWS, ["first", "second", "third"]),
    "a detached value": (between(Tensor.detach), ["third"], ROWS, ["first", "third"]),
    "a hook on a value": (between(reversed_gradient), ["third"], ROWS, ["first", "third"]),
    "batch norm": (nn.Sequential(linear(), nn.BatchNorm1d(4), linear()), ["2"], ROWS, ["0", "2"]),
    "dropout": (nn.Sequential(linear(), nn.Dropout(), linear(), nn.Dropout()), ["2"], ROWS, ["0", "2"]),
    "dropout between": (between(functional.dropout, "training"), ["second"], ROWS, ["first", "second"]),
    "other generators": (nn.Sequential(*(StochasticDepth(4, 4) for _ in range(8))), 2, ROWS, ["0", "4"]),
    "nan": (nn.Sequential(linear(), nn.Threshold(torch.inf, torch.nan)), ["1"], ROWS, ["0", "1"]),
    "a stem": (common(nn.Conv2d(3, 4, 1)), 3, IMAGES, ["stem", "features.1", "features.3"]),
    "as in timm": (timm_like(), ["stages.1", "stages.2.2"], IMAGES, ["stem", "stages.1", "stages.2.2"]),
    "as in torchvision": (torchvision_like(), 3, IMAGES, ["conv1", "layer2.0", "layer3.2"]),
    "two skips": (UNet(), ["middle", "out"], IMAGES, ["down1", "middle", "out"]),
}


def batch_loss(output: Tensor, target: object) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", NETWORKS)
def test_stages_compute_what_the_network_does(name: str) -> None:
    """Under its names, with its gradients; a comparison on an example leaves modes, buffers, gradients and generators alone."""
    model, at, example, starts = copy.deepcopy(NETWORKS[name])
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    state, numbers = copy.deepcopy(model.state_dict()), (random.getstate(), torch.get_rng_state().tolist())
    stages = nwise.split(model, at, example)
    assert (random.getstate(), torch.get_rng_state().tolist()) == numbers
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())

    assert [next(iter(stage.pieces())) for stage in stages] == starts
    assert {n: t.data_ptr() for stage in stages for n, t in stage.state_dict().items()} == {
        n: t.data_ptr() for n, t in model.state_dict().items()
    }
    model.eval()
    twin = copy.deepcopy(model)
    expected = twin(example)
    pipe = nwise.Pipeline(stages, None, batch_loss, "end-to-end", checks="never").eval()
    torch.testing.assert_close(pipe(example), expected, rtol=0, atol=0, equal_nan=True)
    expected.square().mean().backward()
    pipe.step(example)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.filterwarnings("ignore:With 2 micro-batches, batch norm")
@pytest.mark.parametrize(("name", "case"), list(cutting.cases()))
def test_networks_of_libraries_are_cut(name: str, case: cutting.Case) -> None:
    """Outputs bit for bit and gradients, of one and of two micro-batches, and of other sizes than the example's.

    `split` compares in training mode, with dropout. The page of the manual has a line for each.
    """
    torch.manual_seed(0)
    model = case.make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p) if not p.any() else 0)  # an output of zeros would have no gradients
    stages = nwise.split(model, case.at, case.example)
    assert {n for stage in stages for n in stage.state_dict()} == set(model.state_dict())
    assert f"\n{cutting.line(name, stages)}\n" in cutting.PAGE.read_text()

    model.eval()
    given = cutting.tensors(model, case.example)
    for m in (1, 2):
        for inputs in (given, {key: x[:2] for key, x in given.items()}):
            expected = cutting.outputs_and_gradients(model, inputs, m)
            found = cutting.in_stages(model, stages, inputs, m)
            scale = max(float(g.abs().max()) for g in expected[1].values())
            torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
            torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5 * scale)


WITH_COPIES = "GPT2LMHeadModel LlamaForCausalLM BertForMaskedLM ViTForImageClassification".split()


@pytest.mark.parametrize("name", [*WITH_COPIES, "GPT in the style of nanoGPT"])
@pytest.mark.parametrize(("strategy", "m"), [("local", 1), ("2-wise-mean", 2), ("3-wise", 1)])
def test_gradients_match_the_reference(name: str, strategy: str, m: int) -> None:
    """With heads that copy the end of the network."""
    case = dict(cutting.cases())[name]
    model = case.make().double().eval()
    stages = nwise.split(model, case.at, case.example)
    heads = nwise.heads.copied(stages)
    inputs = cutting.tensors(model, case.example)
    loss = nwise.losses.TokenCrossEntropy() if "LM" in name or "GPT" in name else functional.cross_entropy
    target = torch.randint(0, 3, (4,) if "Image" in name else (4, cutting.LENGTH))
    pipe = nwise.Pipeline(stages, heads, loss, strategy, m, checks="never")
    expected = nwise.reference_grads(stages, heads, loss, inputs, target, pipe.credit, m)
    pipe.step(inputs, target=target)
    found = gradients(pipe)
    # Norms and routers of some compute in float32 whatever they are given.
    assert_same({n: g for n, g in found.items() if n in expected}, expected, 1e-6)


def test_a_network_learns_and_is_saved_as_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    model = cutting.tiny("LlamaForCausalLM")
    inputs = cutting.batch("LlamaForCausalLM")
    stages = nwise.split(model, 3, inputs)
    pipe = nwise.Pipeline(stages, nwise.heads.copied(stages, blocks=1), nwise.losses.TokenCrossEntropy(), "2-wise")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(inputs, target=inputs["input_ids"])[-1])
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    expected = again(**inputs).logits
    assert torch.equal(pipe.eval()(inputs), expected)
    assert torch.equal(model.eval()(**inputs).logits, expected)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM"])
def test_cut_networks_with_checkpointed_blocks_and_in_bfloat16(name: str) -> None:
    model = cutting.tiny(name, **({"resid_pdrop": 0.4} if "GPT2" in name else {})).to(torch.bfloat16)
    model.activation_checkpointing_enable()
    nwise.split(model, 3, cutting.batch(name))


def test_delays_copies_and_files_of_cut_networks(tmp_path: Path) -> None:
    """A parameter of an outer module is one of a stage: a delay uses its copy, `to` moves it, and a copy has its own."""
    model = UNet()
    stages = nwise.split(model, ["middle", "out"], IMAGES)
    pipe = nwise.Pipeline(stages, None, batch_loss, "end-to-end-delay-1", checks="never")
    twins = copy.deepcopy(stages), pickle.loads(pickle.dumps(stages))
    expected = model(IMAGES)
    for _ in range(2):
        pipe.step(IMAGES)
    assert model.scale.grad is not None, "an update late"
    with torch.no_grad():
        model.scale.add_(1)
        model.middle.weight.zero_()
    for twin in twins:
        assert torch.equal(nwise.Pipeline(twin, None, strategy="end-to-end")(IMAGES), expected)
    stages[-1].double()
    assert model.out.weight.dtype == torch.float64
    assert [p.dtype for p in stages[-1].parameters()] == [torch.float64] * 3


class Positions(nn.Module):
    """Has no parameters and a buffer, and depends on no values: as rotary positions."""

    table: Tensor

    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=saved)

    def forward(self, x: Tensor) -> Tensor:
        return self.table.expand_as(x)


@pytest.mark.parametrize("saved", [False, True])
def test_modules_without_parameters_are_in_every_stage(saved: bool) -> None:
    model = Own(
        lambda m, x: m.b(m.act(m.a(x)) + m.p(x)), a=linear(), b=linear(), act=nn.Tanh(), p=Positions(saved=saved)
    )
    first, second = nwise.split(model, ["b"], ROWS)
    assert isinstance(second.get_submodule("p"), Positions)
    assert second.get_submodule("p").table is not first.get_submodule("p").table, "perhaps on another device"
    assert sorted([*first.state_dict(), *second.state_dict()]) == sorted(model.state_dict())


def test_a_rank_can_free_other_stages() -> None:
    import gc
    import weakref

    model = UNet()
    first, last = nwise.split(model, ["out"], IMAGES)
    gone = weakref.ref(model.down1.weight)
    del model, first
    gc.collect()
    assert gone() is None
    assert {n for n, _ in last.named_parameters()} == {"out.weight", "out.bias", "scale"}
    blocks: Any = Gpt()
    inner = weakref.ref(blocks.transformer.h[0].attn.c_attn.weight)
    last = nwise.split(blocks, 2, torch.zeros(2, 3, dtype=torch.long))[-1]
    del blocks
    gc.collect()
    assert inner() is None


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_blocks_of_a_number_are_not_the_embeddings(stages: int) -> None:
    """Regression: a dictionary of modules has two embeddings, at which two stages began."""
    found = nwise.split(Gpt(), stages, torch.zeros(2, 3, dtype=torch.long))
    starts = [f"transformer.h.{k * 4 // stages}" for k in range(1, stages)]
    assert [next(iter(stage.pieces())) for stage in found[1:]] == starts


def test_every_value_is_in_the_state_dict_of_one_stage() -> None:
    """Those that the network never reads are in the first."""
    model = UNet()
    model.spare = nn.Parameter(torch.ones(1))
    model.unused = linear()
    first, last = nwise.split(model, ["out"], IMAGES)
    assert sorted([*first.state_dict(), *last.state_dict()]) == sorted(model.state_dict())
    assert {"spare", "unused.weight"} < set(first.state_dict())


def test_a_module_that_replaces_another_in_a_stage_runs() -> None:
    model = UNet()
    stages = nwise.split(model, ["out"], IMAGES)
    stages[1].out = nn.Identity()
    hidden = stages[0](IMAGES)
    assert stages[1](**hidden).shape[1] == 8


def test_a_sequence_has_no_named_output() -> None:
    with pytest.raises(ValueError, match="`output` should be None for a sequence.* Found 'logits'"):
        nwise.split(three(), 2, output="logits")


def test_inputs_are_those_of_the_example() -> None:
    model = cutting.tiny("GPT2LMHeadModel")
    inputs = cutting.batch("GPT2LMHeadModel")
    stages = nwise.split(model, 2, inputs)
    pipe = nwise.Pipeline(stages, None, nwise.losses.TokenCrossEntropy(), "end-to-end").eval()
    plain = {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        assert torch.equal(pipe(plain), model.eval()(**plain).logits), "a mask may be left out"
        assert torch.equal(pipe(*inputs.values()), model(**inputs).logits), "by position, in the example's order"
    with pytest.raises(
        TypeError, match="the inputs of `example`, here input_ids, attention_mask. Found 3 inputs; a target"
    ):
        pipe(*inputs.values(), inputs["input_ids"])
    with pytest.raises(
        TypeError, match="here input_ids, attention_mask. Found input_ids, labels; a target has its own"
    ):
        pipe(**plain, labels=inputs["input_ids"])


class Counted(nn.Module):
    """Has a buffer of its own code; `run` may change it."""

    k: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.a, self.b = run, linear(), linear()
        self.register_buffer("k", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(self, x)
        return y


def counting(m: Any, x: Tensor) -> Tensor:
    m.k += 1
    return m.b(m.a(x)) * m.k


def rebinding(m: Any, x: Tensor) -> Tensor:
    m.k = m.k + 1
    return m.b(m.a(x)) * m.k


@pytest.mark.parametrize("run", [counting, rebinding])
def test_a_buffer_that_the_networks_own_code_changes_is_refused(run: Run) -> None:
    """It would change once in every stage."""
    model = Counted(run)
    with pytest.raises(ValueError, match="Found another"):
        nwise.split(model, ["b"], ROWS)
    assert model.k == 1, "as before"


def test_buffers_of_the_networks_own_code_are_shared() -> None:
    """Regression: later stages had copies, which kept their values when others were loaded into the network."""
    model = Counted(lambda m, x: m.b(m.a(x)) * m.k)
    first, second = nwise.split(model, ["b"], ROWS)
    model.load_state_dict({**model.state_dict(), "k": torch.tensor(3.0)})
    assert torch.equal(second(first(ROWS)), model(ROWS))
    assert [name for name in (*first.state_dict(), *second.state_dict()) if name == "k"] == ["k"]


def masked(m: Any, x: Tensor) -> Tensor:
    pad = x.abs().sum(-1, keepdim=True) == 0
    return m.c(m.b(m.a(x))).masked_fill(pad, 0)


def branching(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(h)) * (2.0 if h.mean() > 0 else 1.0)


def choosing(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.c(m.b(h)).gather(1, h.argmax(-1, keepdim=True))


def looping(m: Any, x: Tensor) -> Tensor:
    y = m.b(m.a(x))
    for _ in range(int(x[0, 0] > 0) + 1):
        y = 2 * y
    return m.c(y)


def untracked(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        scale = h.abs().mean()
    return m.c(m.b(h)) / scale


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y += x
    y.relu_()
    return m.c(m.b(y) + y)


def by_device(m: Any, x: Tensor) -> Tensor:
    first = next(m.parameters())
    h = m.b(m.a(x.to(first.dtype)))
    return m.c(h + torch.arange(4, device=m.a.weight.device, dtype=m.a.weight.dtype))


def by_mode(m: Any, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x))) * (2.0 if m.a.training else 1.0)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


def halved(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit.script`")
@pytest.mark.parametrize("kind", ["a function of autograd", "a script", "mapped"])
def test_functions_that_are_not_of_torch(kind: str) -> None:
    """They are followed as far as they are written in Python; others belong into a module."""
    kinds = {"a function of autograd": Halved.apply, "a script": torch.jit.script(halved), "mapped": torch.vmap(halved)}
    half: Any = kinds[kind]
    module = Own(lambda m, x: half(x))
    for at in ("h", "b"):
        model = Own(lambda m, x: m.b(m.h(m.a(x))), a=linear(), h=module, b=linear())
        pipe = nwise.Pipeline(nwise.split(model, [at], ROWS), None, strategy="end-to-end")
        assert torch.equal(pipe(ROWS), model(ROWS))
    outside = pair(lambda m, x: m.b(half(m.a(x))))
    if kind == "a function of autograd":
        assert len(nwise.split(outside, ["b"], ROWS)) == 2
        return
    with pytest.raises(
        ValueError, match="functions of torch alone.* Found another one before the call of 'b'; call it inside"
    ):
        nwise.split(outside, ["b"], ROWS)


@pytest.mark.parametrize("run", [masked, branching, choosing, looping, untracked, in_place, by_device, by_mode])
@pytest.mark.parametrize("at", [["b"], ["c"], ["b", "c"]])
def test_what_the_networks_own_code_reads_is_there(run: Run, at: list[str]) -> None:
    """Regressions: values that are read without a gradient did not travel, and nan passes through ``==`` without a word.

    In-place code between modules changed what was sent, parameters and devices of other stages were not there, nor modes.
    """
    torch.manual_seed(3)
    model = Own(run, a=linear(), b=linear(), c=linear())
    pipe = nwise.Pipeline(nwise.split(model, at, ROWS), None, batch_loss, "end-to-end", checks="never")
    for x in (ROWS, -ROWS, torch.cat([ROWS[:1] * 0, ROWS])):
        for mode in (True, False):
            pipe.train(mode), model.train(mode)
            pipe.step(x)
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            with torch.no_grad():
                assert torch.equal(pipe(x), model(x))
            model(x).square().mean().backward()
            torch.testing.assert_close(found, [p.grad for p in model.parameters() if p.grad is not None])
            model.zero_grad()


def test_sizes_that_a_stage_cannot_know_are_refused() -> None:
    """A stage took the sizes of the example for those of modules in other stages."""
    model = Own(
        lambda m, x: m.c(m.b(h := m.a(x))).sum((1, 2)) / h.shape[2],
        a=nn.Conv1d(6, 6, 3, 2),
        b=nn.Conv1d(6, 6, 1),
        c=nn.Conv1d(6, 6, 1),
    )
    stages = nwise.split(model, ["c"], torch.randn(4, 6, 9))
    pipe = nwise.Pipeline(stages, None, strategy="end-to-end")
    for size in (1, 4, 6):
        x = torch.randn(size, 6, 9)
        assert torch.equal(pipe(x), model(x))
    with pytest.raises(ValueError, match="should have the sizes of `example` beyond the batch.* of what 'a' returns"):
        pipe(torch.randn(4, 6, 17))


def test_positional_inputs_have_the_order_of_the_forward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z: Tensor = self.b(self.a(x) + 2 * y)
            return z

    model = Two()
    first, second = nwise.split(model, ["b"], {"y": ROWS, "x": 2 * ROWS})
    pipe = nwise.Pipeline([first, second], None, strategy="end-to-end")
    assert torch.equal(pipe(ROWS, 2 * ROWS), model(ROWS, 2 * ROWS))


def test_heads_look_at_the_output_with_the_longest_way() -> None:
    """Regression: they looked at the output that was made last, such as the embedding of a query without a batch."""

    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(linear() for _ in range(2))
            self.query, self.attend = nn.Embedding(3, 4), nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            query = self.query(torch.arange(3)).expand(len(x), 3, 4)
            y: Tensor = self.attend(query, x, x)[0]
            return y

    first, _ = nwise.split(Query(), ["attend"], torch.randn(2, 5, 4))
    assert first(torch.randn(2, 5, 4))["hidden"].shape == (2, 5, 4)


@pytest.mark.parametrize(
    ("output", "expected"), [(None, ["logits"]), ("logits", ["logits"]), ("hidden", ["hidden"]), (0, ["logits"])]
)
def test_output_names_what_the_last_stage_returns(output: Any, expected: list[str]) -> None:
    def run(m: Any, x: Tensor) -> Any:
        hidden = m.a(x)
        made = {"logits": m.b(hidden), "hidden": hidden}
        return tuple(made.values()) if output == 0 else made

    a, b = linear(), linear()
    first, second = nwise.split(Own(run, a=a, b=b), ["b"], ROWS, output=output)
    values = {"logits": b(a(ROWS)), "hidden": a(ROWS)}
    assert torch.equal(second(first(ROWS)), values[expected[0]])


def with_hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def with_forward(model: nn.Module) -> nn.Module:
    model.forward = lambda x: 2 * x
    return model


def three() -> nn.Sequential:
    return nn.Sequential(linear(), linear(), linear())


def pair(run: Callable[[Any, Tensor], Any]) -> nn.Module:
    return Own(run, a=linear(), b=linear())


def noisy(m: Any, x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    return m.c(m.b(m.a(x) + noise) + noise)


TWICE = Own(lambda m, x: m.a(m.b(m.a(x))), a=linear(), b=linear())
RANGE = "from 1 to the network's 3 repeated blocks.* Found 4"
REFUSED: list[tuple[nn.Module, Any, Any, str]] = [
    # without an example
    (
        RESIDUAL,
        ["b"],
        None,
        r"has a forward of its own: `nwise.split\(model, at=\['b'\], example=x\)`. Found none, and a Own",
    ),
    (Doubled(linear(), linear()), 2, None, "`nwise.split.model, at=2, example=x.`. Found none, and a Doubled"),
    (nn.Sequential(Doubled(linear(), linear()), linear()), ["0.1"], None, "has a forward of its own"),
    (with_hook(three()), 2, None, "has a forward of its own"),
    (with_forward(three()), 2, None, "has a forward of its own"),
    # what stages cannot compute
    (
        with_forward(three()),
        ["1"],
        ROWS,
        "The forward of the network should be that of its class.* hooks of accelerate",
    ),
    (
        TWICE,
        ["b"],
        ROWS,
        r"should be used in one stage. Found 'a' in stage 0, and in stage 1 for the call of 'a'; .*`nwise.untie`",
    ),
    (Own(noisy, a=linear(), b=linear(), c=linear()), ["c"], ROWS, "Found another .* by .*; cut elsewhere"),
    (
        pair(lambda m, x: m.b(m.a(x)) @ m.a.weight.T),
        ["b"],
        ROWS,
        "in stage 1 for the call of 'the end'; .* its own parameter",
    ),
    (
        pair(lambda m, x: {"loss": 1.0, "y": str(m.b(m.a(x)))}),
        ["b"],
        ROWS,
        "Found none in its dict",
    ),
    # arguments
    (three(), ["7"], None, "`at` should name modules of the network. Found '7'"),
    (blocks(), ["block.1"], TOKENS, "Found 'block.1'. Did you mean 'blocks.1'"),
    (blocks(), ["1"], TOKENS, "Found '1'. Did you mean 'blocks.1'"),
    (three(), ["0"], None, r"each once and not the first.*Found \['0'\]"),
    (three(), ["2", "1"], None, r"in the order they run.*Found \['2', '1'\]"),
    (RESIDUAL, ["c", "b"], ROWS, r"in which the network calls them.*Found \['c', 'b'\]; the order is a, b, c"),
    (RESIDUAL, ["a"], ROWS, "not the first, which begins a stage anyway|not the first, which"),
    (Own(lambda m, x: m.a(x), a=linear(), b=linear()), ["b"], ROWS, "that the network calls on `example`.*Found 'b'"),
    (three(), [2, 4], None, r"a list of module names, such as .* Found \[2, 4\]"),
    (three(), True, None, "a list of module names.* or a number of stages. Found True"),
    (three(), 4, None, RANGE),
    (three(), 0, None, "from 1 to the network's 3 repeated blocks.* Found 0"),
    (common(Block(3, 4)), 7, IMAGES, "to the network's 5 repeated blocks.* Found 7|6 repeated blocks.* Found 7"),
    (
        blocks(),
        2,
        {"x": TOKENS, "flags": [1, 2]},
        "plain values that are the same in every step. Found a list for 'flags'",
    ),
    (blocks(), 2, (TOKENS, TOKENS), r"should have the inputs of the network's forward, \(x: .*too many positional"),
    (blocks(), 2, {"x": 3}, "at least one tensor. Found none"),
    (pair(lambda m, x: ([m.b(m.a(x))],)), ["b"], ROWS, "should return tensors, in tuples.* Found none in its tuple"),
    (blocks().to("meta"), 2, TOKENS, "should have values.* Found it on the device 'meta'; build it on a CPU"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3][:40])
def test_what_cannot_be_cut_is_refused(case: tuple[nn.Module, Any, Any, str]) -> None:
    model, at, example, message = case
    with pytest.raises((ValueError, TypeError), match=message):
        nwise.split(model, at, example)


def test_another_path_than_that_of_the_example_is_refused() -> None:
    """As LayerDrop takes it: a module whose output the next stage reads is left out, or called once more."""
    skip: list[str] = []

    def run(m: Any, x: Tensor) -> Tensor:
        for name in "abc":
            for _ in range(1 + ("twice" in skip and name == "b")):
                x = x if name in skip else m.get_submodule(name)(x)
        return x

    model = Own(run, a=linear(), b=linear(), c=linear())
    first, second = nwise.split(model, ["c"], ROWS)
    same = "should call the modules that it called on `example`.*"
    skip[:] = ["a"]
    assert torch.equal(second(first(ROWS)), model(ROWS)), "inside a stage any path may be taken"
    for path, stage, message in (
        ("b", first, "left out 'b'"),
        ("twice", first, "one more call of 'b'"),
        ("b", second, "left out 'b'"),
    ):
        skip[:] = [path]
        with pytest.raises(ValueError, match=f"{same} Found .*{message}"):
            stage(ROWS)


def test_a_checkpoint_around_a_module_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    def run(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(m.a, x, use_reentrant=False))

    with pytest.raises(ValueError, match="Found a call behind it, as of a checkpoint around the module"):
        nwise.split(Own(run, a=linear(), b=linear()), ["b"], ROWS)


def test_any_module_that_is_called_once_can_begin_a_stage() -> None:
    points = cut_points(Gpt(), torch.zeros(1, 3, dtype=torch.long))
    names = [
        "transformer.wpe",
        *(f"transformer.h.{k}" for k in range(4)),
        "transformer.ln_f",
        "lm_head",
    ]
    assert points == names
    tokens = torch.randint(0, VOCABULARY, (2, 5))
    made = nwise.plan(
        Gpt(),
        tokens,
        tokens,
        devices=2,
        loss_fn=nwise.losses.TokenCrossEntropy(),
        microbatches=1,
        rounds=1,
        report=None,
    )
    assert len(nwise.split(Gpt(), made.at, tokens)) == 2


def test_ranks_equal_one_process(tmp_path: Path) -> None:
    """Five networks on two processes, the three stages in turn: every boundary is crossed."""
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from ranks.cut import trained

    found = results(2, "cut.py", tmp_path)  # where the class itself takes the weights of all stages
    for name, expected in trained().items():
        parts = [rank[name] for rank in found]
        assert {n: bits for part in parts for n, bits in part.items()} == expected, name


def test_empty_chain_raises() -> None:
    with pytest.raises(ValueError, match="at least one module. Found none"):
        nwise.Chain({})
    with pytest.raises(ValueError, match="`at` should name modules of the network. Found 'c'"):
        group_pieces({"a": linear(), "b": linear()}, ["c"])


def test_heads_copy_the_end_behind_the_blocks() -> None:
    """Regression: of equally many modules of two classes the first were taken for the blocks, here the embeddings."""
    model = Gpt()
    del model.transformer.h[2:]  # type: ignore[union-attr, operator]
    stages = nwise.split(model, 2, torch.zeros(2, 3, dtype=torch.long))
    for heads in (nwise.heads.copied(stages), nwise.heads.shared(stages)):
        assert [list(head.pieces()) for head in heads] == [["transformer.ln_f", "lm_head"]]


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
    with pytest.raises(TypeError, match="should be those that `nwise.split` returned"):
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
