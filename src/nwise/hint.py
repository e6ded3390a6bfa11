"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(found: str, names: Iterable[str]) -> str:
    """The end of an error sentence, empty if no name is close.

    >>> hint("digit", ["digits", "lm1b"])
    " Did you mean 'digits'?"
    """
    close = difflib.get_close_matches(found, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
