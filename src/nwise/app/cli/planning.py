"""The command `nwise plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any

import tyro

import nwise
from nwise.app.cli.costs import parse_costs
from nwise.app.cli.output import Output, print_json
from nwise.app.data import steps_per_epoch
from nwise.app.recipes import recipe
from nwise.app.training.build import measurable, pick_device
from nwise.checks import check_at_least, check_limits
from nwise.planning.plans import STRATEGIES
from nwise.planning.profiling import Profile, numbers_to_try, profile
from nwise.progress import progress_bar
from nwise.schedule import Costs, DoesNotFit
from nwise.strategies import strategy

_GIB = 2.0**30
_DEFAULT = "transformer"


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Find the fastest strategy, cut and number of micro-batches; compare them with pipelines at their best and one device alone.

    Example: nwise plan --recipe digits --devices 4
    """

    recipe: str | None = None
    """Recipe to plan for: nwise measures its network on this machine and cuts it for the devices."""
    costs: str | None = None
    """Or costs of a whole mini-batch in one stage: transformer (a head is half a forward; the default), paper (free heads), a
    list like forward=1,head=0.5,input_grad=1,weight_grad=1,overhead=0.02 (per stage: head=0:0.5:0.5:1), or a JSON file."""
    devices: Annotated[str, tyro.conf.arg(aliases=["--stages"])] = "4"
    """Accelerators, one stage each, A; or the speed of each, relative to this machine, as in 1:2."""
    memory: str | None = None
    """Memory limit of a device, GiB; or one for each, as in 8:16."""
    latency: float | None = None
    """Latency of every message: seconds; with `--costs`, in their unit of time (of transformer and paper: a stage's forward)."""
    bandwidth: float | None = None
    """Bandwidth of every link: GB per second; with `--costs`, `message_bytes` per unit of time. Without `message_bytes`, the
    activations of a mini-batch count as 1: for 25 MB/s, 2 MiB and slots of 0.1 s it is 25e6 * 0.1 / 2**21 = 1.2."""
    strategies: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--strategy"])] = STRATEGIES
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

    def run(self, console: Output) -> None:
        if self.recipe is not None and self.costs is not None:
            raise ValueError(
                "One of `recipe` and `costs` should be given: nwise measures a recipe and takes costs literally. Found both."
            )
        check_at_least(1, rounds=self.rounds)
        check_limits(batch_size=self.batch_size)
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"`bandwidth` should be above 0. Found {self.bandwidth}.")
        for name in self.strategies:
            strategy(name)
        bandwidth = (self.bandwidth or inf) * (1 if self.recipe is None else 1e9)
        Costs(1, 0, 1, 1, latency=self.latency or 0.0, bandwidth=bandwidth)  # checks them
        devices = self._devices()
        needed = () if self.memory is None else ("activation_bytes",)
        source = parse_costs(self.costs or _DEFAULT, *needed) if self.recipe is None else self._measured(self.recipe)
        ms = numbers_to_try(self.microbatches or None, self.batch_size) if isinstance(source, Costs) else None
        network: dict[str, Any] = {"latency": self.latency, "bandwidth": bandwidth}
        try:
            plans = nwise.plan(
                source, devices=devices, strategy=self.strategies, microbatches=ms, **network, report=None
            )
        except DoesNotFit as error:
            raise ValueError(error.message("GiB", _GIB)) from error
        if self.json:
            measured = {"profile": source.as_json()} if isinstance(source, Profile) else {}
            print_json(plans.as_json() | measured)
            return
        console.say(str(plans))
        if isinstance(source, Costs) and self.bandwidth is not None:
            _say_if_free(console, source, self.bandwidth, plans.recommended.seconds)

    def _devices(self) -> list[nwise.Device]:
        """Return the devices: some number of equal ones, or one for each of several speeds."""
        try:
            speeds, memory = (
                [float(part) for part in text.split(":")] for text in (self.devices, self.memory or str(inf))
            )
        except ValueError as error:
            raise ValueError(
                "`devices` should be a number, or speeds such as 1:2, and `memory` a number of GiB, or one for each device. "
                f"Found {self.devices!r} and {self.memory!r}."
            ) from error
        if len(speeds) == 1:
            check_at_least(1, devices=int(speeds[0]) if speeds[0].is_integer() else speeds[0])
            speeds = [1.0] * int(speeds[0])
        if len(memory) == 1:
            memory *= len(speeds)
        if len(memory) != len(speeds):
            raise ValueError(
                f"`memory` should be one number, or one for each of the {len(speeds)} devices. Found {self.memory!r}."
            )
        return [nwise.Device(speed, size * _GIB) for speed, size in zip(speeds, memory, strict=True)]

    def _measured(self, name: str) -> Profile:
        given = recipe(name)
        batch_size = self.batch_size or given.batch_size
        config = replace(given, device=self.device, microbatches=1, batch_size=batch_size)
        data, _ = config.load()
        steps_per_epoch(len(data), batch_size)  # raises if a mini-batch is larger than the data
        network = measurable(config, data, pick_device(config))
        bar = progress_bar("measuring", shown=not self.json)
        return profile(network, self.microbatches or None, rounds=self.rounds, progress=bar)


def _say_if_free(console: Output, costs: Costs, bandwidth: float, period: float) -> None:
    """Say so if a bandwidth, perhaps in another unit, limits nothing."""
    sizes = costs.message_bytes if isinstance(costs.message_bytes, tuple) else (costs.message_bytes,)
    time = max(sizes) / bandwidth
    if time <= 1e-3 * period:
        console.say(
            f"- The bandwidth of {bandwidth:g} limits nothing: a message takes {time:.2g} of a step of {period:.4g}. "
            "With `--costs` it counts `message_bytes`, or else messages of a whole mini-batch, per unit of time."
        )
