"""Real links on one machine: network namespaces that a user-space switch joins.

Each namespace has a TUN device. The switch reads the packets of all devices, lets each wait for its share of the rate and for the
latency, and writes it to the device that it is for::

    rank 0 | TCP | tun  ---->  switch: wait, lose, cut  ---->  tun | TCP | rank 1

So what crosses a link is real TCP with its windows, acknowledgements and retransmissions. It needs root, ``ip`` and
``/dev/net/tun``, but no kernel module.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _PLAIN, _WITH_SIZES = 0x0001, 0x1000, 0x4000  # flags of a device
_OFFLOAD = 0x01 | 0x02  # checksums, and segments that the device would cut
_SIZES = 10  # bytes before a packet that say into which segments it is to be cut
_CONTROL = "/proc/sys/net/ipv4"
_TCP, _RST = 6, 0x04
_QUEUE = 10_000  # packets
_BATCH = 64  # packets that are read from one device before the next


@dataclass(frozen=True)
class Link:
    """A link between two namespaces, in each direction.

    Args:
        name: name in tables.
        latency: seconds one way.
        rate: bits per second.
        jitter: seconds; each packet waits for a random part of it more, behind those before it.
        loss: share of packets that are lost.
    """

    name: str
    latency: float = 0.0
    rate: float = float("inf")
    jitter: float = 0.0
    loss: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Its rate in bytes."""
        return self.rate / 8


def missing() -> str | None:
    """Return what this machine lacks for namespaces, in a sentence; None if nothing."""
    if sys.platform != "linux" or os.geteuid():
        return "Links need root on Linux, for network namespaces."
    if not shutil.which("ip"):
        return "Links need the command `ip` (the package iproute2)."
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "Links need /dev/net/tun."
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "Links need network namespaces, which this machine does not allow."
    return None


class Wires:
    """Network namespaces, every two of which a link joins; a context manager, which takes them down at its end.

    Args:
        count: number of namespaces.
        link: the link between every two; None for this machine's own loopback, without namespaces.
        congestion: congestion control of TCP; default: Linux's default.

    Raises:
        OSError: the machine lacks something (`missing`).
    """

    def __init__(self, count: int, link: Link | None, congestion: str = "cubic") -> None:
        if link is not None and (lacking := missing()):
            raise OSError(lacking)
        self.count = count
        self._link = link
        self._congestion = congestion
        self._name = f"nw{os.getpid()}x{time.monotonic_ns() % 10_000}"

    def __enter__(self) -> Wires:
        if self._link is None:
            return self
        told = json.dumps([self._name, self.count, asdict(self._link), self._congestion])
        self._switch = subprocess.Popen(
            [sys.executable, __file__, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != "up\n":
            raise OSError("The namespaces should come up. Found that the switch ended; its error stands above.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is None:
            return
        self._switch.communicate()  # closes its input, which ends it, also if this process is killed

    def start(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command in a namespace as the rank of its index, as torchrun would.

        Args:
            index: of the namespace.
            command: the command.
            environment: variables besides those of this process.
        """
        told = {
            "RANK": str(index),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost" if self._link is None else address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "lo" if self._link is None else "wire",
            "OMP_NUM_THREADS": "1",
        }
        inside = [] if self._link is None else ["ip", "netns", "exec", f"{self._name}-{index}"]
        return subprocess.Popen(
            [*inside, *command],
            env={**os.environ, **told, **environment},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def change(self, link: Link) -> None:
        """Change the link for the packets to come."""
        self._tell(asdict(link))

    def cut(self, *pair: int) -> None:
        """Lose all packets between two namespaces, until `mend`."""
        self._tell({"cut": pair})

    def mend(self) -> None:
        """End all cuts."""
        self._tell({"cut": None})

    def reset(self, *pair: int) -> None:
        """Reset every connection between two namespaces once, at its next packet."""
        self._tell({"reset": pair})

    def down(self, index: int) -> None:
        """Take a namespace off the net, as if its machine had vanished."""
        _run(f"ip netns exec {self._name}-{index} ip link set wire down")

    def _tell(self, what: Mapping[str, object]) -> None:
        assert self._switch.stdin is not None
        with suppress(ValueError, BrokenPipeError):  # the switch has ended
            self._switch.stdin.write(json.dumps(what) + "\n")
            self._switch.stdin.flush()


def address(index: int) -> str:
    """Return the address of a namespace."""
    return f"10.79.0.{index + 1}"


def _run(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


def _device(name: str, index: int, congestion: str) -> int:
    """Make a namespace with a device, and return the device's end here."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    here, inside = f"{name}-{index}", f"ip netns exec {name}-{index}"
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", here[-15:].encode(), _TUN | _PLAIN | _WITH_SIZES))
    # TCP's segments have the size of Ethernet's, but cross the switch in packets of many: it reads fewer.
    fcntl.ioctl(end, _TUNSETOFFLOAD, _OFFLOAD)
    _run(f"ip netns add {here} && ip link set {here[-15:]} netns {here} name wire")
    _run(f"{inside} ip addr add {address(index)}/24 dev wire && {inside} ip link set lo up")
    _run(f"{inside} ip link set wire mtu 1500 txqueuelen {_QUEUE} up")
    _run(f"{inside} sh -c 'echo {congestion} > {_CONTROL}/tcp_congestion_control'")
    return end


def _allow(congestion: str) -> None:
    """Let namespaces choose a congestion control, which some kernels keep to the machine itself."""
    path = Path(_CONTROL) / "tcp_allowed_congestion_control"
    if congestion not in (allowed := path.read_text().split()):
        path.write_text(" ".join([*allowed, congestion]))


def _switch(ends: Sequence[int], link: Link) -> None:
    """Carry packets until the standard input ends."""
    queue: list[tuple[float, int, int, bytes]] = []
    free: dict[tuple[int, int], float] = {}  # when the last packet of a direction has left
    last: dict[tuple[int, int], float] = {}  # when it arrives
    cut: set[int] = set()
    resets: set[int] = set()
    was_reset: set[bytes] = set()
    count = 0
    waiting = [*ends, sys.stdin.fileno()]
    while True:
        wait = max(0.0, queue[0][0] - time.perf_counter()) if queue else 1.0
        ready, _, _ = select.select(waiting, [], [], wait)
        now = time.perf_counter()
        for end in ready:
            if end == sys.stdin.fileno():
                line = sys.stdin.readline()
                if not line:
                    return
                told = json.loads(line)
                if "cut" in told:
                    cut = set(told["cut"] or ())
                elif "reset" in told:
                    resets = set(told["reset"])
                else:
                    link = Link(**told)
                continue
            for _ in range(_BATCH):
                try:
                    packet = os.read(end, 2**17)
                except OSError:  # nothing more, or the device is down
                    break
                version, target = packet[_SIZES] >> 4, packet[_SIZES + 19] - 1
                if version != 4 or not 0 <= target < len(ends):
                    continue
                pair = end, ends[target]
                sent = free[pair] = max(now, free.get(pair, 0.0)) + (len(packet) - _SIZES) / link.bytes_per_second
                source = ends.index(end)
                if cut >= {source, target} or random.random() < link.loss:
                    continue
                if (
                    resets >= {source, target}
                    and packet[_SIZES + 9] == _TCP
                    and packet[_SIZES + 12 :][:12] not in was_reset
                ):
                    ahead, back = _resets(packet[_SIZES:])
                    was_reset |= {ahead[12:24], back[12:24]}
                    for to, one in ((ends[target], ahead), (end, back)):
                        with suppress(OSError):
                            os.write(to, bytes(_SIZES) + one)
                    continue
                arrives = max(sent + link.latency + random.random() * link.jitter, last.get(pair, 0.0))
                last[pair] = arrives
                count += 1
                heapq.heappush(queue, (arrives, count, ends[target], packet))
        while queue and queue[0][0] <= time.perf_counter():
            _, _, to, packet = heapq.heappop(queue)
            with suppress(OSError):
                os.write(to, packet)


def _resets(packet: bytes) -> tuple[bytes, bytes]:
    """Return the packets that end a connection at both ends, given the next packet of one."""
    start = 4 * (packet[0] & 15)
    source, target = packet[12:16], packet[16:20]
    ports, sequence, acknowledged = (
        packet[start : start + 4],
        packet[start + 4 : start + 8],
        packet[start + 8 : start + 12],
    )

    def one(source: bytes, target: bytes, ports: bytes, number: bytes) -> bytes:
        segment = ports + number + bytes(4) + struct.pack("!BBH", 5 << 4, _RST, 0)
        pseudo = source + target + struct.pack("!BBH", 0, _TCP, 20)
        segment += struct.pack("!HH", _checksum(pseudo + segment + bytes(4)), 0)
        head = struct.pack("!BBHHHBB", 0x45, 0, 40, 0, 0, 64, _TCP)
        return head + struct.pack("!H", _checksum(head + bytes(2) + source + target)) + source + target + segment

    return (
        one(source, target, ports, sequence),
        one(target, source, ports[2:] + ports[:2], acknowledged),
    )


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def main(text: str) -> None:
    """Make namespaces, carry their packets, and take them down."""
    name, count, link, congestion = json.loads(text)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ends: list[int] = []
    try:
        _allow(congestion)
        ends.extend(_device(name, index, congestion) for index in range(count))
        print("up", flush=True)
        _switch(ends, Link(**link))
    finally:
        for index in range(count):
            subprocess.run(["ip", "netns", "del", f"{name}-{index}"], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(sys.argv[1])
