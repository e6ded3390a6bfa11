"""A run's folder: configuration, versions, metrics as JSON lines, weights.

run.json             configuration, versions, status
metrics.jsonl        one record a line, as the run writes them
weights.safetensors  ``model.<name of the unsplit network>`` and ``heads.<stage>.<name>``
tokenizer.json       for text
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import nwise
from nwise.data.text import Bpe, Bytes, Tokenizer
from nwise.pipeline import Pipeline
from nwise.recipes import Recipe, from_json, to_json


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder."""

    folder: Path

    @classmethod
    def create(cls, parent: Path, name: str, recipe: Recipe) -> Run:
        """A new folder ``<parent>/<name>-<number>`` with the configuration in it."""
        folder = numbered(parent, name)
        run = cls(folder)
        run._write_state({"config": to_json(recipe), "versions": versions(), "seed": recipe.seed, "status": "running"})
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        """An existing folder."""
        if not (folder / "run.json").is_file():
            raise FileNotFoundError(
                f"A run should be a folder with a run.json, as `nwise train` makes. Found none in {folder}."
            )
        return cls(folder)

    @property
    def recipe(self) -> Recipe:
        """The resolved configuration."""
        try:
            recipe = from_json(self._state()["config"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.folder / 'run.json'} should hold a run's configuration. Found: {error}") from error
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"{self.folder / 'run.json'} should hold a Recipe under 'config'. Found {type(recipe).__name__}."
            )
        return recipe

    @property
    def status(self) -> str:
        """``"running"``, ``"done"``, ``"interrupted"`` or ``"failed"``."""
        return str(self._state().get("status", "unknown"))

    def _state(self) -> Any:
        return json.loads((self.folder / "run.json").read_text())

    def _write_state(self, state: dict[str, Any]) -> None:
        _write(self.folder / "run.json", json.dumps(state, indent=2) + "\n")

    def finish(self, status: str) -> None:
        """Write how the run ended: ``"done"``, ``"interrupted"`` or ``"failed"``."""
        self._write_state({**self._state(), "status": status})

    def record(self, **values: Any) -> None:
        """Append one line to the metrics; nan becomes null."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(plain(values), allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records."""
        path = self.folder / "metrics.jsonl"
        records = []
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
            try:
                record = json.loads(line)
                record["kind"], record["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}, should be a record with 'kind' and 'step'. Found {line[:40]!r}; remove the line."
                ) from error
            records.append(record)
        return records

    def save_weights(self, weights: dict[str, Tensor]) -> None:
        """Write what `weights_of` gives, aside first."""
        save_tensors(weights, self.folder / "weights.safetensors")

    def weights(self) -> dict[str, Tensor]:
        """What `save_weights` wrote."""
        path = self.folder / "weights.safetensors"
        if not path.exists():
            raise FileNotFoundError(
                f"{path} should hold the run's weights. Found none; did the run reach its first evaluation?"
            )
        try:
            return load_file(path)
        except Exception as error:
            raise ValueError(f"{path} should be a safetensors file. Found: {error}; train again.") from error

    def load_weights(self, pipe: Pipeline) -> None:
        """Put the weights into a pipeline of the same configuration."""
        weights = self.weights()
        load_main_state(pipe, under(weights, "model."))
        pipe.steps = max((record["step"] for record in self.metrics()), default=0)
        heads = under(weights, "heads.")
        if not heads and not pipe.needed_heads():
            pipe.discard_heads()  # as the run did, if it had any
        try:
            pipe.heads.load_state_dict(heads)
        except RuntimeError as error:
            raise ValueError(f"{self.folder} should hold the weights of its heads. Found: {error}") from error

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer, which the weights are useless without."""
        tokenizer.save(self.folder / "tokenizer.json")

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one."""
        path = self.folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return Bytes() if json.loads(path.read_text()).get("type") == "bytes" else Bpe.load(path)
        except ImportError:
            raise
        except Exception as error:
            raise ValueError(f"{path} should be a tokenizer that a run wrote. Found: {error}; train again.") from error


def numbered(parent: Path, name: str) -> Path:
    """A new folder ``<parent>/<name>-<number>``, with the first number that is free."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    return {
        "nwise": nwise.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }


def under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def weights_of(pipe: Pipeline) -> dict[str, Tensor]:
    """Weights of the main network (``model.<name>``) and of the heads (``heads.<stage>.<name>``).

    Of a pipeline of several processes, all of them call it, and those of all stages are on rank 0.
    """
    model = {f"model.{name}": tensor for name, tensor in main_state(pipe).items()}
    heads = {f"heads.{name}": tensor for name, tensor in pipe.heads.state_dict().items()}
    return {**model, **heads} if pipe.team is None else pipe.team.collect({**model, **heads})


def main_state(pipe: Pipeline) -> dict[str, Tensor]:
    """State of the main network under the names of the unsplit one (those of its stages, which must differ)."""
    state: dict[str, Tensor] = {}
    for k, stage in enumerate(pipe.stages):
        for name, tensor in stage.state_dict().items():
            if name in state:
                raise ValueError(
                    f"Stages should keep the names of the unsplit network (`nwise.Chain`, `nwise.split`). Found {name!r} in "
                    f"stage {k} and in one before."
                )
            state[name] = tensor
    return state


def load_main_state(pipe: Pipeline, state: dict[str, Tensor]) -> None:
    """Load what `main_state` gave, every name exactly once."""
    expected = set(main_state(pipe))
    if expected != set(state):
        odd = sorted(expected ^ set(state))[0]
        raise ValueError(
            f"Weights should have the names of the network's parameters and buffers. Found that {odd!r} differs."
        )
    try:
        for stage in pipe.stages:
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    except RuntimeError as error:
        raise ValueError(f"Weights should have the shapes of the network's parameters. Found: {error}") from error


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file, written aside and renamed, so that there is never half of one."""
    aside = path.with_name(path.name + ".part")
    # safetensors refuses tensors that share memory, as those of a module in two places do.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, aside)
    os.replace(aside, path)


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    os.replace(aside, path)


def plain(value: Any) -> Any:
    """Of JSON's own types: tensors as lists, what is not a finite number as None."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not numpy.isfinite(value):
        return None
    return value
