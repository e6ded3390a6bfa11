"""The paper's table of the best M, beside the formula's."""

from __future__ import annotations

from typing import Any

from nwise.schedule import Slot

# The best M as printed, for A = 2, 3, 4, 5, 6-11 and 12-30. Nine cells with n >= 3 do not follow from the formula.
PRINTED_BEST = {
    "end-to-end": (8, 8, 16, 16, 16, 32),
    "1-wise": (1, 1, 1, 1, 1, 1),
    "2-wise": (8, 2, 2, 2, 2, 2),
    "3-wise": (8, 4, 2, 2, 2, 2),
    "4-wise": (8, 8, 4, 2, 2, 2),
    "5-wise": (16, 8, 8, 4, 2, 2),
}
PRINTED_STAGES = (range(2, 3), range(3, 4), range(4, 5), range(5, 6), range(6, 12), range(12, 31))


def best_table() -> list[dict[str, Any]]:
    """Return the paper's table of the best M beside the formula's, for every A from 2 to 30.

    The loss is the time by the formula with the printed M over that with the formula's M, minus 1.
    """
    slot, cells = Slot(), []
    for method, best in PRINTED_BEST.items():
        for printed, stages in zip(best, PRINTED_STAGES, strict=True):
            for num_stages in stages:
                n = num_stages if method == "end-to-end" else int(method.split("-")[0])
                formula = slot.best_microbatches(num_stages, n)
                times = [slot.batch_seconds(num_stages, m, n) for m in (printed, formula)]
                row = {"method": method, "num_stages": num_stages, "printed": printed, "formula": formula}
                cells.append({"kind": "best M", **row, "loss": times[0] / times[1] - 1})
    return cells
