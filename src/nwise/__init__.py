"""nwise: train networks in stages, each loss's gradient travelling through only N of them.

A map: each line imports only from those below it, and ends with what it hands up::

    app                          the command `nwise`: recipes, data, the paper's networks, trainer, reports
    training                     clipping, guards, optimizers for late gradients
    checkpoint    planning       a run in files; a cut for given devices
    pipeline                     what users call                                            -> Pipeline
    program       exits          arguments, settings, the cut of a batch; early answers     -> steps
    capture                      steps recorded on a GPU
    runtime                      ranks, messages, the engine, one step                      -> losses, .grad
    stage                        one stage's passes, and guards of its graphs               -> gradients
    schedule                     the task graph, its orders, times and bounds               -> Schedule
    flow                         the messages and passes that a credit matrix asks for      -> Flow
    strategies    network, heads which loss trains which stage; how a model is cut          -> credit matrix, stages

The files beside these packages are the ground: tensors, losses, micro-batches, random numbers, and torch's private names. To read
the method, follow a matrix: `strategies.matrices`, `flow`, `schedule.graph`, `schedule.orders`, `stage.stage`, `runtime.engine`;
`reference` is the definition that all of it is tested against.

Names and submodules are imported at their first use, so `nwise --help` need not wait for torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from nwise.lazy import member, submodule_names

if TYPE_CHECKING:
    from nwise import heads, losses
    from nwise.auxiliary import inject
    from nwise.batchnorm import defer_batchnorm
    from nwise.compiled import compile_module
    from nwise.flow import Flow, find_flow
    from nwise.network.carrying import carry
    from nwise.network.chain import Chain
    from nwise.network.splitting import split
    from nwise.network.tied import untie
    from nwise.pipeline import Pipeline
    from nwise.planning.devices import Device
    from nwise.planning.plan import Plan
    from nwise.planning.planner import plan
    from nwise.planning.plans import Plans
    from nwise.reference import reference_grads
    from nwise.schedule.ages import staleness
    from nwise.strategies import (
        Blocks,
        Credit,
        DeepSupervision,
        Delayed,
        EndToEnd,
        Geometric,
        Hogwild,
        Local,
        NWise,
        Rotating,
        Strategy,
        strategy,
    )
    from nwise.training.clip import clip_grad_norm_

__version__ = "0.2.0"

__all__ = [
    "Blocks",
    "Chain",
    "Credit",
    "DeepSupervision",
    "Delayed",
    "Device",
    "EndToEnd",
    "Flow",
    "Geometric",
    "Hogwild",
    "Local",
    "NWise",
    "Pipeline",
    "Plan",
    "Plans",
    "Rotating",
    "Strategy",
    "carry",
    "clip_grad_norm_",
    "compile_module",
    "defer_batchnorm",
    "find_flow",
    "heads",
    "inject",
    "losses",
    "plan",
    "reference_grads",
    "split",
    "staleness",
    "strategy",
    "untie",
]

# The submodule that each name comes from: of a strategy, if nothing else is said. `heads` and `losses` are submodules.
_PLACES = {
    **{name: "strategies" for name in __all__ if name not in ("heads", "losses")},
    "Chain": "network.chain",
    "Device": "planning.devices",
    "Flow": "flow",
    "Pipeline": "pipeline",
    "Plan": "planning.plan",
    "Plans": "planning.plans",
    "carry": "network.carrying",
    "clip_grad_norm_": "training.clip",
    "compile_module": "compiled",
    "defer_batchnorm": "batchnorm",
    "find_flow": "flow",
    "inject": "auxiliary",
    "plan": "planning.planner",
    "reference_grads": "reference",
    "split": "network.splitting",
    "staleness": "schedule.ages",
    "untie": "network.tied",
}

__getattr__ = partial(member, __name__, _PLACES)


def __dir__() -> list[str]:
    return sorted({*__all__, *submodule_names(__path__), *(name for name in globals() if name.startswith("__"))})
