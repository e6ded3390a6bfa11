"""A run's folder: configuration, versions, metrics as JSON lines, weights.

run.json             configuration, versions, status
metrics.jsonl        one record a line, as the run writes them
weights.safetensors  ``model.<name of the unsplit network>`` and ``heads.<stage>.<name>``
tokenizer.json       for text
checkpoints/         checkpoints to resume from
post-mortem.json     where a loss or gradient was not finite, if it was
.lock                held by the process that writes

Training does not end because a file cannot be written, as on a full disk: that is warned of once for each file, records are
kept until there is room, and `Run.unwritten` says in the end what is missing.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor

import nwise
from nwise.data.text import Bpe, Bytes, Tokenizer
from nwise.pipeline import Pipeline
from nwise.recipes import Recipe, from_json, to_json
from nwise.training.lock import FolderLock
from nwise.training.weights import load_main_state, save_tensors, under


class Run:
    """A run's folder.

    Args:
        folder: its path.

    Attributes:
        unwritten: files that could not be written, with the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unwritten: dict[Path, str] = {}
        self._records: list[str] = []  # that are not in the file yet
        self._lock = FolderLock(folder)

    @classmethod
    def create(cls, parent: Path, name: str, recipe: Recipe) -> Run:
        """A new folder ``<parent>/<name>-<number>`` with the configuration in it."""
        folder = numbered(parent, name)
        run = cls(folder)
        state = {"config": to_json(recipe), "versions": versions(), "seed": recipe.seed, "status": "running"}
        run._write_state({**state, "launch": _launch()})
        return run

    @classmethod
    def of_launch(cls, parent: Path, recipe: Recipe) -> Run | None:
        """The newest folder that processes of this torchrun made, before it restarted them, with this configuration."""
        wanted = {"launch": _launch(), "config": json.loads(json.dumps(to_json(recipe)))}
        for path in sorted(parent.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
            with suppress(ValueError, AttributeError, RecursionError):  # of a folder that is none of ours
                state = cls(path.parent)._state()
                if wanted == {name: state.get(name) for name in wanted} and state.get("status") != "done":
                    return cls(path.parent)
        return None

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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.folder / 'run.json'} should hold a run's configuration. Found: {error}") from error
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"{self.folder / 'run.json'} should hold a Recipe under 'config'. Found {type(recipe).__name__}."
            )
        return recipe

    @property
    def status(self) -> str:
        """``"running"``, ``"done"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``."""
        return str(self._state().get("status", "unknown"))

    def _state(self) -> Any:
        return json.loads((self.folder / "run.json").read_text())

    def _write_state(self, state: dict[str, Any]) -> None:
        write_text(self.folder / "run.json", json.dumps(state, indent=2) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder meanwhile.

        Raises:
            ValueError: one does already.
        """
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def attempt(self, path: Path, write: Callable[[], None]) -> None:
        """Write a file that training can go on without.

        Args:
            path: of the file.
            write: writes it.

        Warns:
            It cannot be written; once, until it can be.
        """
        try:
            write()
        except OSError as error:
            reason = str(error.__cause__ or error)
            if path not in self.unwritten:
                warnings.warn(f"{path} should be written. Found: {reason}. Training goes on.", stacklevel=2)
            self.unwritten[path] = reason
        else:
            self.unwritten.pop(path, None)

    def finish(self, status: str) -> None:
        """Write how the run ended; see `status`."""
        if self._records:
            self.attempt(self._metrics, self._append)
        self.attempt(self.folder / "run.json", lambda: self._write_state({**self._state(), "status": status}))

    def resumed(self, recipe: Recipe, step: int, changes: str) -> None:
        """Note that the run goes on, with a configuration that may be another."""
        state = self._state()
        mortem = self.folder / "post-mortem.json"
        if mortem.exists():
            mortem.rename(self.folder / f"post-mortem-before-{len(state.get('resumed', [])) + 1}.json")
        history = [*state.get("resumed", []), {"step": step, "changes": changes, "versions": versions()}]
        self._write_state({**state, "config": to_json(recipe), "status": "running", "resumed": history})

    def rewind(self, step: int) -> None:
        """Take away the records after a step, and the last line if whoever wrote it was stopped halfway."""
        path = self._metrics
        kept = []
        for line in path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] <= step:
                    kept.append(line)
        write_text(path, "".join(kept))

    def record(self, **values: Any) -> None:
        """Append one line to the metrics; nan becomes null."""
        self._records.append(json.dumps(plain(values), allow_nan=False) + "\n")
        self.attempt(self._metrics, self._append)

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _append(self) -> None:
        """Write the records that wait; all of them or none."""
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        try:
            with self._metrics.open("ab") as file:
                file.write("".join(self._records).encode())
        except OSError:
            with suppress(OSError):
                os.truncate(self._metrics, size)
            raise
        self._records.clear()

    def metrics(self) -> list[dict[str, Any]]:
        """All records."""
        path = self._metrics
        records = []
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
            try:
                record = json.loads(line)
                record["kind"], record["step"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}, should be a record with 'kind' and 'step'. Found {line[:40]!r}; remove the line."
                ) from error
            records.append(record)
        return records

    def save_weights(self, weights: dict[str, Tensor]) -> None:
        """Write what `weights_of` gives, aside first."""
        path = self.folder / "weights.safetensors"
        self.attempt(path, lambda: save_tensors(weights, path))

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


def new_run(recipe: Recipe, parent: Path) -> Run:
    """A fresh folder named after the recipe and the strategy."""
    strategy = "".join(c if c.isalnum() or c in "-." else "_" for c in recipe.strategy)[:40]
    return Run.create(parent, f"{recipe.name}-{strategy}", recipe)


def _launch() -> str:
    """Of this torchrun, the same for all processes that it starts: its own process, since its name may be that of others."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}, {platform.node()}, {os.getppid()}"


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


def write_text(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that there is never half of one."""
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


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
