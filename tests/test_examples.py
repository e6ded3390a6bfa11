"""The worked examples: they run, they learn, and their gradients are those of the definition."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nwise
from counting import lines_of_code
from launch import forked, results
from test_contract import assert_same, gradients

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import by_hand
import credit
import equilibrium
import exits
import infomax
import quickstart
import speech
import tiny
import unet
import unsupervised

ROOT = Path(__file__).parents[1]


def test_quickstart_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.main() > 0.9
    assert "test accuracy of the last head" in capsys.readouterr().out


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("strategy", ["local", "2-wise", "2-wise-mean", "3-wise", "geometric-0.5", "end-to-end"])
def test_gradients_by_hand_are_those_of_the_pipeline(strategy: str) -> None:
    stages, heads = by_hand.network()
    pipe = nwise.Pipeline(stages, heads, torch.nn.functional.cross_entropy, strategy)
    x, y = torch.randn(6, 64), torch.arange(6)
    losses = pipe.gather(pipe.step(x, target=y))
    found = gradients(pipe)
    pipe.zero_grad()
    plain: Any = by_hand.backward(stages, heads, torch.nn.functional.cross_entropy, x, y, pipe.credit)  # type: ignore[no-untyped-call]
    ran = pipe.needed_heads() | {3}
    torch.testing.assert_close([plain[k].item() for k in ran], [losses[k].item() for k in ran], rtol=1e-12, atol=0)
    assert_same(found, gradients(pipe), 1e-12)


def test_page_by_hand_has_the_lines_of_the_example() -> None:
    marks = "# The fourteen lines\n", "# End of the fourteen lines"
    lines = (ROOT / "examples" / "by_hand.py").read_text().split(marks[0])[1].split(marks[1])[0].strip()
    assert lines.replace("  # noqa: D103", "") in (ROOT / "docs" / "by_hand.md").read_text()
    assert len([line for line in lines.splitlines() if line.strip()]) == 14


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", credit.WAYS)
def test_ways_to_train_are_their_matrices(name: str) -> None:
    assert credit.difference(name) < 1e-14


def test_published_loops_are_those_in_stages() -> None:
    """Three updates of a loop of researchers and of the pipeline; float32, in which cut mini-batches add up in another order."""
    assert infomax.difference() == 0
    assert equilibrium.difference() < 1e-6
    assert speech.difference(1) < 1e-6
    assert speech.difference(3) < 1e-4


def test_examples_of_published_loops_are_short() -> None:
    for name in ("infomax", "equilibrium", "speech"):
        assert lines_of_code([ROOT / "examples" / f"{name}.py"]) <= 120


def test_tiny_pipeline_is_that_of_the_library(tmp_path: Path) -> None:
    """Four processes of a hundred lines, by four credit matrices, against one process of the library."""
    ranks = results(4, "tiny.py", tmp_path)
    for name in ranks[0]:
        found = {what: torch.tensor(weight) for rank in ranks for what, weight in rank[name].items()}
        stages, heads = zip(*(tiny.stage_and_head(k) for k in range(4)), strict=True)
        modules = [*stages[:-1], torch.nn.Sequential(stages[-1], heads[-1])]
        credit = nwise.Credit(tiny.credit_matrix(name, 4).tolist())
        pipe = nwise.Pipeline(modules, list(heads[:-1]), strategy=credit)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for x, y in tiny.batches(5):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        expected = {f"stage {k}": stages[k][0].weight.detach() for k in range(4)}
        expected |= {f"head {k}": heads[k].weight.detach() for k in range(4)}
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_network_with_exits_saves_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy, depth = exits.main(tmp_path / "network.pt", steps=60)
    assert accuracy > 0.8
    assert depth < 1.0
    assert "eight digits leave: [" in capsys.readouterr().out


def test_unsupervised_heads_learn() -> None:
    loss, accuracy = unsupervised.main(200)
    assert loss < 0.5
    assert accuracy > 0.8


@pytest.mark.usefixtures("float64")
def test_reconstruction_gradients_match_reference() -> None:
    pipe = unsupervised.build()
    x = torch.randn(8, 64)
    expected = nwise.reference_grads(
        list(pipe.stages), list(pipe.heads.values()), torch.nn.functional.mse_loss, x, x, pipe.credit
    )
    pipe.step(x, target=x)
    assert_same(gradients(pipe), expected, 1e-12)


@pytest.mark.usefixtures("float64")
def test_unet_has_the_gradients_of_the_network_without_stages() -> None:
    """End-to-end, and bitwise: the skip's gradient comes back through the stage that only passes it on."""
    network = unet.UNet(8)
    pipe = unet.build(network, 8, "end-to-end")
    x, y = torch.randn(2, 4, 8)
    losses = pipe.step(x, target=y)
    found = gradients(pipe)
    pipe.zero_grad()
    loss = torch.nn.functional.mse_loss(network(x), y)
    loss.backward()
    assert losses[-1].item() == loss.item()
    assert_same(found, gradients(pipe), 0)


def test_unet_removes_noise() -> None:
    before, after = unet.main(150)
    assert after < before / 2


def test_gpt2_resume_is_bitwise_and_loads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty steps in one run equal ten plus a resume for the other ten; short lines show it as well as long ones."""
    gpt2 = pytest.importorskip("gpt2", reason="needs the extra 'hf'", exc_type=ImportError)
    monkeypatch.setattr(gpt2, "LENGTH", 12)
    whole = gpt2.main(tmp_path / "whole", steps=20)
    assert whole[-1] < whole[0] - 1
    first = gpt2.main(tmp_path / "parts", steps=10)
    second = gpt2.main(tmp_path / "parts", steps=20)
    assert first + second == whole
    assert capsys.readouterr().out.count("saved and loaded back") == 3
    saved = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert saved[0] == saved[1]


@pytest.mark.slow("four processes that import transformers")
def test_gpt2_on_four_processes_matches_one_bitwise(tmp_path: Path) -> None:
    gpt2 = pytest.importorskip("gpt2", reason="needs the extra 'hf'", exc_type=ImportError)
    done = forked(4, [str(Path(gpt2.__file__)), str(tmp_path / "many")], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    gpt2.main(tmp_path / "one")
    saved = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("many", "one")]
    assert saved[0] == saved[1]


def test_vision_transformer_loads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vit = pytest.importorskip("vit", reason="needs the extra 'hf'", exc_type=ImportError)
    accuracy = vit.main(tmp_path, epochs=3)
    assert accuracy > 0.15
    scores, loaded = capsys.readouterr().out.splitlines()
    assert len(scores.split("%")) == 5, "every head is scored"
    assert scores.split()[-2] == loaded.split()[-2], "the network that was loaded is the one that was trained"
