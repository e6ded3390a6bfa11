"""A stranger: connects to ports of a rank, and sends what is not for them.

python stranger.py tcp://10.79.0.2:40000 ...
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

import zmq

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)  # of ZMTP 3.0
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
_TERABYTE = b"\x02" + struct.pack("!Q", 2**40)  # the head of a frame of so many bytes


def raw(host: str, port: int, *parts: bytes) -> None:
    """Send bytes, and go."""
    with socket.create_connection((host, port), timeout=5) as link:
        for part in parts:
            link.sendall(part)
            time.sleep(0.1)


def main(addresses: list[str]) -> None:
    """Send to each address: a request of the web, a frame of a terabyte, a text, and a header of another job."""
    context = zmq.Context()
    for where in addresses:
        host, port = where.removeprefix("tcp://").rsplit(":", 1)
        raw(host, int(port), b"GET / HTTP/1.1\r\n\r\n")
        raw(host, int(port), _GREETING, b"\x04" + bytes([len(_READY)]) + _READY, _TERABYTE, bytes(1000))
        push = context.socket(zmq.PUSH)
        push.connect(where)
        push.send(b"hello " * 100)
        shape = json.dumps([[[[2**20, 2**18], "float32", "", []]], [[[2**20, 2**18], "float32", "", []]], ""]).encode()
        push.send(struct.pack("<16sQqqqI12x", b"another job's to", 0, 0, 1, 0, len(shape)) + shape)
        time.sleep(0.5)
        push.close()
    context.term()


if __name__ == "__main__":
    main(sys.argv[1:])
