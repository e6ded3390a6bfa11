"""What a run's folder says, as series and numbers for a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nwise
from nwise.flow import flows_for
from nwise.recipes import Recipe, to_json
from nwise.report.measured import Comparison
from nwise.runtime.timeline import load
from nwise.schedule.choose import choose
from nwise.strategies import Strategy
from nwise.training import Run

AXES = {"step": "steps", "samples": "samples", "seconds": "seconds of this run"}


@dataclass(frozen=True)
class Series:
    """Numbers of one head along a run.

    Args:
        head: stage of the head.
        along: where they were taken: by step, samples and seconds.
        values: None where there is none.
    """

    head: int
    along: dict[str, list[float]]
    values: list[float | None]


@dataclass(frozen=True)
class Summary:
    """A run as its folder tells it.

    Args:
        name: of the run on the page, its folder's.
        run: the folder.
    """

    name: str
    run: Run

    @classmethod
    def of(cls, folders: Sequence[Path]) -> list[Summary]:
        """Those of some folders, with names that differ.

        Raises:
            FileNotFoundError, ValueError: one of them is no run's folder, or has no records.
        """
        found = []
        folders = list({folder.resolve(): folder for folder in folders}.values())  # each once
        names = [folder.resolve().name for folder in folders]
        for folder, name in zip(folders, names, strict=True):
            summary = cls(name if names.count(name) == 1 else str(folder), Run.open(folder))
            if not summary.tests:
                raise ValueError(
                    f"{folder} should hold the records of at least one test. Found none; did the run reach its first evaluation?"
                )
            found.append(summary)
        return found

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved configuration."""
        return self.run.recipe

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Those of training and tests.

        Raises:
            ValueError: one is not as `nwise train` writes it.
        """
        found = [record for record in self.run.metrics() if record["kind"] in ("train", "test")]
        for record in found:
            if not _is_whole(record):
                raise ValueError(
                    f"{self.run.folder / 'metrics.jsonl'} should hold records with {', '.join(AXES)} and numbers of every head. "
                    f"Found {str(record)[:60]}; remove the line."
                )
        return found

    @property
    def tests(self) -> list[dict[str, Any]]:
        """Records of tests."""
        return [record for record in self.records if record["kind"] == "test"]

    @property
    def num_stages(self) -> int:
        """A, of the last test: a run may have gone on with another number."""
        return len(self.tests[-1]["loss"])

    @property
    def history(self) -> list[str]:
        """What was changed where the run was gone on from, and what of it the curves cannot show."""
        notes = [
            f"gone on from step {one.get('step')}" + (f": {one['changes']}" if one.get("changes") else "")
            for one in self._state.get("resumed", [])
            if isinstance(one, dict)
        ]
        other = [record["step"] for record in self.records if len(record["loss"]) != self.num_stages]
        if other:
            notes.append(
                f"up to step {max(other)} there was another number of stages; of that part only the last head is shown"
            )
        return notes

    @cached_property
    def _state(self) -> dict[str, Any]:
        found = json.loads((self.run.folder / "run.json").read_text())
        return found if isinstance(found, dict) else {}

    @cached_property
    def strategy(self) -> Strategy:
        """As the recipe names it, epochs turned into steps by what the records say."""
        last = self.tests[-1]
        per_epoch = round(last["step"] / last["epoch"]) if last.get("epoch") else 1
        found: Strategy = self.recipe.strategy_for(max(1, per_epoch))
        return found

    @property
    def title(self) -> str:
        """Recipe, strategy, A and M in one line."""
        return f"{self.recipe.name}, {self.strategy.name}, A = {self.num_stages}, M = {self.recipe.microbatches}"

    @property
    def quality(self) -> str:
        """What the heads are scored by."""
        return "perplexity" if hasattr(self.recipe.data, "texts") else "accuracy"

    def series(self, kind: str, name: str) -> list[Series]:
        """Numbers of every head that has any.

        Args:
            kind: train or test.
            name: loss, accuracy (in per cent), or perplexity.
        """
        records = [record for record in self.records if record["kind"] == kind]
        along = {axis: [float(record[axis]) for record in records] for axis in AXES}
        found = []
        for head in range(self.num_stages):
            key = "loss" if name == "perplexity" else name
            values = [_scaled(self._of(record[key], head), name) for record in records]
            if any(value is not None for value in values):
                found.append(Series(head, along, values))
        return found

    def _of(self, heads: list[float | None], head: int) -> float | None:
        """A head's number, where the run had as many stages as it ended with; the last head's everywhere."""
        if head == self.num_stages - 1:
            return heads[-1]
        return heads[head] if len(heads) == self.num_stages else None

    @cached_property
    def measured(self) -> Comparison | None:
        """The measured timeline beside the predicted one; None of a run without `--timeline`."""
        path = self.run.folder / "timeline.json"
        if not path.exists():
            return None
        recorded = load(path)
        if not recorded.events or not all(recorded.events):
            raise ValueError(f"{path} should hold actions of every stage. Found a stage without; record more steps.")
        strategy = nwise.strategy(recorded.strategy, heads=self.recipe.heads)
        flows = flows_for(strategy, len(recorded.events), self.recipe.microbatches)
        return Comparison(choose(self.recipe.schedule, flows), recorded.events, recorded.bytes_sent)

    def settings(self) -> dict[str, str]:
        """Configuration and versions, flat."""
        versions = self._state.get("versions")
        found = versions if isinstance(versions, dict) else {}
        return {**_flat(to_json(self.recipe)), **{f"version of {name}": str(value) for name, value in found.items()}}


def _is_whole(record: dict[str, Any]) -> bool:
    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    heads = [record.get(name) for name in ("loss", "accuracy")[: 1 + (record["kind"] == "test")]]
    return all(number(record.get(axis)) for axis in AXES) and all(
        isinstance(values, list) and values and all(value is None or number(value) for value in values)
        for values in heads
    )


def _scaled(value: float | None, name: str) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if name == "perplexity":
        return math.exp(value) if value < 700 else None
    return 100 * value if name == "accuracy" else value


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            found |= _flat(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(inner) if not isinstance(inner, str) else inner
    return found
