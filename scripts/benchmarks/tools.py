"""The versions that figures were taken with."""

from __future__ import annotations

from importlib import metadata

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
