"""Makes one file in this process: `python make_one.py FOLDER ARCHITECTURE EXPORTER RECORD`. Writes its record to RECORD
as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import torch
from building import build
from exporters import EXPORTERS
from outputs import attending, session_of
from table import ARCHITECTURES
from wide import wide_floats
from wrappers import Tensors, Wrapped, wrap

SHAPES = {"prefill": (2, 9, 0), "chunk": (3, 4, 6), "decode": (2, 1, 12)}
"""Maps the name of a reference to (batch, tokens, past). None of these shapes is the traced one."""


def references(wrapped: Wrapped, folder: Path, name: str) -> dict[str, tuple[Tensors, list[np.ndarray[Any, Any]]]]:
    """The inputs and float64 outputs of every shape, also saved as `<name>-<shape>.npz`. The file contains the inputs
    ("in/..."), torch's outputs in the model's dtype ("torch/...") and in float64 ("out64/...")."""
    made = {}
    for number, (label, (batch, seq, past)) in enumerate(SHAPES.items()):
        inputs = wrapped.draw(batch, seq, past, 100 + number)
        data: dict[str, Any] = {f"in/{key}": value.numpy() for key, value in inputs.items()}
        expected: list[np.ndarray[Any, Any]] = []
        own = next(wrapped.module.parameters()).dtype
        for dtype in (torch.float64, own):
            wrapped.module.to(dtype)
            cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
            with torch.no_grad(), wide_floats() if dtype == torch.float64 else contextlib.nullcontext():
                out = wrapped.module(*wrapped.arguments(cast))
            arrays = [tensor.numpy() for tensor in (out if isinstance(out, tuple) else (out,))]
            kind = "out64" if dtype == torch.float64 else "torch"
            data |= {f"{kind}/{key}": value for key, value in zip(wrapped.outputs, arrays, strict=True)}
            expected = arrays if kind == "out64" else expected
        np.savez(folder / f"{name}-{label}.npz", **data)
        made[label] = (inputs, expected)
    return made


def differences(path: Path, made: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """For every shape, the largest difference between ONNX Runtime and the float64 outputs, or the error. `names` maps
    the file's inputs to those of the references."""
    try:
        session = session_of(path)
    except Exception as error:
        return {"load": one_line(error)}
    result: dict[str, Any] = {}
    for label, (inputs, expected) in made.items():
        try:
            arrays = {key: value.numpy() for key, value in inputs.items()}
            outputs = session.run(None, {value.name: arrays[names[value.name]] for value in session.get_inputs()})
            pairs = zip(outputs, expected, strict=False)  # transformers adds outputs after ours
            result[label] = max(float(np.abs(np.where(attending(a, arrays), a - b, 0)).max()) for a, b in pairs)
        except Exception as error:
            result[label] = one_line(error)
    return result


def one_line(error: BaseException) -> str:
    """The kind and the first lines of the root cause of an error."""
    while error.__cause__:
        error = error.__cause__
    text = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:3])
    return f"{type(error).__name__}: {text}"[:400]


def make(folder: Path, name: str, exporter: str) -> dict[str, Any]:
    """Export, save references and compare. The record has `error` if the export failed."""
    architecture = ARCHITECTURES[name]
    torch.set_num_threads(1)
    fields = attrs.asdict(architecture, filter=lambda field, _: field.name not in ("options", "part"))
    record = {**fields, "architecture": name, "exporter": exporter, "name": f"{name}-{exporter}"}
    wrapped = wrap(architecture, build(architecture))
    path = folder / f"{name}-{exporter}.onnx"
    example = wrapped.draw(2, 6, 3, 0)
    try:
        with torch.no_grad():
            EXPORTERS[exporter](wrapped, example, path)
        made = references(wrapped, folder, name)
    except Exception as error:
        path.unlink(missing_ok=True)
        return {**record, "error": one_line(error)}
    model = onnx.load(path)
    inputs = [value.name for value in model.graph.input]
    # A tool may rename inputs, and may drop those that nothing reads. The order stays the same.
    same = set(inputs) <= set(wrapped.inputs)
    names = {mine: mine for mine in inputs} if same else dict(zip(inputs, wrapped.inputs, strict=False))
    return {
        **record,
        "file": path.name,
        "nodes": len(model.graph.node),
        "opset": {entry.domain: entry.version for entry in model.opset_import},
        "inputs": inputs,
        "outputs": [value.name for value in model.graph.output],
        "caches": [mine for mine, theirs in names.items() if theirs in wrapped.caches],
        "feeds": names,
        "references": [f"{name}-{label}.npz" for label in made],
        "onnxruntime": differences(path, made, names),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answer = make(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    Path(sys.argv[4]).write_text(json.dumps(answer), encoding="utf-8")
