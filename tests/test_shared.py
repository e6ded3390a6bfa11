"""Heads that share their parameters with the output, and with the first stage: the gradient is the sum over all uses."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise.program.arguments import Sharing
from nwise.runtime.modules import RemoteModule
from nwise.training.clip import Clip, ClipBy

A, VOCABULARY = 3, 7


class Output(nn.Module):
    """Logits by a matrix that may be the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ self.weight.t()


def network(tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), *(nn.Linear(4, 4) for _ in range(A)), Output()).double()
    if tied:
        model[-1].weight = model[0].weight
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", ["local", "2-wise-mean", "3-wise", "deep-supervision", "end-to-end"])
def test_gradient_of_a_shared_head_is_the_sum_over_its_uses(strategy: str, tied: bool) -> None:
    model = network(tied)
    rule = "sum" if tied else "refuse"
    stages = nwise.split(model, at=["2", "3"], example=torch.zeros(1, 2, dtype=torch.int64), tied=rule)
    pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), nn.functional.cross_entropy, strategy, 2, tied=rule)
    apart = copy.deepcopy(model)
    if tied:
        nwise.untie(apart)
    own_stages = nwise.split(apart, at=["2", "3"], example=torch.zeros(1, 2, dtype=torch.int64))
    own = nwise.Pipeline(own_stages, nwise.heads.copied(own_stages), nn.functional.cross_entropy, strategy, 2)
    x = torch.randint(0, VOCABULARY, (6,))
    losses = [p.step(x, target=(x + 1) % VOCABULARY) for p in (pipe, own)]
    assert torch.equal(losses[0].nan_to_num(), losses[1].nan_to_num())

    places = [apart[-1], *(own.heads[k] for k in range(A - 1)), *([apart[0]] if tied else [])]
    gradients = [p.grad for place in places for p in place.parameters() if p.grad is not None]
    expected = torch.stack(gradients).sum(0)
    torch.testing.assert_close(model[-1].weight.grad, expected, rtol=1e-12, atol=1e-12)
    for k in (1, 2, 3):
        torch.testing.assert_close(model[k].weight.grad, apart[k].weight.grad, rtol=1e-12, atol=1e-12)


def test_an_optimizer_updates_a_shared_head_once() -> None:
    stages = nwise.split(network(False), at=["2", "3"], example=torch.zeros(1, 2, dtype=torch.int64))
    pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), nn.functional.cross_entropy, "local")
    assert len(list(pipe.parameters())) == 1 + 2 * A + 1
    torch.optim.SGD(pipe.parameters(), lr=0.1)  # warns of a parameter that it has twice


@pytest.mark.parametrize("by", ["global", "stage", "loss"])
def test_clipping_counts_and_scales_a_shared_parameter_once(by: ClipBy) -> None:
    """It was scaled once for every place: the norm after clipping was 0.03 instead of 0.1."""
    stages = nwise.split(network(False), at=["2", "3"], example=torch.zeros(1, 2, dtype=torch.int64))
    pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), nn.functional.cross_entropy, "deep-supervision")
    x = torch.randint(0, VOCABULARY, (6,))
    pipe.step(x, target=(x + 1) % VOCABULARY)
    Clip(pipe, 1e-3, by)()
    [shared] = pipe.heads[0].parameters()  # it belongs to the group of the first head
    group = {"global": list(pipe.parameters()), "stage": [*pipe.stages[0].parameters(), shared], "loss": [shared]}[by]
    norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_sharing_that_would_be_ambiguous_is_refused() -> None:
    model = network(tied=True)
    example = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="belong to one stage. Found that '4.weight' of stage 2 is '0.weight' of stage 0"
    ):
        nwise.split(model, at=["2", "3"], example=example)
    stages = nwise.split(model, at=["2", "3"], example=example, tied="sum")
    with pytest.raises(ValueError, match=r"Found stages.0.0.weight again as stages.2.4.weight.*or pass `tied='sum'`"):
        nwise.Pipeline(stages, nwise.heads.shared(stages))
    with pytest.raises(ValueError, match="`tied` should be 'refuse' or 'sum'. Found 'yes'"):
        nwise.Pipeline(stages, nwise.heads.shared(stages), tied="yes")
    heads = [*nwise.heads.shared(stages), None]
    with pytest.raises(ValueError, match="one stage or head in several processes. Found stages.0.0.weight again"):
        Sharing(stages, heads, "sum", several=True).check(stages, heads)
    middle = [nn.Linear(3, 3) for _ in range(A)]
    with pytest.raises(ValueError, match="Found stages.1.weight again as heads.0.weight"):
        nwise.Pipeline(middle, [middle[1], nn.Linear(3, 3)], tied="sum")
    pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), nn.functional.cross_entropy, "2-wise-delay-1", tied="sum")
    for _ in range(2):  # the second step used to train
        with pytest.raises(ValueError, match="under a delay. Found stages.0.0.weight again as .*; use separate heads"):
            pipe.step(torch.zeros(4, dtype=torch.int64), target=torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("strategy", ["2-wise", "2-wise-delay-1"])
def test_weights_tied_later_are_refused(strategy: str) -> None:
    """Regression: a weight tied after `Pipeline`, as by `model.tie_weights()`, trained with the sum of two credits."""
    stages = [nn.Linear(3, 3) for _ in range(3)]
    pipe = nwise.Pipeline(stages, [nn.Linear(3, 3) for _ in range(2)], nn.functional.mse_loss, strategy)
    x = torch.randn(4, 3)
    pipe.step(x, target=x)
    stages[0].weight = stages[1].weight
    for _ in range(2):
        with pytest.raises(ValueError, match="belong to one stage.* Found stages.0.weight again as stages.1.weight"):
            pipe.step(x, target=x)
    stages[0].weight = nn.Parameter(torch.zeros(3, 3))
    pipe.forget_pending()
    pipe.step(x, target=x)
    pipe.heads[1].weight = stages[2].weight
    if strategy == "2-wise":
        pipe.step(x, target=x)  # as at the beginning, heads and the output may share
    else:
        with pytest.raises(ValueError, match="under a delay. Found stages.2.weight again as heads.1.weight"):
            pipe.step(x, target=x)


def test_weights_tied_later_to_a_stage_of_another_process_are_refused() -> None:
    """Regression: each process trained its own copy of the weight, without a word."""
    here, there = nn.Linear(3, 3), nn.Linear(3, 3)
    sharing, present = Sharing([there, here], [], "refuse", several=True), [RemoteModule("stage 0", 0), here]
    assert sharing.check(present, []) is None
    here.weight = there.weight
    with pytest.raises(ValueError, match="in several processes. Found stages.0.weight again as stages.1.weight"):
        sharing.check(present, [])
    assert copy.deepcopy(sharing).check(present, []) is None, "a copy does not hold the stages of other processes"


def test_generation_with_an_early_exit_gives_the_same_tokens(tmp_path: Path) -> None:
    """Two seconds, because transformers has to be imported, and a network has to learn to count."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    stages = nwise.split(model, at=[f"model.layers.{k}" for k in (1, 2, 3)], tied="sum")
    loss = nwise.losses.TokenCrossEntropy()
    pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), loss, "deep-supervision", tied="sum")
    update = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    tokens = torch.arange(24).repeat(4, 1) % 5
    for _ in range(60):
        pipe.step(tokens[:, :-1], target=tokens[:, 1:])
        update.step()
        update.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    asked = {"inputs": tokens[:1, :6], "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = loaded.generate(**asked)
    calls = []
    loaded.model.layers[3].register_forward_hook(lambda *_: calls.append(1))
    early = loaded.generate(**asked, assistant_early_exit=2)
    assert torch.equal(plain, early)
    assert plain[0, 6:].tolist() == [(6 + i) % 5 for i in range(12)], "the network has learned to count"
    assert len(calls) < 12, "several tokens are accepted at once"
