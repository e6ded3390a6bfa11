"""What a number was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """Processor, cores that this process may use, and GPU if there is one."""
    found = {"processor": processor(), "cores": str(num_cores())}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Its name."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
