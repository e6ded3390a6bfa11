"""The zoo of local rules: gradients against loops as their papers write them, several processes, and accuracy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from launch import results
from ranks import rules as ranks
from test_contract import assert_same, gradients

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import rules

pytestmark = pytest.mark.usefixtures("float64")

X = torch.randn(6, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([3, 1, 4, 1, 5, 9])


def greedy(rule: rules.Rule, loss: Callable[[Tensor, int], Tensor]) -> None:
    """Module by module: forward, loss of its head, backward; then the next, on detached features."""
    x = X
    for k, stage in enumerate(rule.pipe.stages):
        x = stage(x.detach())
        output = x
        if k < rules.A - 1:
            head: nn.Module = rule.pipe.heads[k]
            output = head(x)
            x = x.detach()
        loss(output, k).backward()


def cross_entropy(output: Tensor, _: int) -> Tensor:
    """The loss of DGL, AugLocal, MAN and Mono-Forward."""
    return functional.cross_entropy(output, Y)


def predsim(outputs: Tensor, _: int) -> Tensor:
    """Cosines of all pairs of samples, one after the other."""
    logits, features = outputs
    onehot = torch.eye(10)[Y]

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        a, b = a - a.mean(), b - b.mean()
        return (a @ b) / (a.norm() * b.norm())

    pairs = [(i, j) for i in range(6) for j in range(6)]
    errors = [(cosine(features[i], features[j]) - cosine(onehot[i], onehot[j])) ** 2 for i, j in pairs]
    return 0.1 * functional.cross_entropy(logits, Y) + 0.9 * torch.stack(errors).mean()


def infopro(outputs: Tensor, k: int) -> Tensor:
    """The last module has the classifier alone."""
    if k == rules.A - 1:
        return functional.cross_entropy(outputs, Y)
    logits, image = outputs
    return functional.cross_entropy(logits, Y) + 0.3 * ((image - X) ** 2).mean()


def lopt(rule: rules.Rule) -> None:
    """Two halves with a detached boundary."""
    a, b, c, d = rule.pipe.stages
    middle = b.get_submodule("body")(a.get_submodule("body")(X))
    ((rule.pipe.heads[1].get_submodule("decode")(middle) - X) ** 2).mean().backward()
    functional.cross_entropy(d(c.get_submodule("body")(middle.detach())), Y).backward()


def backlink(rule: rules.Rule) -> None:
    """Blocks of two stages; the loss of the second also goes back through the last stage of the first."""
    a, b, c, d = rule.pipe.stages
    first = a(X)
    functional.cross_entropy(rule.pipe.heads[1](b(first)), Y).backward()
    functional.cross_entropy(d(c(b(first.detach()))), Y).backward()


def forward_forward(rule: rules.Rule) -> None:
    """Layer by layer: one forward of right labels, one of wrong ones, and the update of each layer by its own goodness."""
    wrong = torch.tensor([(y + 1 + i) % 10 for i, y in enumerate(Y.tolist())])
    for k, stage in enumerate(rule.pipe.stages):
        loss = torch.zeros(())
        for labels, sign in ((Y, 1), (wrong, -1)):
            x = torch.cat([X.flatten(1), 3 * torch.eye(10)[labels]], 1)
            for before in list(rule.pipe.stages)[:k]:
                x = before(x).detach()
            good = (stage(x) ** 2).mean(1)
            loss = loss + torch.log(1 + torch.exp(sign * (0.5 - good))).sum() / 12
        loss.backward()


def contrastive(rule: rules.Rule) -> None:
    """Pair by pair: the two views of an image, and all other views of its half of the mini-batch."""
    for images, labels in ((X[:3], Y[:3]), (X[3:], Y[3:])):
        x = rules.views(images)
        for k, stage in enumerate(rule.pipe.stages):
            x = stage(x.detach())
            outputs = x
            if k < rules.A - 1:
                outputs = rule.pipe.heads[k](x)
            logits, features = outputs
            codes = [code / code.norm() for code in features]
            for i in range(6):
                alike = torch.stack([(codes[i] @ codes[j] / 0.2).exp() for j in range(6) if j != i])
                pair = (codes[i] @ codes[(i + 3) % 6] / 0.2).exp()
                (-(pair / alike.sum()).log() / 12).backward(retain_graph=True)
            (functional.cross_entropy(logits, labels.repeat(2)) / 2).backward()


SLOW: dict[str, Callable[[rules.Rule], None]] = {
    "dgl": lambda rule: greedy(rule, cross_entropy),
    "predsim": lambda rule: greedy(rule, predsim),
    "infopro": lambda rule: greedy(rule, infopro),
    "auglocal": lambda rule: greedy(rule, cross_entropy),
    "man": lambda rule: greedy(rule, cross_entropy),
    "mono-forward": lambda rule: greedy(rule, cross_entropy),
    "lopt": lopt,
    "backlink": backlink,
    "forward-forward": forward_forward,
    "contrastive": contrastive,
}


@pytest.mark.parametrize("name", rules.RULES)
def test_gradients_are_those_of_the_papers_loop(name: str) -> None:
    torch.manual_seed(0)
    rule = rules.RULES[name]()
    rule.step(rule.pipe, X, Y)
    fast = {key: None if p.grad is None else p.grad.clone() for key, p in rule.pipe.named_parameters()}
    rule.pipe.zero_grad()
    SLOW[name](rule)
    for key, p in rule.pipe.named_parameters():
        gradient = fast[key]
        if p.grad is None:
            assert gradient is None, key
        else:
            assert gradient is not None, key
            torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-12, msg=key)


def test_predsim_gradients_match_reference() -> None:
    """Similarities are between samples of one micro-batch, so the reference is cut into the same."""
    pipe = rules.predsim().pipe
    pipe.num_microbatches = 2
    pipe.strategy = nwise.NWise(2)
    arguments = list(pipe.stages), list(pipe.heads.values()), rules.predsim_loss, X, Y, pipe.credit, 2
    expected = nwise.reference_grads(*arguments)
    with pytest.warns(UserWarning, match="the loss: loss 1"):
        pipe.step(X, target=Y)
    assert_same(gradients(pipe), expected, 1e-12)


def test_auglocal_chooses_layers_uniformly() -> None:
    """Of three layers to come the first head has the second and the third, that is block 2 of 0 + 3/2 and block 3."""
    heads = rules.auglocal().pipe.heads
    assert [len(list(heads[k].children())) - 1 for k in range(3)] == [2, 2, 1]


def test_momentum_heads_follow_the_next_block() -> None:
    """An average moves a hundredth of the way; it learns nothing by itself."""
    rule = rules.man(momentum=0.99)
    average = rule.pipe.heads[0].get_submodule("average").get_parameter("0.weight")
    following = rule.pipe.stages[1].get_parameter("0.weight")
    with torch.no_grad():
        following.add_(1)
    before = average.clone()
    rule.pipe.step(X, target=Y)
    assert average.grad is None
    rule.after_update()
    torch.testing.assert_close(average - before, torch.full_like(before, 0.01))


@pytest.mark.parametrize(
    "num_ranks", [2, pytest.param(4, marks=pytest.mark.slow("ten rules on four processes, minutes"))]
)
def test_rules_on_processes_match_one_bitwise(num_ranks: int, tmp_path: Path) -> None:
    """Two processes in every gate: ten pipelines, each of which connects all ranks."""
    torch.set_default_dtype(torch.float32)
    found = results(num_ranks, "rules.py", tmp_path)
    for name in rules.RULES:
        together = {key: digest for rank in found for key, digest in rank[name].items()}
        assert together == ranks.case(name), name


def test_rules_learn() -> None:
    torch.set_default_dtype(torch.float32)
    assert rules.train("predsim", steps=50) > 0.8
    assert rules.train("forward-forward", steps=100) > 0.5
