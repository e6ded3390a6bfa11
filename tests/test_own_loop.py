"""What a user's own loop needs: losses and scores of every stage, and groups of parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from launch import results
from ranks import frozen
from ranks.common import batches


def pipeline(strategy: str = "2-wise", **options: Any) -> nwise.Pipeline:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4), nn.Linear(4, 3)]
    return nwise.Pipeline(stages, [nn.Linear(4, 3), nn.Linear(4, 3)], strategy=strategy, checks="never", **options)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    assert not output.requires_grad
    return (output.argmax(1) == target).float().mean()


def test_gathered_losses_are_those_of_the_step() -> None:
    pipe = pipeline()
    losses = pipe.step(torch.randn(6, 4), target=torch.arange(6) % 3)
    found = pipe.gather(losses)
    assert found.dtype == torch.float64
    assert found.isnan().tolist() == [True, False, False], "no stage learns from the first loss"
    assert torch.equal(found.nan_to_num().float(), losses.nan_to_num())
    assert pipe.here == [0, 1, 2]
    assert pipe.gather({2: 0.5, 0: 1}).nan_to_num(-1).tolist() == [1, -1, 0.5]


def test_a_loss_that_is_nan_although_its_head_ran_is_warned_of() -> None:
    pipe = pipeline()
    losses = pipe.step(torch.full((6, 4), math.inf), target=torch.arange(6) % 3)
    with pytest.warns(
        UserWarning, match="loss of stage [12] should be a number.* Found nan: training has diverged"
    ) as told:
        pipe.gather(losses)
    assert len(told) == 2


@pytest.mark.parametrize("strategy", ["2-wise", "2-wise-mean", "end-to-end"])
def test_scores_are_means_over_all_samples_in_evaluation_mode(strategy: str) -> None:
    pipe = pipeline(strategy)
    batches = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (5, 2)]
    found = pipe.score(batches, accuracy)
    assert pipe.training
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    pipe.eval()
    with torch.no_grad():
        expected = [float(accuracy(output, y)) for output in pipe.head_outputs(x)]  # type: ignore[arg-type]
    trained = pipe.needed_heads() | {2}
    assert found.isnan().tolist() == [k not in trained for k in range(3)]
    assert [round(expected[k], 6) for k in sorted(trained)] == [round(float(found[k]), 6) for k in sorted(trained)]


def test_scores_of_inputs_by_name_and_by_position() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    pipe = nwise.Pipeline([Sum(), nn.Linear(4, 3)], None, strategy="end-to-end")
    a, b, y = torch.randn(5, 4), torch.randn(5, 4), torch.arange(5) % 3
    by_name, by_place = (pipe.score([(inputs, y)], accuracy) for inputs in ({"a": a, "b": b}, (a, b)))
    assert torch.equal(by_name[1:], by_place[1:])


def test_bad_values_and_batches_are_refused() -> None:
    pipe = pipeline()
    with pytest.raises(ValueError, match=r"a number for each of the 3 stages.* Found shape \[2\]"):
        pipe.gather(torch.zeros(2))
    with pytest.raises(ValueError, match="`batches` should have at least one batch.* Found none"):
        pipe.score([], accuracy)
    with pytest.raises(ValueError, match="should have no `params`, which are the pipeline's. Found some"):
        pipe.groups(network={"params": []})


def test_groups_part_the_parameters() -> None:
    pipe = pipeline()
    vectors = lambda name, p: p.dim() < 2 or name.startswith("1.")  # noqa: E731
    groups = pipe.groups(network={"lr": 0.1}, heads={"lr": 0.2, "weight_decay": 0.3}, no_decay=vectors)
    assert [len(group["params"]) for group in groups] == [2, 4, 1, 3]
    assert [group.get("weight_decay") for group in groups] == [None, 0.0, 0.3, 0.0]
    assert {p for group in groups for p in group["params"]} == set(pipe.parameters())
    assert [len(group["params"]) for group in pipe.groups(heads={})] == [4]
    pipe.discard_heads() if not pipe.needed_heads() else pipe.heads.clear()
    torch.optim.AdamW(pipe.groups(heads={"lr": 0.1}))  # of no parameters, as on a rank without heads


def test_a_parameter_that_a_head_shares_is_in_one_group() -> None:
    output = nn.Linear(4, 3)
    pipe = nwise.Pipeline([nn.Linear(4, 4), output], [output])
    groups = pipe.groups(network={}, heads={})
    assert [len(group["params"]) for group in groups] == [4, 0]
    torch.optim.SGD(groups, lr=0.1)
    alone = [pipe.groups(network={}), pipe.groups(heads={})]
    assert [len(group["params"]) for groups in alone for group in groups] == [4, 0], "of two optimizers one has it"


def plainly(name: str) -> dict[str, Tensor]:
    """End-to-end gradients of a frozen network by plain autograd, in evaluation mode."""
    stages, heads = frozen.network()
    frozen.CASES[name](stages, heads)
    x, y = batches(1)[0]
    loss = nn.functional.cross_entropy(nn.Sequential(*stages).eval()(x), y)
    loss.backward()
    return {n: p.grad for n, p in nn.ModuleList(stages).named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", frozen.CASES)
def test_frozen_parts_learn_nothing_and_pass_gradients_on(name: str) -> None:
    stages, heads = frozen.network()
    frozen.CASES[name](stages, heads)
    pipe = nwise.Pipeline(stages, heads, strategy="end-to-end", num_microbatches=2).eval()
    x, y = batches(1)[0]
    pipe.step(x, target=y)
    found = {n: p.grad for n, p in pipe.stages.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, plainly(name))
    assert found
    torch.optim.Adam(pipe.parameters())  # also of a network with frozen parameters


def test_frozen_parts_on_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """Adapters in two of four stages, heads on a frozen trunk, and a stage without parameters, bit for bit."""
    ranks = results(2, "frozen.py", tmp_path)
    for name in frozen.CASES:
        for strategy in frozen.STRATEGIES:
            together = {n: bits for rank in ranks for n, bits in rank[f"{name} {strategy}"].items()}
            assert together == frozen.trained(name, strategy), (name, strategy)
