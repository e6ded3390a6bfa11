"""Measure one case of the runtime: `python -m benchmarks.runtime.command`."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.runtime.bench import Case, start
from nwise.app.cli.dispatch import execute
from nwise.app.cli.output import OK, PARSING, print_json
from nwise.app.recipes.config import FLAT


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the runtime on virtual devices: real processes and messages, timed waits instead of computation.

    Example: python -m benchmarks.runtime.command --stages 8 --strategy 2-wise --microbatches 2 --message-mib 1
    """

    case: Annotated[Case, FLAT] = field(default_factory=Case)
    json: bool = False
    """Print the result as JSON, and nothing else."""

    def run(self, console: Console) -> int:
        case = self.case
        with console.status(f"{case.num_ranks} processes start and measure") if not self.json else console.capture():
            result = start(case)
        if self.json:
            print_json({**dataclasses.asdict(case), "strategy": case.method, **dataclasses.asdict(result)})
            return OK
        messages = f"{case.message_mib:g} MiB" if case.message_mib else "8-byte"
        title = f"{case.method}, A = {case.stages}, M = {case.microbatches}, slots of {case.slot_ms:g} ms, {messages} messages"
        rounds = "round" if case.rounds == 1 else "rounds"
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_row("predicted", f"{result.predicted_slots:.3f} slots a mini-batch (order {result.order})")
        table.add_row("measured", f"{result.measured_slots:.3f} slots")
        table.add_row(
            "efficiency",
            f"{result.efficiency:.4f} ({result.lowest:.4f} to {result.highest:.4f} in {case.rounds} {rounds})",
        )
        table.add_row("waits alone", f"{result.ceiling:.4f}")
        table.add_row("overhead", f"{result.action_overhead_us:.0f} us for each of {result.actions:g} actions")
        equal = "as predicted" if result.bytes_sent == result.bytes_predicted else f"PREDICTED {result.bytes_predicted}"
        sent = ", ".join(f"{forward:g}/{back:g}" for forward, back in result.bytes_sent)
        table.add_row("bytes sent", f"{sent} (forward/back, {equal})" if sent else "none")
        console.print(table)
        return OK


def main(arguments: list[str]) -> int:
    """Parse a command line, run it, and return its exit code."""
    program = "python -m benchmarks.runtime.command"
    return execute(program, lambda: tyro.cli(Bench, prog=program, args=arguments, config=PARSING))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
