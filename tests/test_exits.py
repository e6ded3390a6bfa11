"""Early exits: answers against a sample-by-sample definition, and the file that needs no trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nets import ZOO
from nwise import exits
from nwise.exits import EarlyExit, confidence, confidence_of, default_confidence
from nwise.tensors import Named

A = 4


def pipeline(name: str = "perceptron", strategy: str = "2-wise-mean") -> tuple[nwise.Pipeline, Tensor]:
    torch.manual_seed(0)
    net = ZOO[name](A)
    pipe = nwise.Pipeline(net.stages, net.heads, net.loss_fn, strategy, seed=0)
    with torch.no_grad():
        for parameter in pipe.heads.parameters():
            parameter.mul_(12)  # heads that are sure of some samples
    x, _ = net.draw(16)
    return pipe.double(), x.double()


def one_by_one(pipe: nwise.Pipeline, x: Tensor, thresholds: Mapping[int, float]) -> tuple[Tensor, list[int]]:
    """The definition: every sample goes alone through the network, and leaves at the first head that is sure."""
    pipe = copy.deepcopy(pipe).eval()
    outputs, stages = [], []
    with torch.no_grad():
        for sample in x.split(1):
            hidden = sample
            for k, stage in enumerate(pipe.stages):
                hidden = stage(hidden)
                logits = hidden if k == A - 1 else pipe.heads[k](hidden)
                probability = float(logits.softmax(-1).max())
                if k == A - 1 or (k in thresholds and probability >= thresholds[k]):
                    break
            outputs.append(logits)
            stages.append(k)
    return torch.cat(outputs), stages


@pytest.mark.parametrize("thresholds", [{0: 0.9, 1: 0.53, 2: 0.56}, {1: 0.4}, {0: 0.0}, {0: math.inf, 2: 0.35}])
@pytest.mark.parametrize("name", ["perceptron", "convolutional"])
def test_every_sample_leaves_where_it_would_alone(name: str, thresholds: dict[int, float]) -> None:
    pipe, x = pipeline(name)
    output, stages = one_by_one(pipe, x, thresholds)
    answers = exits.exit(pipe, x, threshold=thresholds)
    assert answers.stage.tolist() == stages
    torch.testing.assert_close(answers.output, output)
    torch.testing.assert_close(answers.confidence, confidence(output))
    assert pipe.training
    assert not answers.output.requires_grad
    if thresholds == {0: 0.9, 1: 0.53, 2: 0.56} and name == "perceptron":
        assert len(set(stages)) > 2, "otherwise the test shows nothing"


def test_an_empty_batch_is_refused_and_a_pipeline_gives_its_own_modules() -> None:
    pipe, x = pipeline()
    with pytest.raises(ValueError, match="`exit` should have at least one sample. Found none"):
        exits.exit(pipe, x[:0])
    network = EarlyExit(pipe.stages, pipe.heads, {0: 0.5}, "classes")
    assert not network.training
    assert all(stage.training for stage in pipe.stages), "the network is a copy"


def test_heads_without_threshold_and_stages_without_samples_do_not_run() -> None:
    pipe, x = pipeline()
    called = []
    for kind, modules in (("stage", enumerate(pipe.stages)), ("head", pipe.heads.items())):
        for k, module in modules:
            module.register_forward_hook(lambda *_, kind=kind, k=k: called.append(f"{kind} {k}"))
    exits.exit(pipe, x, threshold={1: 0.0})
    assert called == ["stage 0", "stage 1", "head 1"]


def test_a_sample_of_several_positions_is_as_sure_as_its_least_certain_one() -> None:
    logits = torch.tensor([[[0.0, 0.0], [5.0, 0.0]], [[9.0, 0.0], [0.0, 9.0]]])
    assert confidence(logits).tolist() == pytest.approx([0.5, 0.99988], abs=1e-5)


def test_bad_thresholds_are_refused() -> None:
    pipe, x = pipeline()
    with pytest.raises(ValueError, match=r"stages whose head is trained, \{?\[0, 1, 2\].*Found one for stage 3"):
        exits.exit(pipe, x, threshold={3: 0.5})
    with pytest.raises(ValueError, match="`threshold` should be a probability.*Found nan"):
        exits.exit(pipe, x, threshold=float("nan"))
    with pytest.raises(ValueError, match="should have heads that the strategy trains. Found none; train with `2-wise`"):
        exits.exit(pipeline(strategy="end-to-end")[0], x)
    pipe.heads[0] = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    with pytest.raises(ValueError, match="Stage 0's head or output should be logits .* Found shape \\[16\\]"):
        exits.exit(pipe, x)
    pipe, x = pipeline()
    pipe.heads[0] = nn.Linear(5, 7).double()
    with pytest.raises(ValueError, match=r"outputs of one shape for a sample. Found \[7\] of stage 0, \[\d\] of stage"):
        # Regression: torch spoke of sizes of tensors.
        exits.exit(pipe, x, threshold={0: confidence(pipe.heads[0](pipe.stages[0](x))).median().item()})


def trained(output: int, loss_fn: Any, x: Tensor, y: Tensor, layer: Any = nn.Linear) -> nwise.Pipeline:
    torch.manual_seed(1)
    width = x.shape[1 if layer is not nn.Linear else -1]
    stages, heads = [layer(width, width), layer(width, output)], [layer(width, output)]
    pipe = nwise.Pipeline(stages, heads, loss_fn, "2-wise-mean").double()
    pipe.step(x, target=y)
    return pipe


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1)


def certainty(logits: Tensor) -> Tensor:
    return torch.maximum(logits.sigmoid(), 1 - logits.sigmoid()).flatten(1).amin(1)


DRAW = torch.Generator().manual_seed(3)
X = torch.randn(6, 4, generator=DRAW, dtype=torch.float64)
SEQUENCES = torch.randn(6, 5, 4, generator=DRAW, dtype=torch.float64)
MAPS = torch.randn(6, 4, 5, 7, generator=DRAW, dtype=torch.float64)
YES = torch.randint(2, (6, 1), generator=DRAW).double()
LABELS = torch.randint(2, (6, 3), generator=DRAW).double()


@pytest.mark.parametrize(
    ("loss_fn", "output", "x", "y", "layer", "expected"),
    [
        (nn.BCEWithLogitsLoss(), 1, X, YES, nn.Linear, certainty),
        (partial(nn.functional.binary_cross_entropy_with_logits), 1, X, YES, nn.Linear, certainty),
        (nn.CrossEntropyLoss(), 3, X, YES[:, 0].long(), nn.Linear, lambda o: o.softmax(1).amax(1)),
        (nn.CrossEntropyLoss(), 3, X, LABELS.softmax(1), nn.Linear, lambda o: o.softmax(1).amax(1)),
        (
            nn.functional.cross_entropy,
            3,
            MAPS,
            MAPS[:, 0].gt(0).long(),
            conv,
            lambda o: o.softmax(1).amax(1).amin((1, 2)),
        ),
        (nn.CrossEntropyLoss(), 3, SEQUENCES, LABELS.long(), nn.Linear, lambda o: o.softmax(1).amax(1).amin(1)),
        (
            nwise.losses.TokenCrossEntropy(),
            3,
            SEQUENCES,
            SEQUENCES[..., 0].gt(0).long(),
            nn.Linear,
            lambda o: o.softmax(-1).amax(-1).amin(1),
        ),
    ],
)
def test_default_confidence_is_that_of_the_loss(
    loss_fn: Any, output: int, x: Tensor, y: Tensor, layer: Any, expected: Callable[[Tensor], Tensor]
) -> None:
    """Regression: confidence was a softmax over the last dimension, so one logit was always sure and maps compared columns."""
    pipe = trained(output, loss_fn, x, y, layer)
    outputs = [made for made in pipe.head_outputs(x) if isinstance(made, Tensor)]
    for threshold, made in ((0.0, outputs[0]), (math.inf, outputs[1])):
        answers = exits.exit(pipe, x, threshold=threshold)
        torch.testing.assert_close(answers.confidence, expected(made).detach())
        torch.testing.assert_close(answers.output, made.detach())
    bound = expected(outputs[0]).median().item()
    assert exits.exit(pipe, x, threshold=bound).stage.eq(0).tolist() == (expected(outputs[0]) >= bound).tolist()
    rule = default_confidence(loss_fn, 0)
    network = EarlyExit(pipe.stages, pipe.heads, {0: bound}, rule)
    torch.testing.assert_close(network.answers(x).confidence, exits.exit(pipe, x, threshold=bound).confidence)


def test_confidence_by_hand() -> None:
    logits = torch.tensor(
        [[[math.log(3.0), 0.0], [0.0, 0.0]]]
    )  # softmax: 3/4, 1/4 and 1/2, 1/2; over dimension 1: 3/4, 1/2
    for rule, expected in (("tokens", 0.5), ("classes", 0.5), ("labels", 0.5)):
        assert confidence_of(rule, logits, (), 0)[1].tolist() == pytest.approx([expected])
    first = Named({"x": torch.zeros(1, 2), "attention_mask": torch.tensor([[1, 0]])})
    assert confidence_of("tokens", logits, first, 0)[1].tolist() == pytest.approx([0.75])
    assert confidence_of("classes", logits, first, 0)[1].tolist() == pytest.approx([0.75])
    assert confidence_of("label", torch.tensor([[-math.log(3.0)], [0.0]]), (), 0)[1].tolist() == pytest.approx(
        [0.75, 0.5]
    )
    assert confidence_of("label", torch.tensor([math.log(3.0), 0.0]), (), 0)[1].tolist() == pytest.approx([0.75, 0.5])


def test_several_labels_and_unknown_losses_need_a_confidence() -> None:
    """Regression: independent labels and regression got a softmax, which says nothing about them."""
    pipe = trained(3, nn.BCEWithLogitsLoss(), X, LABELS)
    with pytest.raises(ValueError, match=r"several labels .* Found logits \[6, 3\] at stage 0; pass 'labels'"):
        exits.exit(pipe, X)
    (head, last) = (made for made in pipe.head_outputs(X) if isinstance(made, Tensor))
    torch.testing.assert_close(
        exits.exit(pipe, X, threshold=0.0, confidence="labels").confidence, certainty(head).detach()
    )
    answers = exits.exit(pipe, X, threshold=math.inf, confidence=lambda logits: logits.sigmoid().amax(1))
    torch.testing.assert_close(answers.confidence, last.sigmoid().amax(1).detach())
    seen: list[Any] = []
    exits.exit(pipe, X, confidence=lambda logits, inputs: (seen.append(inputs.shape), logits[:, 0].sigmoid())[1])  # type: ignore[func-returns-value]
    assert seen[0] == X.shape
    for wrong, message in (
        ("softmax", "`confidence` should be one of 'classes', .* Found 'softmax'"),
        (lambda logits: logits, r"\[6\] numbers from 0 to 1. Found shape \[6, 3\]"),
        (lambda logits: 0.5, r"\[6\] numbers from 0 to 1. Found float"),
        (3, "Found 3"),
    ):
        with pytest.raises(ValueError, match=message):
            exits.exit(pipe, X, confidence=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`confidence` should be one of .* Found None"):
        EarlyExit(pipe.stages, pipe.heads, {0: 0.5})
    with pytest.raises(ValueError, match=r"at least two classes along dimension 1. Found shape \[6, 1\]"):
        exits.exit(trained(1, nn.CrossEntropyLoss(), X, YES[:, 0].long() * 0), X)


@pytest.mark.parametrize(
    ("values", "found"),
    [([0.2, 1.5], "1.5"), ([0.2, -0.1], "-0.1"), ([math.nan, 0.5], "nan"), ([math.inf, 0.5], "inf"), ([0, 7], "7")],
)
def test_numbers_that_are_no_confidence_are_refused(values: list[float], found: str) -> None:
    """Regression: a sample with nan never left, and all left at once with numbers above 1 such as logits, in silence."""
    with pytest.raises(ValueError, match=f"0 to 1. Found {found} at stage 3; give one"):
        confidence_of(lambda _: torch.tensor(values), torch.zeros(2, 3), (), 3)


def test_rounding_and_a_network_that_diverged_are_no_fault_of_a_confidence() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.nan, 0.0]])
    _, sure = confidence_of(lambda y: y.sum(1) + 1 + 1e-6, logits, (), 0)
    assert sure[0] > 1
    assert sure[1].isnan()
    assert confidence_of(Tensor.sigmoid, torch.zeros(2), (), 0)[1].tolist() == [0.5, 0.5], "one number for a sample"


class Margin(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(30 * output, target)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.MSELoss(),
        nn.functional.mse_loss,
        nn.HuberLoss(),
        nn.SoftMarginLoss(),
        Margin(),
        lambda output, target: nn.functional.mse_loss(output, target),
        [nn.BCEWithLogitsLoss(), nn.MSELoss()],
    ],
)
def test_losses_without_a_default_are_refused_before_anything_runs(loss_fn: Any) -> None:
    stages, heads = [nn.Linear(4, 4), nn.Linear(4, 1)], [nn.Linear(4, 1)]
    pipe = nwise.Pipeline(stages, heads, loss_fn, "2-wise-mean")
    stages[0].register_forward_hook(lambda *_: pytest.fail("it runs"))
    with pytest.raises(
        ValueError, match="`confidence` should be given for a loss without a default. Found .* at stage"
    ):
        exits.exit(pipe, X.float())


class Masked(nn.Linear):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
        made = super().forward(x)
        return made if self.out_features == 3 else {"x": made, "attention_mask": attention_mask}


def test_padding_decides_nothing() -> None:
    """Regression: the least certain position could be one of padding, which no loss counts."""
    torch.manual_seed(0)
    stages, heads = [Masked(4, 4), Masked(4, 3)], [Masked(4, 3)]
    pipe = nwise.Pipeline(stages, heads, nwise.losses.TokenCrossEntropy(), "2-wise-mean").double()
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2, 4, 5])[:, None]
    given = {"x": SEQUENCES, "attention_mask": mask.long()}
    pipe.step(given, target=torch.where(mask, 1, -100))
    for stage, threshold in ((0, 0.0), (1, math.inf)):
        made = pipe.head_outputs(given)[stage]
        assert isinstance(made, Tensor)
        top = made.softmax(-1).amax(-1)
        expected = torch.stack([row[keep].min() for row, keep in zip(top, mask, strict=True)]).detach()
        torch.testing.assert_close(exits.exit(pipe, given, threshold=threshold).confidence, expected)
        assert not torch.allclose(expected, top.amin(1).detach()), "otherwise the test shows nothing"
    other = {**given, "attention_mask": mask.long()[:, :4]}
    with pytest.raises(ValueError, match=r"`attention_mask` should be .* Found shape \[6, 4\], with .* \[6, 5\]"):
        exits.exit(pipe, other)


def test_outputs_of_positions_instead_of_samples_are_refused() -> None:
    """Regression: an index error of torch."""

    class Flat(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).flatten(0, 1)

    pipe = nwise.Pipeline([nn.Linear(4, 4), Flat(4, 3)], [Flat(4, 3)], nn.functional.cross_entropy, "2-wise-mean")
    with pytest.raises(ValueError, match=r"Stage 0's head or output should have 2 samples .* shape \[10, 3\]"):
        exits.exit(pipe, torch.randn(2, 5, 4))


def test_exported_network_answers_alike_and_needs_no_trainer(tmp_path: Path) -> None:
    pipe, x = pipeline("convolutional")
    thresholds = {0: 0.5, 2: 0.35}
    network = EarlyExit(list(pipe.stages), {k: pipe.heads[k] for k in thresholds}, thresholds, "classes")
    torch.save(network, tmp_path / "network.pt")
    names = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "network.pt")
    assert {name for name in names if "nwise" in name} == {"nwise.exits.EarlyExit", "nwise.by_stage.HeadDict"}
    loaded = torch.load(tmp_path / "network.pt", weights_only=False)
    with torch.no_grad():
        assert loaded(x).equal(exits.exit(pipe, x, threshold=thresholds).output)
    with pytest.raises(ValueError, match=r"`thresholds` should be of stages with a head, \[0\]. Found \[1\]"):
        EarlyExit(list(pipe.stages), {0: pipe.heads[0]}, {1: 0.5}, "classes")


def test_positions_of_a_decoder_have_the_decoders_mask() -> None:
    """Regression: exits looked for a name that no stage sends, and took the mask of the encoder."""
    logits = torch.tensor([[[5.0, 0.0], [0.0, 0.0]]])
    masks = {"attention_mask": torch.ones(1, 2), "decoder_attention_mask": torch.tensor([[1, 0]])}
    seen = Named({"hidden": logits, "decoder_input_ids": torch.zeros(1, 2), **masks})
    _, sure = confidence_of("tokens", logits, seen, 0)
    assert torch.equal(sure, logits[:, 0].softmax(-1).amax(-1)), "the second position is padding"
