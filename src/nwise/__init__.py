"""nwise: train networks in stages, each loss's gradient travelling through only N of them."""

from nwise import heads, losses, models
from nwise.batchnorm import defer_batchnorm
from nwise.chain import Chain
from nwise.compiled import compile_module
from nwise.credit import Blocks, Credit, DeepSupervision, EndToEnd, Geometric, Local, NWise, Rotating, Strategy
from nwise.flow import Flow, flow_of
from nwise.hogwild import staleness
from nwise.pipeline import Pipeline
from nwise.reference import reference_grads
from nwise.split import split, untie
from nwise.strategy import Hogwild, Switch, strategy

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "Chain",
    "Credit",
    "DeepSupervision",
    "EndToEnd",
    "Flow",
    "Geometric",
    "Hogwild",
    "Local",
    "NWise",
    "Pipeline",
    "Rotating",
    "Strategy",
    "Switch",
    "compile_module",
    "defer_batchnorm",
    "flow_of",
    "heads",
    "losses",
    "models",
    "reference_grads",
    "split",
    "staleness",
    "strategy",
    "untie",
]
