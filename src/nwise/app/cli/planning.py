"""The command `nwise plan`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.table import Table

from nwise.app.cli.costs import PRESETS, parse_costs
from nwise.app.cli.output import OK, Output, print_json
from nwise.app.data import steps_per_epoch
from nwise.app.recipes import recipe
from nwise.app.report.verdict import verdict
from nwise.app.training.build import measurable, pick_device
from nwise.checks import check_at_least, check_limits
from nwise.flow import Flow
from nwise.planning.profiling import Profile, profile
from nwise.progress import progress_bar
from nwise.schedule import Costs, DoesNotFit, methods
from nwise.schedule.baselines import method_flows
from nwise.schedule.bounds import stage_work
from nwise.schedule.partitions import partition, stage_costs
from nwise.schedule.placement import balanced
from nwise.strategies import strategy

_GIB = 2.0**30
_DEFAULT = "transformer"
_LEGEND = """* recommended for its speed, whatever its quality; speed: step of the best end-to-end pipeline divided by this one's
bound: distance from the shortest possible step; held: micro-batches in flight on a stage"""


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Find the fastest strategy and number of micro-batches; compare them with GPipe, 1F1B and zero-bubble at their best.

    Example: nwise plan --recipe digits --devices 4
    """

    recipe: str | None = None
    """Recipe to plan for: nwise measures its network on this machine and cuts it into balanced stages."""
    costs: str | None = None
    """Or costs of a whole mini-batch in one stage: transformer (a head is half a forward; the default), paper (free heads), a
    list like forward=1,head=0.5,input_grad=1,weight_grad=1,overhead=0.02 (per stage: head=0:0.5:0.5:1), or a JSON file."""
    devices: Annotated[int, tyro.conf.arg(aliases=["--stages"])] = 4
    """Accelerators, one stage each, A."""
    memory: float | None = None
    """Memory limit of a device, GiB."""
    latency: float | None = None
    """Latency of every message: seconds; with `--costs`, in their unit of time (of transformer and paper: a stage's forward)."""
    bandwidth: float | None = None
    """Bandwidth of every link: GB per second; with `--costs`, `message_bytes` per unit of time. Without `message_bytes`, the
    activations of a mini-batch count as 1: for 25 MB/s, 2 MiB and slots of 0.1 s it is 25e6 * 0.1 / 2**21 = 1.2."""
    strategies: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--strategy"])] = methods.STRATEGIES
    """Strategies to try, separated by spaces. rotating-2: a stage learns from its own and the next loss in turn;
    rotating-2-microbatch: by micro-batch."""
    microbatches: tuple[int, ...] = ()
    """Numbers of micro-batches M to try; default: powers of two up to 32 and the batch size."""
    batch_size: int | None = None
    """Samples in a mini-batch; default: the recipe's."""
    rounds: int = 5
    """Number of measurements, with `--recipe`."""
    device: str = "auto"
    """Device to measure on."""
    json: bool = False
    """Print only JSON: the plan."""

    def run(self, console: Output) -> int:
        if self.recipe is not None and self.costs is not None:
            raise ValueError(
                "One of `recipe` and `costs` should be given: nwise measures a recipe and takes costs literally. Found both."
            )
        check_at_least(1, devices=self.devices, rounds=self.rounds)
        check_limits(batch_size=self.batch_size)
        for name, number in (("memory", self.memory), ("bandwidth", self.bandwidth)):
            if number is not None and not number > 0:
                raise ValueError(f"`{name}` should be above 0. Found {number}.")
        for name in self.strategies:
            strategy(name)
        Costs(1, 0, 1, 1, **self._links())  # checks them
        costs, measured, size = self._parse_costs() if self.recipe is None else self._measure(self.recipe)
        try:
            plan = methods.time_methods(
                costs,
                self.devices,
                microbatches=self._microbatches(size),
                strategies=self.strategies,
                memory=None if self.memory is None else self.memory * _GIB,
                progress=progress_bar("planning", shown=not self.json),
            )
        except DoesNotFit as error:
            raise ValueError(error.message("GiB", _GIB)) from error
        lines = verdict(plan) if measured is None else verdict(plan, lambda seconds: f"{1e3 * seconds:.4g} ms")
        if self.bandwidth is not None and measured is None:
            lines += self._free_messages(costs, plan.recommended.period)
        if self.json:
            print_json(self._as_json(plan, measured, lines))
            return OK
        console.print(self._table(plan, narrow=console.width < 76))
        console.say(_LEGEND)
        if plan.skipped:
            names = ", ".join(f"{name} ({size / 2**20:,.4g} MiB)" for name, size in plan.skipped.items())
            console.say(f"Too large at any M: {names}.")
        if measured is not None:
            self._print_cut(console, plan, measured)
        for line in lines:
            console.say(f"- {line}")
        return OK

    def _microbatches(self, batch_size: int | None) -> Sequence[int]:
        for m in self.microbatches:
            if m < 1 or (batch_size is not None and m > batch_size):
                limit = "at least 1" if batch_size is None else f"from 1 to the batch size of {batch_size}"
                raise ValueError(f"`microbatches` should be {limit}. Found {m}.")
        return self.microbatches or [m for m in (1, 2, 4, 8, 16, 32) if batch_size is None or m <= batch_size]

    def _links(self) -> dict[str, float]:
        links = {}
        if self.latency is not None:
            links["latency"] = self.latency
        if self.bandwidth is not None:
            links["bandwidth"] = self.bandwidth * (1 if self.recipe is None else 1e9)
        return links

    def _parse_costs(self) -> tuple[methods.CostsOf, None, int | None]:
        costs = parse_costs(self.costs or _DEFAULT, *(() if self.memory is None else ("activation_bytes",)))
        costs = dataclasses.replace(costs, **self._links())
        return (lambda flows, m: costs.split_in(m).cut_in(len(flows[0].stages) // self.devices)), None, self.batch_size

    def _free_messages(self, costs: methods.CostsOf, period: float) -> list[str]:
        """Say so if a bandwidth, perhaps in another unit, limits nothing."""
        assert self.bandwidth is not None
        one = costs(method_flows("end-to-end", self.devices, 1)[0], 1)
        time = max(one.per_stage("message_bytes", self.devices)) / self.bandwidth
        if time > 1e-3 * period:
            return []
        return [
            f"The bandwidth of {self.bandwidth:g} limits nothing: a message takes {time:.2g} of a step of {period:.4g}. With "
            "`--costs` it counts `message_bytes`, or else messages of a whole mini-batch, per unit of time."
        ]

    def _measure(self, name: str) -> tuple[methods.CostsOf, Profile, int]:
        config = recipe(name)
        changes: dict[str, Any] = {"device": self.device, "microbatches": 1}
        config = dataclasses.replace(config, **changes, batch_size=self.batch_size or config.batch_size)
        data, _ = config.load()
        steps_per_epoch(len(data), config.batch_size)  # raises if a mini-batch is larger than the data
        measured = profile(
            measurable(config, data, pick_device(config)),
            self._microbatches(config.batch_size),
            rounds=self.rounds,
            progress=progress_bar("measuring", shown=not self.json),
        )

        def costs(flows: Sequence[Flow], m: int) -> Costs:
            pieces = measured.pieces[m]
            return stage_costs(pieces, partition(pieces, flows), flows, **self._links())

        return costs, measured, config.batch_size

    def _table(self, plan: methods.Methods, *, narrow: bool) -> Table:
        plural = "s" if self.devices > 1 else ""
        table = Table(title=f"{self.devices} device{plural}, each method at its best M", title_justify="left")
        table.add_column("method", no_wrap=True, min_width=max(len(option.name) for option in plan.options) + 2)
        rows = [self._row(option, plan.speedup(option), narrow=narrow) for option in plan.options]
        for heading in rows[0]:
            table.add_column(heading, justify="right", no_wrap=True)
        for option, row in zip(plan.options, rows, strict=True):
            chosen = option == plan.recommended
            table.add_row(f"{'*' if chosen else ' '} {option.name}", *row.values(), style="bold" if chosen else None)
        return table

    def _row(self, option: methods.Option, speed: float, *, narrow: bool) -> dict[str, str]:
        """Return a method's cells in the table, by heading."""
        row = {"M": str(option.num_microbatches)}
        if self.recipe is None:
            row["slots" if (self.costs or _DEFAULT) in PRESETS else "time"] = f"{option.period:.4g}"
        else:
            row["ms"] = f"{1e3 * option.period:.4g}"
        row["speed"] = "–" if math.isnan(speed) else f"{speed:.2f}"
        if not narrow:
            over = methods.ratio(option.period, option.timed.lower_bound) - 1
            row["bound"] = "optimal" if over < 1e-9 else f"+{100 * over:.1f}%"
            row["held"] = str(max(option.timed.in_flight))
        if self.recipe is not None or self.memory is not None:
            row["MiB"] = f"{max(option.timed.peak_bytes) / 2**20:,.4g}"
        return row

    def _print_cut(self, console: Output, plan: methods.Methods, measured: Profile) -> None:
        chosen = plan.recommended
        pieces = measured.pieces[chosen.num_microbatches]
        starts = partition(pieces, [flow for batch in chosen.timed.schedule.flows for flow in batch[:1]])
        names = [piece.name for piece in pieces]
        noise = f"rounds differ by {100 * measured.spread:.1f} %, and smaller differences mean nothing"
        if math.isnan(measured.spread):
            noise = "one round, so the noise is unknown"
        cut = (
            f"stages begin at the start and at {', '.join(names[k] for k in starts[1:])}" if starts[1:] else "one stage"
        )
        console.say(
            f"Measured on {measured.device}, mini-batches of {measured.batch_size}; {noise}. Cut for {chosen.name}: "
            f"{cut}."
        )
        if placement := self._placement(plan, measured):
            console.say(
                f"Or keep the recipe's {len(measured.starts)} stages, balanced over the devices: --placement {placement}"
            )

    def _placement(self, plan: methods.Methods, measured: Profile) -> str | None:
        """Return the placement by work of the recipe's own stages; None if these are too few."""
        if not 1 < self.devices < len(measured.starts):
            return None
        m = plan.recommended.num_microbatches
        flows = method_flows(plan.recommended.name, len(measured.starts), m)
        costs = stage_costs(measured.pieces[m], measured.starts, [batch[0] for batch in flows])
        return ",".join(map(str, balanced(stage_work(flows, costs), self.devices)))

    def _as_json(self, plan: methods.Methods, measured: Profile | None, lines: list[str]) -> dict[str, Any]:
        record: dict[str, Any] = {
            "devices": self.devices,
            "recommended": plan.recommended.name,
            "options": [{**option.as_json(), "speedup": plan.speedup(option)} for option in plan.options],
            "too_large": plan.skipped,
            "verdict": lines,
        }
        if measured is not None:
            record["placement"] = self._placement(plan, measured)
            record["profile"] = measured.as_json()
        return record
