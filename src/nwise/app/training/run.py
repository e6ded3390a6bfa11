"""A run's folder: configuration, versions, metrics as JSON lines, weights.

    run.json             configuration, versions, status
    metrics.jsonl        one record per line, in the order of the run
    weights.safetensors  ``model.<name of the unsplit network>`` and ``heads.<stage>.<name>``
    tokenizer.json       the tokenizer, for text
    checkpoints/         checkpoints to resume from
    post-mortem.json     the place of a loss or gradient that was not finite
    .lock                a lock that the writing process holds

A file that cannot be written, e.g. on a full disk, does not end training. `Run` warns once per file and keeps the records until
there is room. At the end `Run.unwritten` lists the files that are incomplete.
"""

from __future__ import annotations

import dataclasses
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
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import nwise
from nwise.app.data import Images, Tokens, steps_per_epoch
from nwise.app.data.text import Tokenizer, load_tokenizer
from nwise.app.recipes import Recipe, from_json, in_force, to_json
from nwise.app.recipes.loop import OwnLoop
from nwise.app.records import append_text, json_line, read_lines, write_text
from nwise.app.training.build import make_pipeline, pick_device
from nwise.checkpoint import FolderLock, discard_unsaved_heads, load_main_state, save_tensors, under
from nwise.pipeline import Pipeline


class Run:
    """A run's folder.

    Args:
        folder: its path.

    Attributes:
        unwritten: the files that could not be written, with the reason.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unwritten: dict[Path, str] = {}
        self._records: list[str] = []  # not yet in the file
        self._lock = FolderLock(folder)

    @classmethod
    def find_restarted(cls, parent: Path, recipe: Recipe) -> Run | None:
        """Return the newest unfinished run with this configuration that earlier processes of this torchrun made."""
        wanted = {"launch": _launch(), "config": json.loads(json.dumps(to_json(recipe)))}
        found: list[tuple[int, Path]] = []
        for path in parent.glob("*/run.json"):
            with suppress(
                OSError, ValueError, AttributeError, RecursionError
            ):  # deleted meanwhile, or of another program
                run = cls(path.parent)
                if run.status != "done" and wanted == {name: run.state.get(name) for name in wanted}:
                    found.append((path.stat().st_mtime_ns, path.parent))
        return cls(max(found)[1]) if found else None

    @classmethod
    def open(cls, folder: Path) -> Run:
        """Open an existing folder.

        Raises:
            FileNotFoundError: it is not a run's folder.
        """
        if not (folder / "run.json").is_file():
            raise FileNotFoundError(
                f"A run should be a folder with a run.json, as `nwise train` makes. Found none in {str(folder)!r}."
            )
        return cls(folder)

    @property
    def described(self) -> Recipe | OwnLoop:
        """The resolved configuration, or what `nwise.app.Log` wrote of a loop."""
        file = self.folder / "run.json"
        try:
            config = from_json(self.state["config"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} should hold a run's configuration. Found: {error}; train again.") from error
        if not isinstance(config, Recipe | OwnLoop):
            found = type(config).__name__
            raise ValueError(f"{file} should hold a Recipe under 'config'. Found {found}; train again.")
        return config

    @property
    def recipe(self) -> Recipe:
        """The resolved configuration of a run of `nwise train`."""
        config = self.described
        if isinstance(config, OwnLoop):
            raise ValueError(f"{self.folder} should be a run of `nwise train`. Found the log of another loop.")
        return config

    def begin(self, config: Recipe | OwnLoop, seed: int, **more: Any) -> None:
        """Write the configuration of a new run."""
        self._write_state(
            {"config": to_json(config), "versions": versions(), "seed": seed, "status": "running", **more}
        )

    def describe(self, config: Recipe | OwnLoop) -> None:
        """Replace the configuration."""
        self._write_state({**self.state, "config": to_json(config)})

    @property
    def status(self) -> str:
        """``"running"``, ``"done"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``."""
        return str(self.state.get("status", "unknown"))

    @property
    def state(self) -> Any:
        """The contents of ``run.json``."""
        return json.loads((self.folder / "run.json").read_text())

    def _write_state(self, state: dict[str, Any]) -> None:
        write_text(self.folder / "run.json", json.dumps(state, indent=2) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, so no other process writes to it; ValueError if another process holds it."""
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def attempt(self, path: Path, write: Callable[[], None]) -> None:
        """Call a function that writes a file which training can do without; warn, once until it succeeds, if it fails."""
        try:
            write()
        except OSError as error:
            reason = str(error.__cause__ or error)
            if path not in self.unwritten:
                warnings.warn(f"{path} should be written. Found: {reason}. Training continues.", stacklevel=2)
            self.unwritten[path] = reason
        else:
            self.unwritten.pop(path, None)

    def finish(self, status: str) -> None:
        """Write the run's final status; see `status`."""
        if self._records:
            self.attempt(self._metrics, self._append)
        self.attempt(self.folder / "run.json", lambda: self._write_state({**self.state, "status": status}))

    def resumed(self, recipe: Recipe | OwnLoop, step: int, changes: str) -> None:
        """Record that the run is resumed, with a configuration that may differ."""
        state = self.state
        mortem = self.folder / "post-mortem.json"
        if mortem.exists():
            mortem.rename(self.folder / f"post-mortem-before-{len(state.get('resumed', [])) + 1}.json")
        history = [*state.get("resumed", []), {"step": step, "changes": changes, "versions": versions()}]
        self._write_state({**state, "config": to_json(recipe), "status": "running", "resumed": history})

    def rewind(self, step: int, *, is_untested: bool = False) -> None:
        """Remove the records after a step (also its test, if it comes again), and a last line that an interruption cut off."""
        kept = []
        for _, line, record in read_lines(self._metrics):
            with suppress(KeyError, TypeError):
                comes_again = is_untested and (record["step"], record["kind"]) == (step, "test")
                if record["step"] <= step and not comes_again:
                    kept.append(line + "\n")
        write_text(self._metrics, "".join(kept))

    def record(self, **values: Any) -> None:
        """Append one line to the metrics; nan becomes null."""
        self._records.append(json_line(values))
        self.attempt(self._metrics, self._append)

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def _append(self) -> None:
        append_text(self._metrics, self._records)
        self._records.clear()

    def metrics(self) -> list[dict[str, Any]]:
        """Return all records; ValueError if a line is not a record."""
        records = []
        for number, line, record in read_lines(self._metrics):
            if not isinstance(record, dict) or not {"kind", "step"} <= set(record):
                raise ValueError(
                    f"{self._metrics}, line {number}, should be a record with 'kind' and 'step'. Found {line[:40]!r}; remove "
                    "the line."
                )
            records.append(record)
        return records

    def save_weights(self, weights: dict[str, Tensor], step: int) -> None:
        """Write the result of `gather_weights` after a step."""
        self.attempt(self.weights_file, lambda: save_tensors(weights, self.weights_file, {"step": str(step)}))

    @property
    def weights_file(self) -> Path:
        return self.folder / "weights.safetensors"

    @property
    def weights_step(self) -> int:
        """Step after which the weights were written."""
        with safe_open(self.weights_file, "pt") as file:
            step = (file.metadata() or {}).get("step", "")
        if step.isdecimal():
            return int(step)
        # An older version wrote them: at a stop, or else at the last test.
        kinds = ("train", "test", "interrupted") if self.status in ("stopped", "interrupted") else ("test",)
        return max((record["step"] for record in self.metrics() if record["kind"] in kinds), default=0)

    def weights(self) -> dict[str, Tensor]:
        """Read the weights that `save_weights` wrote."""
        file = self.weights_file
        if not file.exists():
            raise FileNotFoundError(
                f"{file} should hold the run's weights. Found none; did the run reach its first evaluation?"
            )
        try:
            return load_file(file)
        except Exception as error:
            raise ValueError(f"{file} should be a safetensors file. Found: {error}; train again.") from error

    def load_weights(self, pipe: Pipeline, weights: dict[str, Tensor] | None = None) -> None:
        """Load the weights, or those that `weights` has returned, into a pipeline of the same configuration."""
        weights = weights or self.weights()
        load_main_state(pipe, under(weights, "model."))
        pipe.steps = self.weights_step
        discard_unsaved_heads(pipe, weights)
        try:
            pipe.heads.load_state_dict(under(weights, "heads."))
        except RuntimeError as error:
            wanted = f"{self.folder} should hold the weights of its heads."
            raise ValueError(f"{wanted} Found: {error}; train again.") from error

    def trained(self, device: str) -> tuple[Pipeline, Images | Tokens]:
        """Build the pipeline with the run's weights; return it and the test set, on a device."""
        config = dataclasses.replace(self.recipe, device=device)
        place = pick_device(config)
        weights = self.weights()
        train_data, test_data = config.load(self.tokenizer())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about training
            phases = config.phases(steps_per_epoch(len(train_data), config.batch_size))
            pipe = make_pipeline(config, train_data, in_force(phases, self.weights_step - 1))
        self.load_weights(pipe, weights)
        return pipe.to(place), test_data.to(place)

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Write the tokenizer, without which the weights are useless."""
        tokenizer.save(self.folder / "tokenizer.json")

    def tokenizer(self) -> Tokenizer | None:
        """Read the tokenizer, if there is one."""
        path = self.folder / "tokenizer.json"
        return load_tokenizer(path) if path.exists() else None


def new_run(recipe: Recipe, parent: Path) -> Run:
    """Make a folder named after the recipe and the strategy, with the configuration in it."""
    strategy = "".join(c if c.isalnum() or c in "-." else "_" for c in recipe.strategy)[:40]
    run = Run(numbered(parent, f"{recipe.name}-{strategy}"))
    run.begin(recipe, recipe.seed, launch=_launch())
    return run


def _launch() -> str:
    """Identify this torchrun, for all processes that it starts, by its own process: another torchrun may have the same name."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}, {platform.node()}, {os.getppid()}"


def numbered(parent: Path, name: str) -> Path:
    """Make a folder ``<parent>/<name>-<number>``, with the first unused number."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = parent / f"{name}-{number:03d}"
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def versions() -> dict[str, str]:
    """Return the versions of everything that can change a number."""
    return {
        "nwise": nwise.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }
