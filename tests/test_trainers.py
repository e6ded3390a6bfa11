"""Others' trainers: the examples learn, resume, skip together, and train only what they should."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nwise
from launch import forked
from nwise.checkpoint import Checkpoints

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import fp16  # noqa: E402

# These packages use each other's deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def example(name: str) -> Any:
    return pytest.importorskip(name, reason="needs the group 'trainers'", exc_type=ImportError)


def test_examples_fit_a_screen() -> None:
    for name in ("hf_trainer", "lightning_vit", "accelerate_loop", "fp16", "lora"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60, name


def test_hugging_face_trainer_learns_and_resumes(tmp_path: Path) -> None:
    """Ten steps and a resume for ten more give the network of twenty in a row, heads included.

    The Trainer zeroes the gradients of its network alone: those of heads once added up, which a resume brought to light.
    """
    hf_trainer = example("hf_trainer")
    options = {"max_steps": 20, "save_steps": 10, "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    whole = hf_trainer.main(tmp_path, **options)
    assert whole < 3  # chance is ln 64 = 4.2
    shutil.rmtree(tmp_path / "checkpoint-20")
    assert hf_trainer.main(tmp_path, resume=True, **options) == whole
    assert (tmp_path / "checkpoint-20" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="Use `num_microbatches` instead of gradient accumulation"):
        hf_trainer.main(tmp_path, gradient_accumulation_steps=2, **options)


def test_lightning_trains_a_vision_transformer() -> None:
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    assert example("lightning_vit").main(**options) > 0.9


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains(precision: str) -> None:
    accelerate_loop = example("accelerate_loop")
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(
        reset_partial_state=True
    )  # of other tests
    assert accelerate_loop.main(precision) < 0.2


def test_overflow_skips_the_update_and_lowers_the_scale() -> None:
    """fp16 holds no more than 65,504, and twenty good steps would double the scale again."""
    loss, skipped, scale = fp16.main(steps=15, first_scale=2.0**20)
    assert skipped >= 1
    assert scale == 2.0 ** (20 - skipped)
    assert loss < 0.5
    assert fp16.main(steps=12, first_scale=1.0)[1:] == (0, 1.0)


def test_overflow_skips_on_every_rank(tmp_path: Path) -> None:
    done = forked(2, [str(EXAMPLES / "fp16.py")], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    loss, skipped, scale = fp16.main()
    assert done.stdout.strip() == f"loss {loss:.3f}, {skipped} steps skipped, scale {scale:g}"


def test_optimizers_with_a_closure_are_refused(tmp_path: Path) -> None:
    pipe = nwise.Pipeline([torch.nn.Linear(2, 2)], strategy="end-to-end")
    with pytest.raises(ValueError, match="`optimizer` should update from `.grad` alone. Found LBFGS"):
        Checkpoints(tmp_path, pipe, torch.optim.LBFGS(pipe.parameters()))


def check_adapters(folder: Path, lora: Any) -> None:
    """What was saved are adapters, and they load again."""
    import safetensors.torch

    saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert saved
    assert all("lora_" in name for name in saved)
    assert any(bool(tensor.any()) for name, tensor in saved.items() if "lora_B" in name), "B begins at zero"


def test_lora_trains_adapters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = example("lora")
    history = lora.main(tmp_path, steps=10)
    assert history[-1] < history[0]
    assert "3 devices, 2-wise" in capsys.readouterr().out
    check_adapters(tmp_path, lora)


@pytest.mark.slow("three processes that import transformers")
def test_lora_on_three_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = forked(3, [str(EXAMPLES / "lora.py")], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "A step takes " in done.stdout
    check_adapters(tmp_path / "runs" / "lora", example("lora"))
