"""Figure 1 of the paper: Hogwild's parameters in three accelerators, and the mini-batch whose forward and backward differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from experiments.harness.claims import Claim, exact
from nwise.app.report.figures import COLOURS, new_figure
from nwise.app.report.grid import KIND_COLOURS
from nwise.pipeline import Pipeline
from nwise.schedule import PAPER, Action, Kind, simulate
from nwise.schedule.find import method_schedule
from nwise.strategies import Hogwild

STAGES, FOURTH = 3, 3  # the paper's accelerators, and the mini-batch of its caption, from 0
_SLOTS = 14


class Read(NamedTuple):
    """The updates that a stage had made at the forward and at the backward pass of a mini-batch."""

    forward: int
    backward: int


def trained(num_stages: int = STAGES, steps: int = 12) -> tuple[list[Read], list[int]]:
    """Train a network with `Hogwild`; return what its first stage read for every mini-batch, and the staleness of all stages."""
    stages = [nn.Linear(2, 2) for _ in range(num_stages)]
    pipe = Pipeline(stages, [None] * (num_stages - 1), nn.functional.mse_loss, Hogwild())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    updates, forwards, backwards = 0, list[int](), list[int]()

    def note(action: Action) -> None:
        if action.stage == 0:
            (forwards if action.kind is Kind.FORWARD else backwards).append(updates)

    pipe.on_action = note
    for _ in range(steps):
        pipe.step(torch.ones(1, 2), target=torch.zeros(1, 2))
        updates += stages[0].weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    return [Read(*both) for both in zip(forwards, backwards, strict=False)], [int(age) for age in pipe.staleness[:, 0]]


def claims() -> list[Claim]:
    """Return the claims of the caption, and ours about the ages that follow."""
    reads, ages = trained()
    fourth = reads[FOURTH]
    texts = (
        ("the first of three accelerators has made no update when it reads the fourth mini-batch", fourth.forward, 0),
        ("it has made three updates when it runs that mini-batch's backward pass", fourth.backward, 3),
    )
    found = [
        exact(text, "figure 1", value, holds=value == wanted, wanted=f"{wanted}", unit="updates")
        for text, value, wanted in texts
    ]
    for k, age in enumerate(ages):
        wanted = 2 * (STAGES - 1 - k)
        text = f"later gradients of stage {k} of {STAGES} are {wanted} updates old"
        found.append(exact(text, "figure 1, derived", age, holds=age == wanted, wanted=f"{wanted}", unit="updates"))
    return found


def draw(path: Path) -> None:
    """Draw the first slots, with the parameters that every action uses, and both ways of the fourth mini-batch."""
    from matplotlib.patches import Patch, Rectangle

    schedule = method_schedule("hogwild", num_stages=STAGES, num_microbatches=1, costs=PAPER)
    events = [e for e in simulate(schedule, cycles=_SLOTS).events if e.end > e.start and e.end <= _SLOTS]
    with new_figure(9.6, 3.6, path) as figure:
        axes = figure.subplots()
        updates = Counter[int]()
        middles: dict[tuple[bool, int], float] = {}
        for event in events:
            k, is_forward = event.action.stage, event.action.kind is Kind.FORWARD
            fourth = event.batch == FOURTH
            box = Rectangle(
                (event.start + 0.03, k - 0.36), 0.94, 0.72,
                facecolor=KIND_COLOURS[Kind.FORWARD if is_forward else Kind.BOTH], alpha=1.0 if fourth else 0.5,
                edgecolor="#222222" if fourth else "#ffffff", lw=1.4 if fourth else 0.8,
            )  # fmt: skip
            axes.add_patch(box)
            middle = event.start + 0.5
            weight = "bold" if fourth else "normal"
            axes.text(middle, k - 0.13, f"{event.batch + 1}", ha="center", va="center", fontsize=9, fontweight=weight)
            axes.text(middle, k + 0.18, rf"$\theta_{{{updates[k]}}}$", ha="center", va="center", fontsize=9)
            updates[k] += not is_forward
            if fourth:
                middles[is_forward, k] = middle
        arrow = {"arrowstyle": "-|>", "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
        for k in range(1, STAGES):
            for is_forward, (a, b) in ((True, (k - 1, k)), (False, (k, k - 1))):
                colour, side = (COLOURS[5], 0.36) if is_forward else (COLOURS[3], -0.36)
                ends = (middles[is_forward, b], b - side), (middles[is_forward, a], a + side)
                axes.annotate("", *ends, arrowprops={**arrow, "color": colour})
        for is_forward, text in ((True, "activations with $\\theta_0$"), (False, "gradient with $\\theta_3$")):
            at = middles[is_forward, 0]
            note = {"arrowstyle": "-|>", "color": "#222222"}
            axes.annotate(text, (at, -0.38), (at, -0.85), ha="center", va="center", fontsize=9, arrowprops=note)
        names = [f"accelerator {k + 1}" for k in range(STAGES)]
        axes.set(xlim=(0, _SLOTS), ylim=(STAGES - 0.5, -1.1), yticks=range(STAGES), xticks=range(0, _SLOTS + 1, 2))
        axes.set_yticklabels(names)
        axes.tick_params(length=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(
            "slots; a cell shows the mini-batch and the parameters in memory, which a backward pass then updates"
        )
        kinds = {"forward": KIND_COLOURS[Kind.FORWARD], "backward and update": KIND_COLOURS[Kind.BOTH]}
        patches = [Patch(facecolor=colour, label=name) for name, colour in kinds.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
