"""A pipeline in words: parameters of each stage and head, losses that train the stage, and messages that it sends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from nwise.flow import Flow


def describe(title: str, parameters: Sequence[Sequence[int]], flow: Flow, credit: Tensor) -> str:
    """Make the table that `Pipeline.summary` returns.

    Args:
        title: first line of the table.
        parameters: numbers of parameters of each stage and its head, ``[A]`` pairs.
        flow: flow of a micro-batch.
        credit: credit matrix ``[A, A]``.

    >>> import nwise
    >>> strategy = nwise.NWise(2).credit(2)
    >>> print(describe("two stages", [(10, 5), (20, 0)], nwise.find_flow(strategy), strategy))
    two stages
    stage  parameters      head  learns from  passes  sends back
        0          10         5       loss 1       1           0
        1          20    output       loss 1       1           1
      all          30  5 (17 %)                    2           1
    """
    heads = [f"{side:,}" if side else "–" for _, side in parameters[:-1]] + ["output"]
    rows = [["stage", "parameters", "head", "learns from", "passes", "sends back"]]
    for k, stage in enumerate(flow.stages):
        losses = ", ".join(_loss(j, w) for j, w in enumerate(credit[:, k].tolist()) if w and stage.passes) or "nothing"
        rows.append([str(k), f"{parameters[k][0]:,}", heads[k], losses, str(stage.passes), str(len(stage.messages))])
    main, side = (sum(column) for column in zip(*parameters, strict=True))
    passes = sum(stage.passes for stage in flow.stages)
    messages = sum(flow.messages)
    share = f"{side:,} ({100 * side / main:.0f} %)" if main else f"{side:,}"
    rows.append(["all", f"{main:,}", share, "", str(passes), str(messages)])
    return "\n".join([title, *table(rows)])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, in columns that end together.

    >>> table([["a", "bc"], ["def", "g"]])
    ['  a  bc', 'def   g']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def milliseconds(seconds: float) -> str:
    """Return a time, given in seconds, as text.

    >>> milliseconds(0.25)
    '250 ms'
    """
    return f"{1e3 * seconds:.4g} ms"


def count(module: nn.Module | None) -> int:
    """Return the number of a module's parameters."""
    return 0 if module is None else sum(p.numel() for p in module.parameters())


def _loss(loss: int, weight: float) -> str:
    return f"loss {loss}" if weight == 1 else f"{weight:g} × loss {loss}"
