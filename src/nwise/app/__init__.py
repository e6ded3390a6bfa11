"""The application: the command `nwise`, its recipes, data, models, training loop and reports; and a log for any loop.

It needs the extra `app`, and imports only documented names of the library; nothing in the library imports it.
"""

from functools import partial
from typing import TYPE_CHECKING

from nwise.lazy import member

if TYPE_CHECKING:
    from nwise.app.training.own_loop import Log

__all__ = ["Log"]

__getattr__ = partial(member, __name__, {"Log": "training.own_loop"})
