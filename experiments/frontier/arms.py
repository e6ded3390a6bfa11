"""The arms of the comparison, and the recipe of every run.

An arm is a strategy with an optimizer. All arms train one network, eight Transformer blocks, on one text, for the same number of
steps; the rate falls with the square root of the step, so a run of 500 steps is the beginning of one of 2,500.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from experiments.harness.cell import Cell
from experiments.harness.search import TRIAL_SEED, Search
from nwise.app.recipes import Adam, EmbeddedText, Gpt, Phases, Recipe, parse_phases

STAGES = 8
WIDTH = 96
STEPS = 2500
_TRIAL_STEPS = 500
_WARMUP = 100
EVERY = 125  # steps between two tests
BATCH, _LENGTH = 16, 128  # sequences in a mini-batch, tokens in a sequence
_TEXT_BYTES = 4_700_000
_ADAM_PEAK = 0.003  # of embeddings, outputs and norms, where Muon trains the rest

Optimizer = Literal["muon", "adam"]
GRIDS: dict[Optimizer, tuple[float, ...]] = {
    "muon": (0.005, 0.01, 0.02, 0.04, 0.08),
    "adam": (0.0005, 0.001, 0.002, 0.004, 0.008),
}


@dataclass(frozen=True)
class Arm:
    """A strategy with an optimizer.

    Args:
        optimizer: of the matrices of hidden layers; Adam trains the rest.
        strategy: its name, in which ``half`` and ``quarter`` stand for those steps of a run.
        all_heads: whether heads whose loss trains no stage train too, which rotating strategies need.
        extrapolate: whether every update is extrapolated.
        num_stages: into how many stages the eight blocks are cut.
        blocks: number of blocks; one for the test whether depth helps.
        predict: updates by which every forward's weights are predicted; default: none.
        head_blocks: number of blocks of each auxiliary head, before its norm and vocabulary matrix.
        head_rank: rank of an auxiliary head's vocabulary matrix; default: any.
        loss_fraction: fraction of the tokens that losses take.
        microbatches: M, where it changes what is learned; default: any, so the fastest.
        width: of the network.
    """

    optimizer: Optimizer
    strategy: str
    all_heads: bool = False
    extrapolate: bool = False
    predict: int = 0
    num_stages: int = STAGES
    blocks: int = STAGES
    head_blocks: int = 0
    head_rank: int | None = None
    loss_fraction: float = 1.0
    microbatches: int | None = None
    width: int = WIDTH

    @property
    def name(self) -> str:
        """The name in tables.

        >>> Arm("muon", "end-to-end-delay-1", extrapolate=True).name
        'muon end-to-end-delay-1, extrapolated'
        """
        parts = [f"{self.optimizer} {self.strategy}"]
        parts += ["all heads"] if self.all_heads else []
        parts += ["extrapolated"] if self.extrapolate else []
        parts += ["predicted"] if self.predict else []
        parts += [f"{self.blocks} block{'s' * (self.blocks > 1)}"] if self.blocks != STAGES else []
        parts += [f"{self.num_stages} stages"] if self.num_stages not in (STAGES, self.blocks) else []
        parts += [f"heads of {self.head_blocks}"] if self.head_blocks else []
        parts += [f"heads of rank {self.head_rank}"] if self.head_rank else []
        parts += [f"losses of {self.loss_fraction:.0%}"] if self.loss_fraction != 1 else []
        parts += [f"width {self.width}"] if self.width != WIDTH else []
        return ", ".join(parts)

    @property
    def run_name(self) -> str:
        """The name of the arm whose runs count: end-to-end training learns the same for every cut, late or not."""
        same = self.strategy.startswith("end-to-end") and self.blocks == STAGES
        return replace(self, num_stages=STAGES).name if same else self.name

    @property
    def label(self) -> str:
        """The name without the optimizer, the cut and the width."""
        return replace(self, num_stages=STAGES, width=WIDTH).name.removeprefix(f"{self.optimizer} ")

    def phases(self, steps: int) -> Phases:
        """Return the first step of every strategy of a run of so many steps, and the strategy."""
        return parse_phases(self._strategy(steps), heads="all" if self.all_heads else "live")

    def _strategy(self, steps: int) -> str:
        return self.strategy.replace("half", str(steps // 2)).replace("quarter", str(steps // 4))

    @property
    def model(self) -> Gpt:
        """The network."""
        return Gpt(
            num_stages=self.num_stages,
            blocks_per_stage=self.blocks // self.num_stages,
            width=self.width,
            head_blocks=self.head_blocks,
            head_rank=self.head_rank,
            loss_fraction=self.loss_fraction,
            sequence_length=_LENGTH,
        )

    def trial(self, rate: float) -> Recipe:
        """The short run that tries a rate, tested on withheld text."""
        return self._recipe(rate, TRIAL_SEED, _TRIAL_STEPS, withheld=0.05)

    def run(self, rate: float, seed: int) -> Recipe:
        """The run that is reported."""
        return self._recipe(rate, seed, STEPS, withheld=0.0)

    def _recipe(self, rate: float, seed: int, steps: int, *, withheld: float) -> Recipe:
        factor = _WARMUP**0.5  # the schedule peaks at warmup_steps^-0.5
        optimizer = Adam(
            lr=factor * (rate if self.optimizer == "adam" else _ADAM_PEAK),
            muon_lr=factor * rate if self.optimizer == "muon" else 0.0,
            beta2=0.98,
            eps=1e-9,
            warmup_steps=_WARMUP,
            extrapolate=self.extrapolate,
            predict=self.predict,
        )
        return Recipe(
            name="frontier",
            data=EmbeddedText(max_bytes=_TEXT_BYTES, test_limit=50_000, withheld=withheld),
            model=self.model,
            optimizer=optimizer,
            strategy=self._strategy(steps),
            heads="all" if self.all_heads else "live",
            microbatches=self.microbatches or 1,
            batch_size=BATCH,
            epochs=2,
            max_steps=steps,
            eval_every=EVERY * BATCH * _LENGTH / (0.95 * (1 - withheld) * _TEXT_BYTES),
            on_nan="ignore",
            seed=seed,
        )


def _family(optimizer: Optimizer) -> list[Arm]:
    return [
        Arm(optimizer, "end-to-end"),
        Arm(optimizer, "rotating-2", all_heads=True),
        Arm(optimizer, "end-to-end-delay-1", extrapolate=True),
        Arm(optimizer, "local"),
        Arm(optimizer, "2-wise-mean"),
        Arm(optimizer, "end-to-end-delay-1"),
        Arm(optimizer, "3-wise-mean"),
        Arm(optimizer, "end-to-end", num_stages=1, blocks=1),
    ]


# In order of worth: an interrupted evening leaves the arms that answer most.
ARMS: tuple[Arm, ...] = (
    *_family("muon"),
    Arm("muon", "end-to-end-delay-2", extrapolate=True),
    Arm("muon", "end-to-end-delay-4", extrapolate=True),
    Arm("muon", "end-to-end-delay-4"),
    Arm("muon", "rotating-2-microbatch", all_heads=True, microbatches=4),
    *_family("adam"),
    Arm("muon", "local@half,end-to-end"),
    Arm("muon", "local@quarter,2-wise-mean@half,end-to-end"),
    Arm("muon", "2-wise-mean-delay-1", extrapolate=True),
    Arm("muon", "local", head_blocks=1),
    Arm("muon", "2-wise-mean", head_blocks=1),
    Arm("muon", "deep-supervision"),
    Arm("muon", "geometric-0.5"),
    Arm("muon", "rotating-3", all_heads=True),
    Arm("muon", "hogwild-forward-least", microbatches=1),
    Arm("adam", "hogwild-forward-least", microbatches=1),
    Arm("muon", "rotating-2"),
    Arm("muon", "2-wise"),
    Arm("muon", "rotating-3"),
    Arm("muon", "3-wise"),
    Arm("muon", "local", head_blocks=2),
    Arm("muon", "2-wise-mean", num_stages=4),
    Arm("muon", "rotating-2", all_heads=True, num_stages=4),
    Arm("muon", "local", num_stages=4),
)


# Names without the optimizer, of the arms whose steps are compared with more accelerators and with other costs.
COMPARED = (
    "end-to-end",
    "end-to-end-delay-1",
    "end-to-end-delay-4",
    "rotating-2, all heads",
    "rotating-2-microbatch, all heads",
    "2-wise-mean",
    "local",
)


def arm(name: str) -> Arm:
    """Return the arm of a name.

    >>> arm("muon rotating-2, all heads").strategy
    'rotating-2'
    """
    return {one.name: one for one in ARMS}[name]


# The search for the rates, one table for each optimizer.
SEARCHES = tuple(
    Search(
        title=optimizer.capitalize(),
        grid=grid,
        trials={one.name: one.trial for one in ARMS if one.optimizer == optimizer},
    )
    for optimizer, grid in GRIDS.items()
)


def reported(arms: Sequence[Arm], rates: Mapping[str, float], seeds: int) -> list[Cell]:
    """Return the reported runs of the arms that have a rate, a seed after the other."""
    return [
        Cell(method=one.name, recipe=one.run(rates[one.name], seed))
        for seed in range(seeds)
        for one in arms
        if one.name in rates
    ]


def rates() -> dict[str, float]:
    """Return the best peak rate of every arm that was tried with all of them."""
    return {name: rate for search in SEARCHES for name, rate in search.rates().items()}
