"""Complete manifests as plain data for the files beside them, for tests that need no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posexport import __version__
from posexport.files import sha256_of
from posexport.models import read_spec

SHAPE = ["batch", "seq", 256]


def onnx_manifest(path: Path, /, **more: Any) -> dict[str, Any]:
    """The manifest of an ONNX file at `path`, whatever its bytes. `more` adds keys or replaces values."""
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "version": __version__,
        "form": "decomposed",
        "spec": read_spec({"encoding": {"name": "none"}, "hidden_size": 256, "num_heads": 4}).to_dict(),
        "inputs": [{"name": "hidden_states", "shape": SHAPE, "dtype": "fp32"}],
        "outputs": [{"name": "output", "shape": SHAPE, "dtype": "fp32"}],
        "opset": 18,
        "domains": {"": 18},
        "tools": {},
        **more,
    }


def plan_manifest(path: Path, source: Path, /, **more: Any) -> dict[str, Any]:
    """The manifest of a plan at `path`, built from the ONNX file `source`."""
    return {
        **onnx_manifest(path),
        "onnx": {"file": source.name, "sha256": sha256_of(source), "version": __version__},
        "runtime": {"name": "tensorrt-rtx", "version": "1.2.3"},
        "target_gpus": ["portable"],
        "profiles": {"hidden_states": {"min": [1, 1, 256], "opt": [1, 7, 256], "max": [2, 9, 256]}},
        "tf32": False,
        "memory_limit": None,
        "sizes": {"plan": path.stat().st_size},
        "kernels": kernels(8, True),
        **more,
    }


def kernels(count: int | None, fused: bool | None, **more: Any) -> dict[str, Any]:
    """The kernels of a plan's manifest."""
    numbers = {"count": count, "fused_attention": fused, "attention_kernels": None, "attention_layers": 1}
    return {**numbers, "host_steps": 0, **more, "rows": []}


def read_manifest_data(path: Path) -> Any:
    """The data of the manifest beside an artifact."""
    return json.loads(path.with_name(path.name + ".json").read_bytes())


def write_manifest_data(path: Path, manifest: Any) -> None:
    """Write `manifest` beside an artifact."""
    path.with_name(path.name + ".json").write_text(json.dumps(manifest))
