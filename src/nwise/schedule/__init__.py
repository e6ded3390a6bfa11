"""What runs when: schedules as data, their exact period and bounds, simulation, validation, the paper's model.

>>> import nwise.schedule as schedule
>>> found = schedule.best("2-wise", num_stages=4, num_microbatches=2, costs=schedule.PAPER)
>>> print(*found.lists[3])
RX3(0) F3(0) H3(0) I3(0.0) SG3(0.0) RX3(1) F3(1) H3(1) I3(1.0) SG3(1.0) W3(0) D3(0) W3(1) D3(1) U3
"""

from nwise._errors import deprecated_names
from nwise.schedule.actions import Action, Kind
from nwise.schedule.baselines import BASELINES, baseline
from nwise.schedule.best import DoesNotFit, best
from nwise.schedule.costs import PAPER, TRANSFORMER, Chains, Costs
from nwise.schedule.lists import Schedule
from nwise.schedule.paper import Slot, fit_slot, paper_time
from nwise.schedule.simulate import Timeline, simulate
from nwise.schedule.timed import Timed, timed
from nwise.schedule.validate import Buffer, validate

__all__ = [
    "BASELINES",
    "PAPER",
    "TRANSFORMER",
    "Action",
    "Buffer",
    "Chains",
    "Costs",
    "DoesNotFit",
    "Kind",
    "Schedule",
    "Slot",
    "Timed",
    "Timeline",
    "baseline",
    "best",
    "fit_slot",
    "paper_time",
    "simulate",
    "timed",
    "validate",
]

__getattr__ = deprecated_names(__name__, {"rival": "baseline", "RIVALS": "BASELINES"})
