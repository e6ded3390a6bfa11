"""What happens when a real link misbehaves: a table of faults, of what the ranks say, of seconds, and of bits.

    python -m benchmarks.wire.faults            # five minutes, as root

Three ranks train over links of 5 ms. Something happens after some steps. A run that ends is started again in the same folder, and
its weights are compared with those of one process that nothing disturbed.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.wire.net import ROOT, Link, Wires
from benchmarks.wire.small_run import STAGES
from nwise.machine import machine

RECORDS = Path(__file__).parent / "records" / "faults.jsonl"
LINK = Link("5 ms, 200 Mbit/s", 0.005, 200e6)
LIMIT = 4.0  # seconds of NWISE_TIMEOUT where the ranks should end
PATIENCE = 120.0  # seconds after which a run hangs
AFTER = 25  # steps after which it happens
COMMAND = [sys.executable, "-m", "benchmarks.wire.small_run"]


@dataclass
class Ranks:
    """The running ranks of one run, and what they have said.

    Args:
        wires: their namespaces.
        folder: folder of the run.
        environment: variables, of all ranks or of one.
    """

    wires: Wires
    folder: Path
    environment: Callable[[int], Mapping[str, str]]
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    said: dict[int, list[str]] = field(default_factory=dict)
    ports: dict[int, list[str]] = field(default_factory=dict)
    links: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    steps: queue.Queue[int] = field(default_factory=queue.Queue)

    def start(self) -> None:
        """Start all ranks."""
        for k in range(STAGES):
            self.running.append(self.wires.start(k, [*COMMAND, str(self.folder)], self.environment(k)))
            self.said[k] = []
            for name in ("stdout", "stderr"):
                self.readers.append(threading.Thread(target=self._read, args=(k, name), daemon=True))
                self.readers[-1].start()

    def _read(self, rank: int, name: str) -> None:
        with getattr(self.running[rank], name) as stream:
            for line in stream:
                self._note(rank, name, line)

    def _note(self, rank: int, name: str, line: str) -> None:
        word, *rest = line.split()[:3] or [""]
        if name == "stderr":
            self.said[rank].append(line.rstrip())
        elif word == "weights":
            self.weights[int(rest[0])] = rest[1]
        elif word == "link":
            self.links[rank, int(rest[0])] = float(rest[1]), float(line.split()[3])
        elif word == "port":
            self.ports.setdefault(rank, []).append(rest[0])
        elif word == "step" and rank == STAGES - 1:
            self.steps.put(int(rest[0]))

    def reach(self, step: int) -> None:
        """Wait until the last rank has done some steps."""
        while self.steps.get(timeout=PATIENCE) < step:
            pass

    def end(self) -> list[int | None]:
        """Wait for all ranks; return their exit codes, None for one that hangs."""
        deadline = time.monotonic() + PATIENCE
        codes: list[int | None] = []
        for one in self.running:
            try:
                codes.append(one.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
                one.kill()
        for one in self.running:
            one.wait()
        for reader in self.readers:
            reader.join()
        return codes


def kill(ranks: Ranks) -> None:
    """Kill rank 1."""
    # The process in the namespace: `ip netns exec` becomes it.
    ranks.running[1].kill()


def cut(seconds: float, *pair: int) -> Callable[[Ranks], None]:
    """Return what cuts a pair's link for some seconds."""

    def happen(ranks: Ranks) -> None:
        ranks.wires.cut(*pair)
        time.sleep(seconds)
        ranks.wires.mend()

    return happen


def vanish(index: int) -> Callable[[Ranks], None]:
    """Return what takes a rank's machine off the net."""
    return lambda ranks: ranks.wires.down(index)


def reset(ranks: Ranks) -> None:
    """Reset every connection between ranks 1 and 2, as a firewall does."""
    ranks.wires.reset(1, 2)


def stranger(ranks: Ranks) -> None:
    """Connect to the ports of rank 1 from the machine of rank 0, and send what `stranger` sends."""
    script = str(Path(__file__).with_name("stranger.py"))
    ranks.wires.start(0, [sys.executable, script, *ranks.ports[1]], {}).wait()


@dataclass(frozen=True)
class Fault:
    """Something that happens.

    Args:
        name: in the table.
        happen: what does it.
        link: the link from the start.
        ends: whether the ranks should end, so that a resumed run goes on.
        environment: variables of a rank.
    """

    name: str
    happen: Callable[[Ranks], None] = lambda _: None
    link: Link = LINK
    ends: bool = False
    environment: Callable[[int], Mapping[str, str]] = lambda _: {}


LIMITED: Mapping[str, str] = {"NWISE_TIMEOUT": str(LIMIT)}
FAULTS = {
    "none": Fault("nothing"),
    "loss": Fault("1 % of packets lost, and 5 ms of jitter", link=Link("", 0.005, 200e6, 0.005, 0.01)),
    "pause": Fault("the link of ranks 1 and 2 is cut for 5 s", cut(5.0, 1, 2)),
    "cut": Fault("the link of ranks 1 and 2 is cut past the limit", cut(20.0, 1, 2), ends=True, environment=lambda _: LIMITED),
    "store": Fault("the link of ranks 0 and 1, with the store, is cut past the limit", cut(60.0, 0, 1), ends=True,
                   environment=lambda _: LIMITED),
    "kill": Fault("rank 1 is killed", kill, ends=True, environment=lambda _: LIMITED),
    "vanish": Fault("the machine of rank 2 vanishes", vanish(2), ends=True, environment=lambda _: LIMITED),
    "reset": Fault("the connections of ranks 1 and 2 are reset", reset, ends=True, environment=lambda _: LIMITED),
    "stranger": Fault("a stranger connects and sends", stranger),
    "secret": Fault("rank 2 has another NWISE_SECRET", ends=True,
                    environment=lambda k: {**LIMITED, "NWISE_SECRET": "wrong" if k == 2 else "right"}),
}  # fmt: skip


def expected(folder: Path) -> dict[int, str]:
    """Return the weights of one process that nothing disturbs."""
    done = subprocess.run([*COMMAND, str(folder)], capture_output=True, text=True, check=True, cwd=ROOT)
    return {int(k): digest for k, digest in re.findall(r"weights (\d+) (\w+)", done.stdout)}


def run(fault: Fault, folder: Path, right: Mapping[int, str]) -> dict[str, Any]:
    """Let a fault happen; return what the ranks did, and how long it took."""
    with Wires(STAGES, fault.link) as wires:
        ranks = Ranks(wires, folder, fault.environment)
        begin = time.monotonic()
        ranks.start()
        if fault.name != FAULTS["secret"].name:
            ranks.reach(AFTER)
            begin = time.monotonic()
            happening = threading.Thread(target=fault.happen, args=(ranks,))
            happening.start()
        codes = ranks.end()
        seconds = time.monotonic() - begin
    said = {k: [line for line in lines if line.startswith("nwise: ")] for k, lines in ranks.said.items()}
    record = {
        "fault": fault.name,
        "codes": codes,
        "seconds": round(seconds, 2),
        "said": {k: lines[0] if lines else "" for k, lines in said.items()},
        "warned": sum("is dropped" in line for lines in ranks.said.values() for line in lines),
        "same_bits": ranks.weights == right,
        "links": {f"{a} to {b}": link for (a, b), link in sorted(ranks.links.items())},
    }
    if fault.ends:
        with Wires(STAGES, LINK) as wires:
            again = Ranks(wires, folder, lambda _: {})
            again.start()
            record |= {"codes_again": again.end(), "same_bits": again.weights == right}
    return record


def told(record: Mapping[str, Any]) -> str:
    """Return one row of the table."""
    ended = any(record["codes"])
    happened = "the run goes on" if not ended else "all ranks end" if all(record["codes"]) else "some ranks end"
    if None in record["codes"]:
        happened = "HANGS"
    bits = ("the same" if record["same_bits"] else "OTHERS") + (", resumed" if ended else "")
    return f"| {record['fault']} | {happened} | {record['seconds']:.1f} | {bits} |"


def main(faults: Sequence[str] = tuple(FAULTS), records: Path = RECORDS) -> None:
    """Let faults happen, one after the other, and write what happened."""
    with tempfile.TemporaryDirectory() as folder:
        right = expected(Path(folder) / "alone")
        rows = []
        for name in track(faults, "faults", console=Console(stderr=True)):
            rows.append(run(FAULTS[name], Path(folder) / name, right) | {"machine": machine()})
            with suppress(OSError):
                records.parent.mkdir(exist_ok=True)
            records.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(json.dumps(rows[-1]), flush=True)
    print("| what happens | what follows | seconds | bits |\n|---|---|---|---|")
    print("\n".join(map(told, rows)))


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(FAULTS))
