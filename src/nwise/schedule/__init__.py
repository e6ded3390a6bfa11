"""Schedules as data: their order, exact period, lower bounds, simulation and validation, and the paper's timing model.

    strategy  ->  flow  ->  actions  ->  order  ->  schedule

A strategy is a credit matrix. Its flow (`nwise.flow`) says which messages cross each boundary and which passes each stage
makes, hence the actions. An order puts the actions of each stage into a list, and the lists are the schedule: one value, which
is validated, timed, bounded, drawn and run.

Read the folder in this order:

    actions                 the values: an action of a stage
    placement, ages         the rank of every stage, and how old gradients may be
    graph                   the tasks of a cycle and what each needs
    schedule, sweep         the order of the tasks on every rank; how lists wait for each other
    orders, greedy          the rules that make lists
    costs, memory           the time of every action, and the bytes of every rank
    clock, period           the self-timed run of a schedule, and its exact period
    bounds                  the lower bound on the period of any order
    named, find             orders by name, and the best of several
    simulation, validation  times of a run; checks before a run
    paper                   the paper's formula, for comparison

`nwise schedule --strategy 2-wise --stages 4 --microbatches 2` draws 4 stages, 2 micro-batches (the digit) and the paper's
costs: one column per slot, two mini-batches, the first from an empty pipeline. A head costs nothing and comes right after its
forward. A mini-batch takes 6 slots::

    stage 0   F0 F1  . W0  . W1 F0 F1  . W0  . W1
    stage 1    . F0 I0 F1 I1 W0 W1 F0 I0 F1 I1 W0 W1
    stage 2    .  . F0 I0 F1 I1 W0 W1 F0 I0 F1 I1 W0 W1
    stage 3    .  .  . F0 B0 F1 B1  .  . F0 B0 F1 B1

A stage sends the gradient of its own loss back (I), and updates its weights with the gradient of the next stage's loss (W).
On the last stage both gradients come from the same loss, so one pass (B) is enough. Stages are not synchronised: stage 0
begins its second mini-batch before stage 1 has ended its first.

>>> import nwise.schedule as schedule
>>> found = schedule.best("2-wise", num_stages=4, num_microbatches=2, costs=schedule.PAPER)
>>> print(*found.actions[3])
RX3(0) F3(0) H3(0) B3(0.0) SG3(0.0) RX3(1) F3(1) H3(1) B3(1.0) SG3(1.0) U3
"""

from functools import partial
from typing import TYPE_CHECKING

from nwise.lazy import member

if TYPE_CHECKING:
    from nwise.schedule.actions import Action, Kind
    from nwise.schedule.costs import PAPER, TRANSFORMER, Costs
    from nwise.schedule.find import DoesNotFit, baseline, best
    from nwise.schedule.named import BASELINES
    from nwise.schedule.paper import Slot, fit_slot, paper_time
    from nwise.schedule.schedule import Schedule, arrange
    from nwise.schedule.simulation import Timeline, simulate
    from nwise.schedule.validation import validate

__all__ = [
    "BASELINES",
    "PAPER",
    "TRANSFORMER",
    "Action",
    "Costs",
    "DoesNotFit",
    "Kind",
    "Schedule",
    "Slot",
    "Timeline",
    "arrange",
    "baseline",
    "best",
    "fit_slot",
    "paper_time",
    "simulate",
    "validate",
]

# The submodule that each name comes from.
_PLACES = {
    name: place
    for place, names in {
        "actions": ("Action", "Kind"),
        "costs": ("PAPER", "TRANSFORMER", "Costs"),
        "find": ("DoesNotFit", "baseline", "best"),
        "named": ("BASELINES",),
        "paper": ("Slot", "fit_slot", "paper_time"),
        "schedule": ("Schedule", "arrange"),
        "simulation": ("Timeline", "simulate"),
        "validation": ("validate",),
    }.items()
    for name in names
}

__getattr__ = partial(member, __name__, _PLACES)
