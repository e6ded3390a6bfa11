"""Series and numbers of a run's folder, for a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nwise
from nwise.app.recipes import Phases, Recipe, joined, to_json
from nwise.app.recipes.loop import OwnLoop
from nwise.app.report.measured import Comparison
from nwise.app.training import Run
from nwise.app.training.log import load
from nwise.flow import flows_for
from nwise.schedule.ages import strategy_ages
from nwise.schedule.named import choose

AXES = {"step": "steps", "samples": "samples", "seconds": "seconds of this run"}


@dataclass(frozen=True)
class Series:
    """Numbers of one head along a run."""

    head: int  # its stage
    along: dict[str, list[float]]  # steps, samples and seconds of the values
    values: list[float | None]


@dataclass(frozen=True)
class Summary:
    """The contents of a run's folder."""

    name: str  # of the run on the page
    run: Run

    @classmethod
    def open_all(cls, folders: Sequence[Path]) -> list[Summary]:
        """Open each folder once; the summaries have distinct names.

        Raises:
            FileNotFoundError: a folder is not a run's.
            ValueError: a run has no records.
        """
        folders = list({folder.resolve(): folder for folder in folders}.values())
        names = [folder.resolve().name for folder in folders]
        summaries = []
        for folder, name in zip(folders, names, strict=True):
            summaries.append(cls(name if names.count(name) == 1 else str(folder), Run.open(folder)))
            if not summaries[-1].tests:
                raise ValueError(
                    f"{folder} should hold the records of at least one test. Found none; did the run reach its first evaluation?"
                )
        return summaries

    @cached_property
    def recipe(self) -> Recipe | OwnLoop:
        return self.run.described

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """Records of training and tests.

        Raises:
            ValueError: a record is not one that `nwise train` writes.
        """
        records = [record for record in self.run.metrics() if record["kind"] in ("train", "test")]
        if broken := [record for record in records if not _is_whole(record)]:
            raise ValueError(
                f"{self.run.folder / 'metrics.jsonl'} should hold records with {', '.join(AXES)} and numbers of every head. "
                f"Found {str(broken[0])[:60]}; remove the line."
            )
        return records

    @property
    def tests(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "test"]

    @property
    def num_stages(self) -> int:
        """Number of stages A at the last test; a resumed run can have another number than before."""
        return len(self.tests[-1]["loss"])

    @property
    def history(self) -> list[str]:
        """Notes on each resumption: what changed, and what the curves cannot show."""
        notes = [
            f"resumed from step {entry.get('step')}" + (f": {entry['changes']}" if entry.get("changes") else "")
            for entry in self.run.state.get("resumed", [])
            if isinstance(entry, dict)
        ]
        other = [record["step"] for record in self.records if len(record["loss"]) != self.num_stages]
        if other:
            notes.append(f"another number of stages up to step {max(other)}; only the last head is shown there")
        return notes

    @cached_property
    def phases(self) -> Phases:
        """The first step of every strategy, and the strategy; epochs are turned into steps by means of the records."""
        step = self.tests[-1]["step"]
        epoch = self.tests[-1].get("epoch")
        return self.recipe.phases(max(1, round(step / epoch)) if epoch else 1)

    @property
    def strategy(self) -> str:
        """The name of the recipe's strategy, or of all that follow each other, with their steps."""
        return joined(self.phases)

    @property
    def title(self) -> str:
        return f"{self.recipe.name}, {self.strategy}, A = {self.num_stages}, M = {self.recipe.microbatches}"

    def series(self, kind: str, name: str) -> list[Series]:
        """Return the numbers of every head that has any.

        Args:
            kind: train or test.
            name: loss, accuracy (in per cent), or perplexity.
        """
        every = (self.head(kind, name, k) for k in range(self.num_stages))
        return [series for series in every if any(value is not None for value in series.values)]

    def head(self, kind: str, name: str, k: int) -> Series:
        """Return the numbers of one head, with None where a record has none; see `series`."""
        records = [record for record in self.records if record["kind"] == kind]
        along = {axis: [record[axis] for record in records] for axis in AXES}
        values: list[float | None] = []
        for record in records:
            heads = record["loss" if name == "perplexity" else name]
            # Before a resume the run may have had another number of stages; only the last head is the same then.
            last = k == self.num_stages - 1
            same = len(heads) == self.num_stages
            values.append(_scale(heads[-1] if last else heads[k] if same else None, name))
        return Series(k, along, values)

    @cached_property
    def measured(self) -> Comparison | None:
        """The measured and the predicted timeline; None for a run without `--timeline`."""
        path = self.run.folder / "timeline.json"
        if not path.exists():
            return None
        recorded = load(path)
        if not recorded.events or not all(recorded.events):
            raise ValueError(f"{path} should hold actions of every rank. Found a rank without; record more steps.")
        strategy = nwise.strategy(recorded.strategy, heads=self.recipe.heads)
        ranks = {action.stage: rank for rank, events in enumerate(recorded.events) for _, action, _, _ in events}
        flows = flows_for(strategy, len(ranks), self.recipe.microbatches)
        placement = tuple(ranks[k] for k in range(len(ranks)))
        schedule = choose(self.recipe.schedule, flows, placement, strategy_ages(strategy, flows))
        return Comparison(schedule, recorded.events, recorded.bytes_sent)

    def settings(self) -> dict[str, str]:
        """Return configuration and versions as flat text."""
        versions = self.run.state.get("versions")
        items = versions.items() if isinstance(versions, dict) else ()
        return {**_flatten(to_json(self.recipe)), **{f"version of {name}": str(value) for name, value in items}}


def _is_whole(record: dict[str, Any]) -> bool:
    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    names = ("loss", "accuracy") if record["kind"] == "test" else ("loss",)
    return all(number(record.get(axis)) for axis in AXES) and all(
        isinstance(values, list) and values and all(value is None or number(value) for value in values)
        for values in map(record.get, names)
    )


def _scale(value: float | None, name: str) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if name == "perplexity":
        return math.exp(value) if value < 700 else None
    return 100 * value if name == "accuracy" else value


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return flat
