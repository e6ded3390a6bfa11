"""The command that lets easy samples exit early."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.markup import escape

from nwise.app.cli.output import Output, note, print_json
from nwise.app.data import Images
from nwise.app.report.display import numbers_table
from nwise.app.report.figures import check_format, exits_figure
from nwise.app.training.calibrate import Outcome, Seen, Work, calibrate, count_work, cross_validated, observe
from nwise.app.training.run import Run
from nwise.checkpoint import replacing
from nwise.checks import check_at_least
from nwise.exits import EarlyExit
from nwise.progress import with_progress_bar

__all__ = ["DROPS", "ExitsCommand"]

# Accuracy that may be lost at the points of the figure, in percentage points.
DROPS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_TIMED_SAMPLES = 1000  # of the test set, at most


@dataclass(frozen=True, kw_only=True)
class ExitsCommand:
    """Let samples exit at the first confident head. Each half of the test set chooses the threshold of the other.

    Example: nwise exits runs/digits-2-wise-001 --drop 0.5
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")] = ()
    """Folders of runs that classify images."""
    drop: float = 0.5
    """Accuracy that may be lost, in percentage points."""
    batch_size: int = 64
    """Samples in a batch when time is measured; 1 for single samples."""
    rounds: int = 5
    """Number of time measurements, each without and with exits; 0 for none."""
    out: Path | None = None
    """File to draw accuracy over work into: .png, .svg or .pdf."""
    export: Path | None = None
    """File to save the network with its exits into, .pt; `torch.load(FILE, weights_only=False)` returns a module."""
    device: str = "auto"
    """Device to run on."""
    json: bool = False
    """Print only JSON."""

    def run(self, console: Output) -> None:
        results: dict[str, _Result] = {}
        networks = []
        for run in self._check():
            pipe, data = run.trained(self.device)
            assert isinstance(data, Images)
            if len(data) < 2:
                raise ValueError(
                    f"{run.folder} should have at least two test images, one for each half. Found {len(data)}."
                )
            if not pipe.needed_heads():
                raise ValueError(
                    f"{run.folder} should have trained heads. Found none; train with `--strategy 2-wise`, `local` or "
                    "`deep-supervision`, or with `--heads all`."
                )
            example = data.batch(torch.arange(1))[0]
            work = count_work(pipe, example.to(next(pipe.parameters()).device))
            seen = observe(pipe, data, 256)
            thresholds = calibrate(seen, work, seen.accuracy - self.drop / 100)
            networks.append(EarlyExit(pipe.stages, pipe.heads, thresholds, "classes"))
            seconds = _measure(networks[-1], data, self.batch_size, self.rounds) if self.rounds and thresholds else None
            result = cross_validated(seen, work, self.drop / 100)
            results[str(run.folder)] = _Result(run.recipe.strategy, seen, work, thresholds, result, seconds)
        if self.json:
            print_json({folder: result.as_json() for folder, result in results.items()})
        else:
            _print(results, console)
        if self.out is not None:
            curves = {
                f"{result.strategy}, {folder}": [(work, 100 * share) for work, share in result.curve()]
                for folder, result in results.items()
            }
            exits_figure(curves, self.out)
        if self.export is not None:
            if not networks[0].thresholds:
                note(f"{self.export}: exits would save no work at this accuracy, so the network has none.")
            with replacing(self.export) as partial, partial.open("wb") as file:
                torch.save(networks[0].cpu(), file)

    def _check(self) -> list[Run]:
        """Check everything that can be checked before any work; return the runs."""
        check_at_least(1, batch_size=self.batch_size)
        check_at_least(0, rounds=self.rounds)
        if self.out is not None:
            check_format(self.out)
        if not 0 <= self.drop <= 100:
            raise ValueError(f"`drop` should be from 0 to 100 percentage points. Found {self.drop}.")
        if self.export is not None and (self.export.suffix != ".pt" or len(self.folders) > 1):
            raise ValueError(f"`export` should be a .pt file for a single run. Found {str(self.export)!r}.")
        if not self.folders:
            raise ValueError("`RUN` should name the folder of at least one run. Found none.")
        runs = [Run.open(folder) for folder in self.folders]
        if texts := [run.folder for run in runs if run.recipe.quality == "perplexity"]:
            raise ValueError(f"{texts[0]} should classify images for early exits. Found a run on text; leave it out.")
        for path in (self.out, self.export):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        return runs


@dataclass(frozen=True)
class _Result:
    strategy: str
    seen: Seen
    work: Work
    thresholds: dict[int, float]  # calibrated on the whole test set, for use on other samples
    outcome: Outcome  # of each half of the test set with the thresholds of the other half
    seconds: dict[str, float] | None

    @property
    def heads(self) -> dict[int, float]:
        """Share of right answers of every head, by stage."""
        return dict(zip(self.seen.stages, self.seen.right.double().mean(0).tolist(), strict=True))

    def curve(self) -> list[tuple[float, float]]:
        """Return points of (share of the main network's work, accuracy), the first one without exits."""
        points = [cross_validated(self.seen, self.work, drop / 100) for drop in DROPS]
        return [(1.0, self.seen.accuracy), *((point.work, point.accuracy) for point in points)]

    def as_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.seen.accuracy,
            "heads": self.heads,
            "exits": dataclasses.asdict(self.outcome),
            "curve": self.curve(),
            "thresholds": self.thresholds,
            "work": dataclasses.asdict(self.work),
            "seconds": self.seconds,
        }


def _print(results: dict[str, _Result], console: Output) -> None:
    rows = []
    for folder, result in results.items():
        seconds, exits = result.seconds, result.outcome
        saved = "–" if seconds is None else f"{100 * (1 - seconds['exits'] / seconds['whole']):.0f} %"
        accuracies = [f"{100 * accuracy:.2f} %" for accuracy in (result.seen.accuracy, exits.accuracy)]
        rows.append([escape(folder), *accuracies, f"{100 * (1 - exits.work):.0f} %", saved])
    console.print(numbers_table(None, ("run", "accuracy", "with exits", "work saved", "time saved"), rows))
    if len(results) > 1:
        return
    rows = []
    for (k, right), share in zip(result.heads.items(), exits.leaving, strict=True):
        last = k == result.seen.stages[-1]
        bound = "–" if last else f"{result.thresholds[k]:.6g}" if k in result.thresholds else "off"
        rows.append(["output" if last else f"stage {k}", f"{100 * right:.2f} %", bound, f"{100 * share:.1f} %"])
    console.print(numbers_table(None, ("exit", "accuracy of its head", "threshold", "samples that leave"), rows))


def _measure(network: EarlyExit, data: Images, batch_size: int, rounds: int) -> dict[str, float]:
    """Return the seconds to answer the first samples, without exits (whole) and with them (exits), medians over rounds."""
    count = min(len(data), _TIMED_SAMPLES)
    device = next(network.parameters()).device
    rows = torch.arange(count).split(batch_size)
    batches = [data.batch(some)[0].to(device) for some in rows]
    whole = EarlyExit(network.stages, network.heads, {}, "classes")

    def seconds(module: EarlyExit) -> float:
        began = time.perf_counter()
        for x in batches:
            module(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    # Both take turns, so a slow spell of the machine meets both. The first round warms up and does not count.
    turns = with_progress_bar(range(rounds + 1), "timing")
    with torch.no_grad():
        times = [(seconds(whole), seconds(network)) for _ in turns]
    without, with_exits = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {"whole": without, "exits": with_exits}
