"""The runtime of one process: executes an order of actions, stage after stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nwise.flow import Flow
from nwise.microbatch import Batch
from nwise.runtime.worker import Workable, Worker, losses_of, passes_of
from nwise.schedule.actions import Action, Kind


def execute(
    stages: Sequence[Workable],
    order: Sequence[Action],
    flows: Sequence[Flow],
    batch: Batch,
    on_action: Callable[[Action], None] | None = None,
) -> Tensor:
    """Run one mini-batch and fill every ``.grad``.

    Args:
        stages: the stages.
        order: every computation of the mini-batch, none before what it needs (`Schedule.one_process`).
        flows: the flow of every micro-batch.
        batch: the data.
        on_action: called after each action, to watch or to count.

    Returns:
        The losses, ``[A]``; nan where a head did not run.
    """
    passes = passes_of(order)
    workers = [Worker(stage, flows, batch, passes) for stage in stages]
    workers[0].inputs.update(enumerate(batch.inputs))
    try:
        for action in order:
            k, m = action.stage, action.microbatch
            made = workers[k].run(action)
            if action.kind is Kind.FORWARD:
                if k + 1 < len(workers):
                    workers[k + 1].inputs[m] = made  # type: ignore[assignment]
            elif action.message is not None:
                workers[k - 1].messages.setdefault(m, {})[action.message] = made
            if on_action is not None:
                on_action(action)
    finally:
        for stage in stages:
            stage.clear()
    return losses_of([worker.loss for worker in workers])
