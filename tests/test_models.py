"""The paper's networks: shapes, parameter counts, initial values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise import heads
from nwise.app import models
from nwise.network.layers import Linear, SelfAttention, TransformerBlock


def count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def logits(model: models.StagedModel, x: Tensor) -> list[Tensor]:
    outputs = []
    for k, stage in enumerate(model.stages):
        x = stage(x)
        outputs.append(model.heads[k](x) if k < len(model.heads) else x)
    return outputs


@pytest.mark.parametrize("num_stages", [1, 3, 6, 10])
def test_convnet_matches_the_paper(num_stages: int) -> None:
    model = models.convnet(num_stages)
    assert len(model.stages) == num_stages
    assert len(model.heads) == num_stages - 1
    convolutions = [m for stage in model.stages for m in stage.modules() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == ([32] * (num_stages - 2) + [64, 64])[-num_stages:]
    assert all(c.kernel_size == (3, 3) and c.padding == (1, 1) and c.stride == (1, 1) for c in convolutions)
    pools = [m for stage in model.stages[-2:] for m in stage.modules() if isinstance(m, nn.MaxPool2d)]
    assert [(p.kernel_size, p.stride) for p in pools] == [(2, 1)] * min(2, num_stages)
    assert [o.shape for o in logits(model, torch.randn(2, 3, 32, 32))] == [(2, 10)] * num_stages
    assert all(len([m for m in head.modules() if isinstance(m, nn.Linear)]) == 1 for head in model.heads)


@pytest.mark.parametrize(
    ("name", "classes", "size", "parameters", "shapes"),
    [
        # 21,282,122 and 25,557,032 are the published counts of ResNet-34 with a 3x3 stem and of ResNet-50;
        # He et al. give 0.46M for their CIFAR ResNet-32.
        ("paper-32", 10, 32, 21_282_122, [(64, 32, 32), (128, 16, 16), (256, 8, 8)]),
        ("32", 10, 32, 464_154, [(16, 32, 32), (32, 16, 16)]),
        ("50", 1000, 224, 25_557_032, [(256, 56, 56), (512, 28, 28), (1024, 14, 14)]),
    ],
)
def test_resnet_parameter_counts_and_shapes(
    name: Any, classes: int, size: int, parameters: int, shapes: list[tuple[int, ...]]
) -> None:
    model = models.resnet(name, classes, size)
    assert count(*model.stages) == parameters
    x = torch.randn(2, 3, size, size)
    found = []
    with torch.no_grad():
        for k, stage in enumerate(model.stages):
            x = stage.eval()(x)
            if k < len(model.heads):
                found.append(tuple(x.shape[1:]))
                assert model.heads[k].eval()(x).shape == (2, classes)
    assert found == shapes
    assert x.shape == (2, classes)
    head = [m for m in model.heads[0].modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [tuple(m.weight.shape) for m in head] == [
        (128, shapes[0][0], 3, 3),
        (64, 128, 3, 3),
        (classes, 64),
    ]


def test_bottlenecks_have_their_stride_in_the_3x3_convolution() -> None:
    """As in the authors' code; He's table has it in the first 1x1."""
    with torch.device("meta"):
        model = models.resnet("50")
    convolutions = [m for stage in model.stages for m in stage.modules() if isinstance(m, nn.Conv2d)]
    strided = [m.kernel_size for m in convolutions if m.stride == (2, 2)]
    assert strided == [(7, 7), *[(3, 3), (1, 1)] * 3], "the stem, then the body and the shortcut of three blocks"


def test_gpt_stage_with_head_has_152_million_parameters() -> None:
    with torch.device("meta"):
        model = models.gpt()
    assert len(model.stages) == 4
    pair = count(model.stages[1], model.heads[1])
    block = 12 * 1024**2 + 13 * 1024
    assert pair == 8 * block + 2 * 1024 + 50257 * 1024 == 152_235_008
    assert round(pair / 1e6) == 152
    assert count(model.stages[0]) - count(model.stages[1]) == 50257 * 1024 + 128 * 1024
    assert count(model.stages[3]) - count(model.stages[1]) == 50257 * 1024 + 2 * 1024


def test_gpt_is_causal_and_starts_uniform() -> None:
    model = models.gpt(2, 1, 16, 2, 8, 13)
    x = torch.randint(0, 13, (2, 8))
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 13
    for before, after in zip(logits(model, x), logits(model, changed), strict=True):
        assert before.shape == (2, 8, 13)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.equal(before[:, 5:], after[:, 5:])
        loss = nn.functional.cross_entropy(before.flatten(0, 1), x.flatten())
        assert loss.item() == pytest.approx(torch.tensor(13.0).log().item(), abs=0.1)
    with pytest.raises(ValueError, match="at most `sequence_length = 8` tokens. Found 9"):
        model.stages[0](torch.zeros(1, 9, dtype=torch.long))


def test_initial_values_do_not_depend_on_the_cut() -> None:
    def state(num_stages: int) -> dict[str, Tensor]:
        stages = models.gpt(num_stages, 4 // num_stages, 8, 2, 4, 11).stages
        return {name: t for stage in stages for name, t in stage.state_dict().items()}

    one, two, four = (state(n) for n in (1, 2, 4))
    assert one.keys() == two.keys() == four.keys()
    assert all(torch.equal(one[name], two[name]) and torch.equal(one[name], four[name]) for name in one)


def test_initial_values_do_not_depend_on_the_global_generator() -> None:
    first = models.mlp(2, 12, 8).stages[0].state_dict()
    torch.manual_seed(5)
    again = models.mlp(2, 12, 8).stages[0].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_another_seed_gives_other_values() -> None:
    assert not torch.equal(
        next(models.mlp(2, seed=0).stages[0].parameters()), next(models.mlp(2, seed=1).stages[0].parameters())
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: models.convnet(0), "`num_stages` should be an integer of at least 1. Found 0"),
        (lambda: models.convnet(3, image_size=2), "`image_size` should be an integer of at least 3. Found 2"),
        (lambda: models.resnet("20"), "`name` should be one of 'paper-32', '18', '32', '50'. Found '20'"),  # type: ignore[arg-type]
        (lambda: models.resnet("32", width_factor=0), "`width_factor` should be above 0. Found 0"),
        (lambda: models.resnet("32", image_size=4), "`image_size` should be an integer of at least 8. Found 4"),
        (lambda: models.gpt(2, num_heads=3), "`width` should be a multiple of `num_heads = 3`. Found 1024"),
        (lambda: models.gpt(2, blocks_per_stage=0), "`blocks_per_stage` should be an integer of at least 1. Found 0"),
        (lambda: models.mlp(2, width=0), "`width` should be an integer of at least 1. Found 0"),
    ],
)
def test_invalid_model_sizes_raise(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_heads_fit_any_feature_map_and_any_sequence() -> None:
    for size in (1, 4, 7):
        assert heads.convolutional(5, 3)(torch.randn(2, 5, size, size)).shape == (2, 3)
        assert heads.linear((5, size, size), 3)(torch.randn(2, 5, size, size)).shape == (2, 3)
        assert heads.transformer(8, 2, 11)(torch.randn(2, size, 8)).shape == (2, size, 11)
        assert heads.pooled_tokens(8, 3)(torch.randn(2, size, 8)).shape == (2, 3)
    assert heads.convolutional(5, 3, widths=())(torch.randn(2, 5, 4, 4)).shape == (2, 3)
    with pytest.raises(ValueError, match="`norm` should be batch, group or None. Found 'layer'"):
        heads.convolutional(5, 3, norm="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`num_outputs` should be an integer of at least 1. Found 0"):
        heads.fitting([nn.Linear(3, 8), nn.Linear(8, 2)], torch.zeros(1, 3), 0)


def test_attention_matches_its_definition() -> None:
    attention = SelfAttention(8, 2, 0.0)
    for layer in (attention.qkv, attention.out):
        assert isinstance(layer, Linear)
        nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 8)
    q, k, v = attention.qkv(x).chunk(3, -1)
    outputs = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / 2
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(outputs, -1)))


def test_every_model_trains_two_wise() -> None:
    for model, x in (
        (models.mlp(3, 12, 8), torch.randn(4, 12)),
        (models.convnet(3, image_size=6), torch.randn(4, 3, 6, 6)),
        (models.resnet("32", image_size=8), torch.randn(4, 3, 8, 8)),
    ):
        pipe = nwise.Pipeline(model.stages, model.heads, strategy="2-wise")
        losses = pipe.step(x, target=torch.tensor([0, 1, 2, 3]))
        assert losses[1:].isfinite().all()
        assert all(p.grad is not None for p in pipe.main_parameters())


def test_every_block_ends_in_its_nonlinearity() -> None:
    convnet = models.convnet(4, image_size=6)
    x = torch.randn(2, 3, 6, 6)
    for stage in convnet.stages[:-1]:
        x = stage(x)
        assert x.min() == 0
    resnet = models.resnet("paper-32", image_size=8, width_factor=1 / 16)
    x = torch.randn(2, 3, 8, 8)
    for stage in resnet.stages[:-1]:
        for piece in stage.pieces().values():
            x = piece(x)
            assert x.min() == 0


def test_transformer_block_matches_its_equations() -> None:
    block = TransformerBlock(8, 2)
    models.initialize(block, 3)
    x = torch.randn(2, 5, 8)
    middle = x + block.attention(nn.functional.layer_norm(x, (8,)))
    inner = nn.functional.layer_norm(middle, (8,)) @ block.up.weight.T
    cubic = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
    torch.testing.assert_close(block(x), middle + cubic @ block.down.weight.T)


def test_gpt_dropout_is_in_attention_and_on_both_branches() -> None:
    x = torch.randn(2, 5, 8)
    block = TransformerBlock(8, 2, dropout=0.5)
    assert not torch.equal(block.attention(x), block.attention(x))
    assert torch.equal(block.eval().attention(x), block.attention(x))
    block.train()
    block.attention.dropout = 0.0
    assert not torch.equal(block(x), block(x))
    drops = [m for stage in models.gpt(2, 1, 8, 2, 8, 11, dropout=0.3).stages for m in stage.modules()]
    assert [m.p for m in drops if isinstance(m, nn.Dropout)] == [0.3, 0.3]


def test_gpt_initialisation_matches_gpt_2() -> None:
    """Regression: the embeddings started with a deviation of 1 because their own initialisation ran last."""
    model = models.gpt(2, 1, 64, 2, 512, 1000)
    state = {name: t for stage in model.stages for name, t in stage.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("weight") and "norm" not in name and name != "output.0.weight":
            assert tensor.std().item() == pytest.approx(0.02, rel=0.05), name
        elif name.endswith("bias"):
            assert not tensor.any(), name
