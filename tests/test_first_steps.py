"""Common first mistakes raise one clear sentence, rather than an error of torch from the middle of a network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from nwise.app import cli, models
from nwise.checkpoint import Checkpoints


def pipe(strategy: str = "2-wise", head_width: int = 8) -> nwise.Pipeline:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    stages = nwise.split(model, at=["3", "5"])
    return nwise.Pipeline(stages, [nn.Linear(head_width, 3), nn.Linear(head_width, 3)], strategy=strategy)


X, Y = torch.zeros(4, 2, 3), torch.tensor([0, 1, 2, 0])


def test_positional_target_raises() -> None:
    with pytest.raises(
        TypeError, match=r"Found 2 inputs and no target; pass the target by name, `pipe.step\(x, target=y\)`"
    ):
        pipe().step(X, Y)


def test_missing_target_raises() -> None:
    with pytest.raises(TypeError, match=r"should receive a target by name, `pipe.step\(x, target=y\)`. Found none"):
        pipe().step(X)


def test_several_inputs_without_target_are_accepted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            y: Tensor = self.layer(x) + shift
            return y

    def small(output: Tensor, target: None) -> Tensor:
        return output.square().mean()

    free = nwise.Pipeline([Two(), nn.Linear(3, 3)], [nn.Linear(3, 3)], small, "local")
    assert free.step(torch.ones(2, 3), torch.ones(2, 3)).isfinite().all()

    class Row(nn.Sequential):
        """A row of layers whose own forward takes more than the first of them does, as stages with masks do."""

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self[0](x) * mask
            return y

    row = nwise.Pipeline([Row(nn.Linear(3, 3)), nn.Linear(3, 3)], [nn.Linear(3, 3)], small, "local")
    assert row.step(torch.ones(2, 3), torch.ones(2, 1)).isfinite().all()
    one = nwise.Pipeline([nn.Linear(3, 3), nn.Linear(3, 3)], [nn.Linear(3, 3)], small, "local")
    assert one.step(torch.ones(2, 3)).isfinite().all()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors take notes from Python 3.11 on")
@pytest.mark.parametrize(
    ("given", "stage"),
    [
        (lambda: pipe("local", head_width=5).step(X, target=Y), 0),
        (lambda: pipe().step(X, target=torch.tensor([0, 1, 2, 7])), 1),
        (lambda: pipe("end-to-end").step(X, target=Y[:, None]), 2),
    ],
)
def test_torch_error_notes_name_the_head(given: object, stage: int) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as error:
        given()  # type: ignore[operator]
    [note] = getattr(error.value, "__notes__", [])
    assert note.startswith(f"nwise: in the head or loss of stage {stage}, given [[4, {3 if stage == 2 else 8}]]")


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}, {"recompute": True}])
def test_torch_error_notes_name_the_stage(options: dict[str, Any]) -> None:
    """Regression: a wrong width between stages gave torch's message under thirteen frames."""
    wrong = nwise.Pipeline([nn.Linear(3, 8), nn.Linear(7, 3)], None, strategy="end-to-end", **options)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        wrong.step(torch.zeros(4, 3), target=Y)
    size = 4 // options.get("num_microbatches", 1)
    assert getattr(error.value, "__notes__", []) == [f"nwise: in the forward of stage 1, given [[{size}, 8]]"]


def test_any_error_of_a_forward_names_the_stage() -> None:
    class Lookup(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return {"y": x}["z"]

    with pytest.raises(KeyError, match="z") as error:
        nwise.Pipeline([Lookup(3, 3)], None, strategy="end-to-end").step(torch.zeros(4, 3), target=Y)
    assert getattr(error.value, "__notes__", []) == ["nwise: in the forward of stage 0, given [[4, 3]]"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss, r"Found the class CrossEntropyLoss; make an instance, `CrossEntropyLoss\(\)`"),
        ("cross_entropy", r"`loss_fn` should be callable.*Found str"),
    ],
)
def test_invalid_loss_fn_raises(loss: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], loss)  # type: ignore[arg-type]


def test_checkpoints_of_unnamed_custom_stages_raise_early(tmp_path: Path) -> None:
    """Regression: the error came only at the first save and did not say how to name a stage."""
    stages = [nn.Linear(3, 3) for _ in range(3)]
    own = nwise.Pipeline(stages, [nn.Linear(3, 3) for _ in range(2)])
    with pytest.raises(ValueError, match=r"Found 'weight' in stage 1 .* with `nwise.Chain\({'first': stage}\)`"):
        Checkpoints(tmp_path, own)
    named = nwise.Pipeline(
        [nwise.Chain({f"part{k}": stage}) for k, stage in enumerate(stages)], None, strategy="end-to-end"
    )
    path = Checkpoints(tmp_path, named).save()
    assert path.is_dir()


def test_exported_weights_load_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: `--out m.pt` wrote safetensors, and no module matched the names of a recipe's network."""
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "digits", "--filters", "4", "--max-steps", "2"]) == 0
    run = "runs/digits-2-wise-mean-001"
    for out in ("net.safetensors", "net.pt"):
        assert cli.run(["export", run, "--out", out]) == 0
    network = models.convnet(4, 10, filters=4, in_channels=1, image_size=8).whole()
    for weights in (load_file("net.safetensors"), torch.load("net.pt", weights_only=True)):
        network.load_state_dict(weights, strict=True)
    assert network.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert cli.run(["export", run, "--out", "net.onnx"]) == 2
    assert (
        "`out` should end in .safetensors, or, for torch.load, in .pt, .pth, .bin. Found 'net.onnx'"
        in capsys.readouterr().err
    )
