"""The application: the command `nwise`, its recipes, data, models, training loop and reports.

It needs the extra `app`, and imports only documented names of the library; nothing in the library imports it.
"""

from functools import partial

from nwise.lazy import submodule

__getattr__ = partial(submodule, __name__)
