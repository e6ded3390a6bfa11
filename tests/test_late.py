"""Optimizers for late gradients, against values worked out by hand and against torch's own."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutting
import nwise
from nwise.app.recipes import Adam, Sgd, recipe
from nwise.app.training import Callback, Trainer
from nwise.app.training import trainer as trainer_module
from nwise.app.training.optimizers import make_optimizer
from nwise.network.layers import TransformerBlock
from nwise.training.fused import Fused
from nwise.training.late import MuonWithAdam, actual_weights, extrapolate, hidden_matrices, predict, settle


def trained(config: Sgd | Adam, gradients: list[float]) -> list[float]:
    """The values of a parameter that begins at 1."""
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = make_optimizer(config, [w])
    values = []
    for gradient in gradients:
        w.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        values.append(w.item())
    return values


MU = [0.9 * (1 - 0.5 * 0.96 ** (0.004 * t)) for t in (1, 2)]
PLAIN = Sgd(lr=0.1, momentum=0, weight_decay=0)
BY_HAND: dict[str, tuple[Sgd | Adam, list[float], list[float]]] = {
    # u = -0.1 g = -0.1, -0.2, -0.1; then w + u + (u - the u before).
    # 1 - 0.1 = 0.9;   0.9 - 0.2 + (-0.2 + 0.1) = 0.6;   0.6 - 0.1 + (-0.1 + 0.2) = 0.6
    "extrapolated": (replace(PLAIN, extrapolate=True), [1, 2, 1], [0.9, 0.6, 0.6]),
    # A delay of 2: w = 0.9, 0.7, 0.6; then w + 2 u.
    "predicted": (replace(PLAIN, predict=2), [1, 2, 1], [0.7, 0.3, 0.4]),
    # Momentum 0.5: v = 1, then 0.5 + 2 = 2.5; the update is g + 0.5 v = 1.5, then 3.25.
    "nesterov": (replace(PLAIN, momentum=0.5, nesterov=True), [1, 2], [0.85, 0.525]),
    # The first step of NAdam (Dozat 2016), beta1 = 0.9, beta2 = 0.999, decay 0.004, gradient 2. m = 0.2, v = 0.004, and
    # v / (1 - beta2) = 4. The update is 0.1 / 2 times ((1 - mu1) 2 / (1 - mu1) + mu2 0.2 / (1 - mu1 mu2)).
    "nesterov of Adam": (Adam(lr=0.1, nesterov=True), [2], [1 - 0.05 * (2 + MU[1] * 0.2 / (1 - MU[0] * MU[1]))]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_updates_by_hand(name: str) -> None:
    config, gradients, expected = BY_HAND[name]
    assert trained(config, gradients) == pytest.approx(expected, abs=1e-8 if "Adam" in name else 1e-12)


def network() -> nwise.Pipeline:
    """An embedding, two hidden matrices, a head of two layers, and an output."""
    torch.manual_seed(0)
    stages = [
        nwise.Chain({"embed": nn.Embedding(7, 4), "first": nn.Linear(4, 4)}),
        nwise.Chain({"norm": nn.LayerNorm(4), "second": nn.Linear(4, 4), "output": nn.Linear(4, 7)}),
    ]
    return nwise.Pipeline(stages, [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7))], strategy="2-wise-mean", seed=0)


def test_muon_trains_hidden_matrices_only() -> None:
    pipe = network()
    names = {p: name for name, p in pipe.named_parameters()}
    assert [names[p] for p in hidden_matrices(pipe)] == [
        "stages.0.first.weight",
        "heads.0.0.weight",
        "stages.1.second.weight",
    ]


def test_muon_with_adam_is_muon_and_adam() -> None:
    """One optimizer, with a scheduler's rate and a state that can be saved, computes what torch's two do."""
    theirs = network()
    config = Adam(lr=0.01, muon_lr=0.02, weight_decay=0.1)
    # Copies train alone. Regression: a copy had no parts.
    ours, optimizer = copy.deepcopy((theirs, make_optimizer(config, theirs.parameters(), hidden_matrices(theirs))))
    hidden = hidden_matrices(theirs)
    rest = [p for p in theirs.parameters() if all(p is not q for q in hidden)]
    parts = [torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1)]
    rates = [torch.optim.lr_scheduler.StepLR(one, 2) for one in (optimizer, *parts)]
    for step in range(5):
        x = torch.randint(0, 7, (3,), generator=torch.Generator().manual_seed(step))
        for pipe in (ours, theirs):
            pipe.zero_grad()
            pipe.step(x, target=x)
        for one in (optimizer, *parts):
            one.step()
        for rate in rates:
            rate.step()
        if step == 2:
            saved = optimizer.state_dict()
            optimizer = make_optimizer(config, ours.parameters(), hidden_matrices(ours))
            optimizer.load_state_dict(saved)
            rates[0].optimizer = optimizer
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    with pytest.raises(ValueError, match="`closure` should be None"):
        optimizer.step(lambda: 0.0)


def rows(*sizes: int) -> Callable[[Tensor], Sequence[Tensor]]:
    """Logical matrices one below the other."""
    return lambda whole: whole.split(sizes)


def by_head(whole: Tensor) -> Sequence[Tensor]:
    """Two heads, each with the rows of its query, key and value."""
    return [whole.view(2, 3, -1, whole.shape[1])[:, i].reshape(-1, whole.shape[1]) for i in range(3)]


class Attention(nn.Module):
    """Layers under names that others use, called by nothing."""

    def __init__(self, layer: str, outs: int, **facts: int) -> None:
        super().__init__()
        self.add_module(layer, nn.Linear(4, outs))
        self.__dict__.update(facts)


def of_transformers(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        pytest.importorskip("transformers", reason="needs the extra 'hf'")
        model = cutting.tiny(name)
        (first, *_) = (m for n, m in model.named_modules() if re.search(r"(layers|h)\.0$", n))
        assert isinstance(first, nn.Module)
        return first

    return make


@pytest.mark.parametrize(
    ("make", "name", "parts"),
    [
        (lambda: TransformerBlock(4, 2), "attention.qkv.weight", rows(4, 4, 4)),
        (lambda: nn.MultiheadAttention(4, 2), "in_proj_weight", rows(4, 4, 4)),
        (lambda: nn.LSTM(4, 3), "weight_hh_l0", rows(3, 3, 3, 3)),
        (lambda: nn.GRUCell(4, 3), "weight_ih", rows(3, 3, 3)),
        (lambda: Attention("to_qkv", 8, num_key_value_heads=1, head_dim=2), "to_qkv.weight", rows(4, 2, 2)),
        (lambda: Attention("kv", 8), "kv.weight", rows(4, 4)),
        (of_transformers("GPT2LMHeadModel"), "attn.c_attn.weight", lambda whole: whole.split(16, 1)),
        (of_transformers("Phi3ForCausalLM"), "self_attn.qkv_proj.weight", rows(16, 8, 8)),
        (of_transformers("Phi3ForCausalLM"), "mlp.gate_up_proj.weight", rows(32, 32)),
        (of_transformers("GPTNeoXForCausalLM"), "attention.query_key_value.weight", by_head),
        (of_transformers("GPTNeoXForCausalLM"), "mlp.dense_h_to_4h.weight", lambda whole: [whole]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_muon_takes_logical_matrices_apart(
    make: Callable[[], nn.Module], name: str, parts: Callable[[Tensor], Sequence[Tensor]], compiled: bool
) -> None:
    """Regression: queries, keys and values in one parameter were made orthogonal as one matrix, without a word."""
    torch.manual_seed(0)
    module = make()
    stage: Any = torch.compile(module, backend="eager") if compiled else module
    pipe = nwise.Pipeline([nwise.Chain({"a": stage}), nn.Linear(4, 3)], [nn.Linear(4, 3)], strategy="local")
    fused = module.get_parameter(name)
    config = Adam(muon_lr=0.02, weight_decay=0.1)
    optimizer = make_optimizer(config, pipe.parameters(), hidden_matrices(pipe))
    expected = [nn.Parameter(part.detach().clone()) for part in parts(fused)]
    muon = torch.optim.Muon(expected, lr=0.02, weight_decay=0.1)
    for _ in range(3):
        fused.grad = torch.randn_like(fused)
        for p, gradient in zip(expected, parts(fused.grad), strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        muon.step()
    for p, part in zip(expected, parts(fused), strict=True):
        assert torch.equal(p, part)


@pytest.mark.parametrize(
    ("layer", "outs"), [("query_key_value", 12), ("kv_b_proj", 6), ("in_proj", 8), ("project", 12)]
)
def test_matrix_fused_in_an_unknown_way_raises(layer: str, outs: int) -> None:
    pipe = nwise.Pipeline([Attention(layer, outs), nn.Linear(4, 3)], None, strategy="end-to-end")
    with pytest.raises(ValueError, match=rf"logical matrix by itself. Found '{layer}.weight', of shape \({outs}, 4\)"):
        hidden_matrices(pipe)
    name, weight = f"model.{layer}.weight", pipe.stages[0].get_parameter(f"{layer}.weight")
    assert hidden_matrices(pipe, {f"*.{layer}.*": None}) == {weight: None}
    halves = Fused((outs // 2, outs // 2))
    assert hidden_matrices(pipe, {name: halves, "*": None}) == {weight: halves}
    with pytest.raises(ValueError, match=rf"'{name}' should consist of the parts of .*Found shape \({outs}, 4\)"):
        hidden_matrices(pipe, {name: Fused((5, 5))})


def test_muon_leaves_other_parameters_of_two_dimensions_to_adamw() -> None:
    """Regression: adapters of low rank, frozen matrices, tables and biases of experts were made orthogonal."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.lora_A = nn.Parameter(torch.ones(2, 4))
            self.relative_position_bias_table = nn.Parameter(torch.ones(3, 4))
            self.column = nn.Parameter(torch.ones(4, 1))

    class Adapted(nn.Module):
        adapter_layer_names = ("vera_A",)

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(4, 4)
            self.vera_A = nn.ParameterDict({"default": nn.Parameter(torch.ones(2, 4))})

    pieces = {
        "plain": Layer(),
        "adapted": Adapted(),
        "frozen": nn.Linear(4, 4).requires_grad_(False),
        "scaled": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        "experts": nn.Bilinear(4, 4, 4),
        "conv": nn.Conv2d(4, 4, 3),
        "bag": nn.EmbeddingBag(4, 4),
    }
    pipe = nwise.Pipeline([nwise.Chain(pieces), nwise.Chain({"output": nn.Linear(4, 3)})], None, strategy="end-to-end")
    names = {p: name for name, p in pipe.named_parameters()}
    assert [names[p] for p in hidden_matrices(pipe)] == ["stages.0.plain.weight", "stages.0.adapted.base_layer.weight"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sgd(nesterov=True, momentum=0.0), "`nesterov` needs a momentum above 0. Found 0"),
        (lambda: Adam(nesterov=True, muon_lr=0.1), "`nesterov` should be off with `muon_lr`.*Found both"),
        (lambda: Adam(predict=2, extrapolate=True), "`predict` should be 0 with `extrapolate`.*Found 2"),
        (lambda: predict(torch.optim.SGD([torch.zeros(1)]), 0), "`delay` should be an integer of at least 1. Found 0"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_predicted_weights_are_actual_ones_for_the_next_update_and_within_a_test() -> None:
    """Weight decay is of the actual weight: from 1 by 0.1 (2 + 0.5 * 1) to 0.75, by 0.1 (1 + 0.5 * 0.75) to 0.6125."""
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = make_optimizer(Sgd(lr=0.1, momentum=0, weight_decay=0.5, predict=3), [w])
    found = []
    for gradient in (2.0, 1.0, None):
        w.grad = None if gradient is None else torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        with actual_weights(optimizer):
            found.append(w.item())
        found.append(w.item())
    # Without a gradient nothing changes, so the prediction is the actual weight.
    assert found == pytest.approx([0.75, 0.75 - 3 * 0.25, 0.6125, 0.6125 - 3 * 0.1375, 0.6125, 0.6125], abs=1e-12)
    settle(optimizer)
    assert w.item() == pytest.approx(0.6125, abs=1e-12)


@pytest.mark.parametrize("first", [False, True])
def test_a_clamp_after_updates_is_one_of_the_actual_weights(first: bool) -> None:
    """Regression: a hook that was registered after `predict` changed predicted weights, and the next update dropped that."""
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def clamp(*_: object) -> None:
        w.data.clamp_(min=0.4)

    if first:
        optimizer.register_step_post_hook(clamp)
    predict(optimizer, 1)
    if not first:
        optimizer.register_step_post_hook(clamp)
    values = []
    for gradient in (0.5, 0.25, 0.25):
        w.grad = torch.tensor([gradient])
        optimizer.step()
        with actual_weights(optimizer):
            values.append(w.item())
    assert values == pytest.approx([0.5, 0.4, 0.4])


@pytest.mark.parametrize("again", [extrapolate, lambda optimizer: predict(optimizer, 1)])
@pytest.mark.parametrize("before", [extrapolate, lambda optimizer: predict(optimizer, 1)])
def test_an_optimizer_predicts_or_extrapolates_once(before: Callable[..., None], again: Callable[..., None]) -> None:
    """Regression: a notebook cell that ran twice added every change twice."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    before(optimizer)
    with pytest.raises(ValueError, match="Found one that does already"):
        again(optimizer)


def test_a_copied_optimizer_predicts_only_if_it_is_asked() -> None:
    """Regression: torch copies the state without the hooks, and tests of the copy saw the weights of that moment for ever."""
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([w], lr=1.0)
    predict(optimizer, 1)
    w.grad = torch.tensor([0.5])
    optimizer.step()
    other, theirs = copy.deepcopy((w, optimizer))
    with pytest.raises(ValueError, match="copies and pickles"), actual_weights(theirs):
        pass
    with pytest.raises(ValueError, match="copies and pickles"):
        settle(theirs)
    predict(theirs, 1)
    with actual_weights(theirs):
        assert other.item() == 0.5


def test_weights_that_are_loaded_after_settling_stay() -> None:
    """The next update began from the weights before the load, which it dropped without a word: from 5 by 1, not from 0 by 1."""
    w = nn.Parameter(torch.tensor([1.0]))
    optimizer = make_optimizer(Sgd(lr=1.0, momentum=0, weight_decay=0, predict=2), [w])
    for loaded in (None, 5.0):
        if loaded is not None:
            settle(optimizer)
            w.data.fill_(loaded)
        w.grad = torch.ones(1)
        optimizer.step()
    with actual_weights(optimizer):
        assert w.item() == 4.0
    assert w.item() == 4.0 - 2 * 1.0


def test_a_prediction_by_one_update_is_an_extrapolated_update() -> None:
    """Adam's updates do not depend on weights: the two differ by the first update, which extrapolation leaves as it is."""
    gradients = [1.0, -0.5, 2.0, 0.3]
    plain, predicted, extrapolated = (
        trained(Adam(lr=0.1, **options), gradients) for options in ({}, {"predict": 1}, {"extrapolate": True})
    )
    first = plain[0] - 1
    assert [p - first for p in predicted] == pytest.approx(extrapolated, abs=1e-12)
    assert predicted[-1] == pytest.approx(2 * plain[-1] - plain[-2], abs=1e-12)


@pytest.mark.parametrize("muon_lr", [0.0, 0.02])
def test_gradients_under_a_delay_are_those_at_predicted_weights(muon_lr: float) -> None:
    """By the definition: w[t + 1] = w[t] + update(gradient of batch t - 2 at w[t - 2] + 2 (w[t - 2] - w[t - 3])), in float64."""
    torch.manual_seed(0)
    stages = [nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))]
    whole = nn.Sequential(*copy.deepcopy(stages)).double()
    pipe = nwise.Pipeline([one.double() for one in stages], None, nn.functional.mse_loss, "end-to-end-delay-2")
    config = Adam(lr=0.05, muon_lr=muon_lr, predict=2)
    optimizer = make_optimizer(config, pipe.parameters(), hidden_matrices(pipe))
    data = torch.randn(6, 5, 3, dtype=torch.float64), torch.randn(6, 5, 2, dtype=torch.float64)
    for x, y in zip(*data, strict=True):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    weights = list(whole.parameters())
    muon = [p for p, q in zip(weights, pipe.parameters(), strict=True) if q in hidden_matrices(pipe)]
    reference = make_optimizer(replace(config, predict=0), weights, muon)
    before = [p.detach().clone() for p in weights]
    due: list[tuple[Tensor, ...]] = []
    names = [name for name, _ in whole.named_parameters()]
    for x, y in zip(*data, strict=True):
        now = [p.detach().clone() for p in weights]
        ahead = [(p + 2 * (p - old)).requires_grad_() for p, old in zip(now, before, strict=True)]
        output = torch.func.functional_call(whole, dict(zip(names, ahead, strict=True)), (x,))
        due.append(torch.autograd.grad(nn.functional.mse_loss(output, y), ahead))
        before = now
        if len(due) > 2:
            for p, gradient in zip(weights, due.pop(0), strict=True):
                p.grad = gradient
            reference.step()
    with actual_weights(optimizer):
        for found, wanted in zip(pipe.parameters(), weights, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_recipe_tests_actual_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between updates, where the weights are predictions; after the last update they are actual ones."""
    small = replace(recipe("digits"), max_steps=6, batch_size=16, eval_every=0.03, strategy="end-to-end-delay-2")
    trainer = Trainer(replace(small, optimizer=Adam(predict=2, muon_lr=0.02)))
    untouched, tests = getattr(trainer_module, "evaluate"), []  # noqa: B009 - it is imported there

    def evaluate(*arguments: Any, **options: Any) -> Any:
        w = next(trainer.pipe.parameters())
        tests.append(torch.equal(w, trainer._phase.optimizer.state[w].get("actual", w)))
        return untouched(*arguments, **options)

    monkeypatch.setattr(trainer_module, "evaluate", evaluate)
    ahead = []

    class Watch(Callback):
        def stepped(self, step: int, losses: Tensor) -> None:
            w = next(trainer.pipe.parameters())
            ahead.append(not torch.equal(w, trainer._phase.optimizer.state[w].get("actual", w)))

    trainer.train(callbacks=(Watch(),))
    assert tests == [True] * 3
    assert ahead == [False, False, True, True, True, True]
    w = next(trainer.pipe.parameters())
    assert "actual" not in trainer._phase.optimizer.state[w], "settled"
    assert isinstance(trainer._phase.optimizer, MuonWithAdam)
    assert not trainer.pipe.drain(), "the last gradients have been used"
