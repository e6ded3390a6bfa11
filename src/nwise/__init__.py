"""nwise: train networks in stages, each loss's gradient travelling through only N of them.

A map: each line imports only from those below it, and ends with what it hands up::

    app                          the command `nwise`: recipes, data, the paper's networks, trainer, reports
    training                     clipping, guards, optimizers for late gradients
    checkpoint    planning       a run in files; a cut for given devices
    compression   exits          smaller messages; early answers
    capturing                    steps recorded on a GPU
    pipeline                     what users call                                            -> Pipeline
    program                      arguments, settings, the cut of a batch                    -> steps
    runtime                      ranks, messages, the engine, one step                      -> losses, .grad
    stage                        one stage's forward, head and passes                       -> gradients
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
    from nwise import heads as heads
    from nwise import losses as losses
    from nwise.auxiliary import inject as inject
    from nwise.batchnorm import defer_batchnorm as defer_batchnorm
    from nwise.capturing.capture import capture as capture
    from nwise.checking import check as check
    from nwise.compiled import compile_module as compile_module
    from nwise.findings import ContractError as ContractError
    from nwise.flow import Flow as Flow
    from nwise.flow import find_flow as find_flow
    from nwise.network.chain import Chain as Chain
    from nwise.network.splitting import split as split
    from nwise.network.tied import untie as untie
    from nwise.pipeline import Pipeline as Pipeline
    from nwise.planning.devices import Device as Device
    from nwise.planning.plan import Plan as Plan
    from nwise.planning.planner import plan as plan
    from nwise.planning.plans import Plans as Plans
    from nwise.reference import reference_grads as reference_grads
    from nwise.schedule.ages import staleness as staleness
    from nwise.strategies import Blocks as Blocks
    from nwise.strategies import Credit as Credit
    from nwise.strategies import DeepSupervision as DeepSupervision
    from nwise.strategies import Delayed as Delayed
    from nwise.strategies import EndToEnd as EndToEnd
    from nwise.strategies import Geometric as Geometric
    from nwise.strategies import Hogwild as Hogwild
    from nwise.strategies import Local as Local
    from nwise.strategies import NWise as NWise
    from nwise.strategies import Rotating as Rotating
    from nwise.strategies import Strategy as Strategy
    from nwise.strategies import strategy as strategy
    from nwise.training.clip import clip_grad_norm_ as clip_grad_norm_

__version__ = "0.3.0"

# The submodule that each name comes from.
_PLACES = {
    "Blocks": "strategies",
    "Chain": "network.chain",
    "ContractError": "findings",
    "Credit": "strategies",
    "DeepSupervision": "strategies",
    "Delayed": "strategies",
    "Device": "planning.devices",
    "EndToEnd": "strategies",
    "Flow": "flow",
    "Geometric": "strategies",
    "Hogwild": "strategies",
    "Local": "strategies",
    "NWise": "strategies",
    "Pipeline": "pipeline",
    "Plan": "planning.plan",
    "Plans": "planning.plans",
    "Rotating": "strategies",
    "Strategy": "strategies",
    "capture": "capturing.capture",
    "check": "checking",
    "clip_grad_norm_": "training.clip",
    "compile_module": "compiled",
    "defer_batchnorm": "batchnorm",
    "find_flow": "flow",
    "inject": "auxiliary",
    "plan": "planning.planner",
    "reference_grads": "reference",
    "split": "network.splitting",
    "staleness": "schedule.ages",
    "strategy": "strategies",
    "untie": "network.tied",
}

__all__ = sorted(["heads", "losses", *_PLACES])  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = partial(member, __name__, _PLACES)


def __dir__() -> list[str]:
    return sorted({*__all__, *submodule_names(__path__), *(name for name in globals() if name.startswith("__"))})
