"""What a number was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Processor, the instructions that torch uses of it (other ones give other last digits), cores, and GPU if there is one."""
    instructions = torch.backends.cpu.get_cpu_capability()
    found = {"processor": processor(), "instructions": instructions, "cores": str(num_cores())}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Its name."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
