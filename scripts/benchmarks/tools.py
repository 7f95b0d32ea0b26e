"""What figures were taken with: versions, and the machine in one line."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import psutil

_NAMES = ("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-rtx")


def versions() -> dict[str, str]:
    """Those of the engines and exporters that are installed, by name."""
    found = {}
    for name in _NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine_line() -> str:
    """System, architecture, cores and memory."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"
