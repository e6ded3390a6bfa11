"""The machine on which a number was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["machine", "num_cores", "processor"]


def machine() -> dict[str, str]:
    """Describe this machine: processor, the instruction set that torch uses, number of cores, and the GPU if there is one."""
    # Another instruction set gives other last digits.
    instructions = torch.backends.cpu.get_cpu_capability()
    facts = {"processor": processor(), "instructions": instructions, "cores": str(num_cores())}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the processor's name."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
