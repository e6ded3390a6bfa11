"""E7: Hogwild on the Transformers (table 14), from the runs of E6."""

from __future__ import annotations

from nwise.reproduce import e6, markdown
from nwise.reproduce.claims import Claim, greater
from nwise.reproduce.experiment import Parts, Trained
from nwise.reproduce.runs import Runs, loss, perplexity

PRINTED = {3: "82.682", 4: "100.183", 5: "110.278"}


def claims(runs: Runs) -> list[Claim]:
    """Stale gradients: worse than end-to-end and than local, and the worse the more stages."""

    def at(method: str, stages: int) -> dict[int, float]:
        return runs.scores(loss, method, stages)

    found = []
    for stages in e6.HOGWILD:
        for other in ("end-to-end", "1-wise"):
            text = f"Hogwild is worse than {other} at equal steps, {stages} stages"
            found.append(greater(text, "table 14", at("hogwild", stages), at(other, stages), unit="nats"))
    for fewer, more in ((3, 4), (4, 5)):
        text = f"Hogwild of {more} stages is worse than of {fewer}"
        found.append(greater(text, "table 14", at("hogwild", more), at("hogwild", fewer), unit="nats"))
    return found


def tables(runs: Runs) -> str:
    """Ours beside the paper's, whose data, vocabulary and size are others: only the order can be compared."""
    methods = ("hogwild", "end-to-end", "1-wise")
    rows = [[f"**ours**: {m}", *(runs.shown(perplexity, m, a) for a in e6.HOGWILD)] for m in methods]
    rows.append(["paper: hogwild", *PRINTED.values()])
    return markdown.table(["test perplexity", *markdown.stages(e6.HOGWILD)], rows)


E7 = Trained("e7", "E7, Hogwild on Transformers", Parts(cells=e6.cells, claims=claims, tables=tables), of="e6")
