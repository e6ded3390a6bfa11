"""Cross-entropy in slices of tokens: exact, with its gradients, and never all logits at once."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import nwise
from nwise._torch import TorchDispatchMode
from nwise.app.data import Bytes, Tokens
from nwise.app.training import evaluate
from nwise.losses import TokenCrossEntropy
from nwise.network.layers import Embedding, TransformerBlock, Vocabulary
from nwise.strategies import strategy as parse

BATCH, LENGTH, WIDTH, WORDS = 4, 5, 6, 11


pytestmark = pytest.mark.usefixtures("float64")


def example() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden tokens, a vocabulary matrix, and the target."""
    hidden, weight = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(WORDS, WIDTH)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, WORDS, (BATCH, LENGTH))


@pytest.mark.parametrize("at_once", [1, 3 * WORDS, BATCH * LENGTH * WORDS, 10**6])
@pytest.mark.parametrize(("ignored", "smoothing"), [(0, 0.0), (3, 0.0), (3, 0.1), (BATCH * LENGTH, 0.0)])
@pytest.mark.parametrize("learns", [(0, 1), (0,), (1,)])
def test_a_sliced_loss_is_that_of_all_logits(
    at_once: int, ignored: int, smoothing: float, learns: tuple[int, ...]
) -> None:
    """Loss and gradients, also of one factor; where no token counts, torch's loss is nan and its gradients are zero."""
    *factors, target = example()
    target.view(-1)[:ignored] = -100
    for i, factor in enumerate(factors):
        factor.requires_grad_(i in learns)
    plain, sliced = TokenCrossEntropy(label_smoothing=smoothing), TokenCrossEntropy(-100, smoothing, at_once)
    wanted, found = plain(factors[0] @ factors[1].T, target), sliced(tuple(factors), target)
    gradients = [
        [loss.detach(), *torch.autograd.grad(3 * loss, [factors[i] for i in learns])] for loss in (wanted, found)
    ]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12, equal_nan=True)
    with torch.no_grad():
        torch.testing.assert_close(sliced(tuple(factors), target), wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


class _Largest(TorchDispatchMode):
    """Sees the size of the largest result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in (made,) if isinstance(x, Tensor))])
        return made


def test_all_logits_are_never_there_at_once() -> None:
    hidden, weight, target = example()
    with _Largest() as seen:  # type: ignore[no-untyped-call]  # torch's own lacks types
        TokenCrossEntropy(at_once=3 * WORDS)((hidden, weight), target).backward()
    assert seen.numel == max(hidden.numel(), weight.numel()) < BATCH * LENGTH * WORDS


def test_logits_are_bf16_under_autocast() -> None:
    """The matrix product of both, and the loss in float32, as autocast does it with whole logits."""
    hidden, weight, target = (x.float().detach() if x.is_floating_point() else x for x in example())
    with torch.autocast("cpu", torch.bfloat16):
        whole = TokenCrossEntropy()(nn.functional.linear(hidden, weight), target)
        assert TokenCrossEntropy(at_once=40)((hidden, weight), target).item() == pytest.approx(whole.item(), rel=1e-6)


def network(at_once: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """Three stages of a language model and their heads, whose output is factors above so many logits."""
    torch.manual_seed(1)
    first = nn.Sequential(Embedding(WORDS, LENGTH, WIDTH), TransformerBlock(WIDTH, 2))
    ends: list[nn.Module] = [
        nn.Sequential(TransformerBlock(WIDTH, 2), Vocabulary(WIDTH, WORDS, at_once)) for _ in range(3)
    ]
    return [first, TransformerBlock(WIDTH, 2), ends[0]], ends[1:]


@pytest.mark.parametrize("strategy", ["end-to-end", "1-wise", "2-wise", "2-wise-mean", "deep-supervision"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pipeline_of_factors_has_the_gradients_of_logits(strategy: str, recompute: bool) -> None:
    """Both micro-batches give factors, since 2 * 5 * 11 logits are more than 40."""
    x, y = torch.randint(0, WORDS, (2, BATCH, LENGTH))
    gradients = []
    for at_once in (10**6, 40):
        stages, heads = network(at_once)
        assert isinstance(stages[2](torch.randn(2, LENGTH, WIDTH)), tuple) == (at_once == 40)
        pipe = nwise.Pipeline(stages, heads, TokenCrossEntropy(at_once=40), strategy, 2, recompute=recompute)
        losses = pipe.step(x, target=y)
        gradients.append([losses[-1], *(p.grad for p in pipe.parameters())])
        assert pipe(x[:1, :3]).shape == (1, 3, WORDS), "few logits are returned as such"
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_scores_in_slices_are_those_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head and ensemble, with a few tokens at once."""
    data = Tokens(torch.randint(0, WORDS, (7 * LENGTH + 1,)), LENGTH, Bytes())
    scores = []
    for at_once in (10**6, 40):
        monkeypatch.setattr("nwise.app.training.evaluation.AT_ONCE", at_once)
        pipe = nwise.Pipeline(*network(at_once), TokenCrossEntropy(), parse("2-wise", heads="all"))
        scores.append(evaluate(pipe, data, BATCH, ensembles=True))
    for part in ("heads", "ensembles"):
        plain, sliced = ([(s.loss, s.accuracy) for s in getattr(one, part)] for one in scores)
        assert len(plain) == 3
        assert torch.tensor(sliced).allclose(torch.tensor(plain), rtol=1e-6)


@pytest.mark.parametrize("ignored", [0, 1, 3])
@pytest.mark.parametrize("factors", [False, True])
def test_a_fraction_of_the_tokens_is_unbiased(monkeypatch: pytest.MonkeyPatch, ignored: int, factors: bool) -> None:
    """Half of five tokens is three. Over all 120 orders of the keys, loss and gradients average to those of all tokens.

    Of three that count all are drawn, and of two both with an ignored one.
    """
    hidden, weight, target = example()
    hidden, target = hidden[:1].detach().requires_grad_(), target[:1]
    target.view(-1)[:ignored] = -100

    def gradients(loss: TokenCrossEntropy) -> tuple[Tensor, ...]:
        value = loss((hidden, weight) if factors else hidden @ weight.T, target)
        return (value.detach(), *torch.autograd.grad(value, (hidden, weight)))

    some, means, different = TokenCrossEntropy(fraction=0.5), [], set()
    for order in permutations(range(LENGTH)):
        keys = torch.tensor(order) / LENGTH
        monkeypatch.setattr(torch, "rand", lambda *_, keys=keys, **__: keys.clone())
        means.append(gradients(some))
        different.add(round(means[-1][0].item(), 9))
    assert len(different) == {0: 10, 1: 4, 3: 1}[ignored], "so many threes of those that count"
    for found, wanted in zip(zip(*means, strict=True), gradients(TokenCrossEntropy()), strict=True):
        torch.testing.assert_close(torch.stack(found).mean(0), wanted, rtol=1e-12, atol=1e-12)
    assert isinstance(Vocabulary(WIDTH, WORDS, at_once=0).eval()(hidden), Tensor), "as exits need them"
    whole = gradients(some.eval())
    torch.testing.assert_close(whole, gradients(TokenCrossEntropy()), rtol=1e-12, atol=1e-12)


def test_a_fraction_of_the_tokens_multiplies_so_much_less() -> None:
    """The three products of a vocabulary matrix are those of a quarter of the tokens."""
    hidden, _, target = example()
    counts = []
    for fraction in (1.0, 0.25):
        with FlopCounterMode(display=False) as counter:
            TokenCrossEntropy(fraction=fraction)(Vocabulary(WIDTH, WORDS, at_once=0)(hidden), target).backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * tokens * WIDTH * WORDS for tokens in (BATCH * LENGTH, BATCH * LENGTH // 4)]


class Noted(TokenCrossEntropy):
    """Keeps which tokens it has drawn."""

    def _draw(self, labels: Tensor) -> Tensor:
        self.drawn = super()._draw(labels)
        return self.drawn


def test_a_pipeline_has_the_gradients_of_the_tokens_drawn() -> None:
    """By the definition, with all other tokens ignored; each head draws its own, which depend on the seed and the step."""
    x, y = torch.randint(0, WORDS, (2, BATCH, LENGTH))
    losses = [Noted(fraction=0.3) for _ in range(3)]
    pipe = nwise.Pipeline(*network(at_once=0), losses, "2-wise-mean", seed=5)
    first = pipe.step(x, target=y).clone()
    assert len({tuple(loss.drawn.sort().values.tolist()) for loss in losses}) == 3

    def of_drawn(loss: Noted) -> Any:
        ignored = torch.ones(BATCH * LENGTH, dtype=torch.bool).index_fill(0, loss.drawn, 0).view(BATCH, LENGTH)
        return lambda output, target: TokenCrossEntropy()(output, target.masked_fill(ignored, -100))

    credit = torch.tensor([[0.5, 0, 0], [0.5, 0.5, 0], [0, 0.5, 1]])
    wanted = nwise.reference_grads(*network(at_once=0), list(map(of_drawn, losses)), x, y, credit)
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-12, atol=1e-12)
    again = nwise.Pipeline(*network(at_once=0), TokenCrossEntropy(fraction=0.3), "2-wise-mean", seed=5)
    assert torch.equal(again.step(x, target=y), first)
    assert not torch.equal(again.step(x, target=y), first)


def test_a_matrix_of_low_rank_is_a_product() -> None:
    """Shared between the heads, in one process, the larger factor gets the sum of the heads' gradients."""
    head = Vocabulary(WIDTH, WORDS, rank=2)
    norm, narrow, wide = head
    x = torch.randn(2, LENGTH, WIDTH)
    product = torch.mm(*(p for layer in (wide, narrow) for p in layer.parameters()))
    torch.testing.assert_close(head(x), norm(x) @ product.T, rtol=1e-12, atol=1e-12)
    head.at_once = 0
    hidden, weight = head(x)
    assert (hidden.shape, weight.shape) == ((2, LENGTH, 2), (WORDS, 2))

    stages, _ = network(10**6)
    heads = [Vocabulary(WIDTH, WORDS, rank=2) for _ in range(2)]
    heads[1][-1] = heads[0][-1]
    x, y = torch.randint(0, WORDS, (2, BATCH, LENGTH))
    credit = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    # In the definition, which copies the heads, each has its own factor.
    apart = nwise.reference_grads(stages, copy.deepcopy(heads), TokenCrossEntropy(), x, y, credit)
    pipe = nwise.Pipeline(stages, heads, TokenCrossEntropy(), "local")
    pipe.step(x, target=y)
    torch.testing.assert_close(heads[0][-1].weight.grad, apart["heads.0.2.weight"] + apart["heads.1.2.weight"])
    torch.testing.assert_close(heads[1][1].weight.grad, apart["heads.1.1.weight"])


@pytest.mark.parametrize("fraction", [0.0, 1.01, float("nan")])
def test_bad_fractions_and_ranks_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="`fraction` should be above 0 and at most 1. Found .*quarter"):
        TokenCrossEntropy(fraction=fraction)
    for rank, message in ((0, "`rank` should be .* at least 1. Found 0"), (4, r"less than 3\.882.*Found 4")):
        with pytest.raises(ValueError, match=message):
            Vocabulary(WIDTH, WORDS, rank=rank)
