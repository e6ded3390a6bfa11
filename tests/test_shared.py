"""Heads that share their parameters with the output: the gradient is the sum over all uses."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nwise
from cutting import tiny
from nwise.program.arguments import Sharing
from nwise.runtime.modules import RemoteModule
from nwise.training.clip import Clip, ClipBy

A, VOCABULARY = 3, 7


class Output(nn.Module):
    """Logits by a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ self.weight.t()


def pipeline(strategy: str, *, shared: bool = True, m: int = 1) -> nwise.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), *(nn.Linear(4, 4) for _ in range(A)), Output()).double()
    stages = nwise.split(model, at=["2", "3"], example=torch.zeros(1, 2, dtype=torch.int64))
    heads = (nwise.heads.shared if shared else nwise.heads.copied)(stages)
    return nwise.Pipeline(stages, heads, nn.functional.cross_entropy, strategy, m)


def step(pipe: nwise.Pipeline) -> Tensor:
    x = torch.arange(6) % VOCABULARY
    return pipe.step(x, target=(x + 1) % VOCABULARY).nan_to_num()


@pytest.mark.parametrize("strategy", ["local", "2-wise-mean", "3-wise", "deep-supervision", "end-to-end"])
def test_gradient_of_a_shared_head_is_the_sum_over_its_uses(strategy: str) -> None:
    pipe, own = (pipeline(strategy, shared=shared, m=2) for shared in (True, False))
    torch.testing.assert_close(step(pipe), step(own))
    found, gradients = ({name: p.grad for name, p in one.named_parameters()} for one in (pipe, own))
    assert len(found) == 1 + 2 * A + 1, "an optimizer gets it once"
    uses = [gradients.pop(name) for name in [*gradients] if name.endswith(".4.weight")]
    torch.testing.assert_close(
        found.pop("stages.2.4.weight"), sum(g for g in uses if g is not None), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by", ["global", "stage", "loss"])
def test_clipping_counts_and_scales_a_shared_parameter_once(by: ClipBy) -> None:
    """It was scaled once for every place: the norm after clipping was 0.03 instead of 0.1."""
    pipe = pipeline("deep-supervision")
    step(pipe)
    Clip(pipe, 1e-3, by)()
    [shared] = pipe.heads[0].parameters()  # it belongs to the group of the first head
    group = {"global": list(pipe.parameters()), "stage": [*pipe.stages[0].parameters(), shared], "loss": [shared]}[by]
    norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("strategy", ["2-wise", "2-wise-delay-1"])
def test_weights_tied_at_first_or_later_are_refused(strategy: str) -> None:
    """Regression: a weight tied after `Pipeline`, as by `model.tie_weights()`, trained with the sum of two credits."""
    stages, heads = ([nn.Linear(3, 3) for _ in range(size)] for size in (3, 2))
    with pytest.raises(ValueError, match="Found stages.1.weight again as heads.0.weight"):
        nwise.Pipeline(stages, [stages[1], heads[1]])
    pipe, x = nwise.Pipeline(stages, heads, nn.functional.mse_loss, strategy), torch.randn(4, 3)
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
        for _ in range(2):  # the second step used to train
            with pytest.raises(ValueError, match="under a delay. Found stages.2.weight again as heads.1.weight"):
                pipe.step(x, target=x)


def test_weights_tied_to_a_stage_of_another_process_are_refused() -> None:
    """Regression: each process trained its own copy of the weight, without a word."""
    here, there = nn.Linear(3, 3), nn.Linear(3, 3)
    sharing, present = Sharing([there, here], [], several=True), [RemoteModule("stage 0", 0), here]
    assert sharing.check(present, []) is None
    with pytest.raises(ValueError, match="one stage or head in several processes. Found stages.1.weight again"):
        sharing.check(present, [here])
    here.weight = there.weight
    with pytest.raises(ValueError, match="in several processes. Found stages.0.weight again as stages.1.weight"):
        sharing.check(present, [])
    assert copy.deepcopy(sharing).check(present, []) is None, "a copy does not hold the stages of other processes"


def test_generation_with_an_early_exit_gives_the_same_tokens(tmp_path: Path) -> None:
    """Two seconds, because transformers has to be imported, and a network has to learn to count."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = tiny("LlamaForCausalLM", num_hidden_layers=4, max_position_embeddings=32, eos_token_id=None)
    stages = nwise.split(model, at=4, example=torch.zeros(2, 6, dtype=torch.long))
    loss = nwise.losses.TokenCrossEntropy()
    pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), loss, "deep-supervision")
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
