"""The tools that write the files. Each takes a wrapped model, example inputs and the path of the file."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from wrappers import Tensors, Wrapped

Export = Callable[[Wrapped, Tensors, Path], None]


def dynamo(wrapped: Wrapped, example: Tensors, path: Path, opset: int) -> None:
    """torch.onnx.export based on torch.export."""
    dynamic = {name: dict.fromkeys(wrapped.axes[name], torch.export.Dim.DYNAMIC) for name in wrapped.inputs}
    plain = [dynamic[name] for name in wrapped.inputs if name not in wrapped.caches]
    if wrapped.caches:
        shapes: tuple[Any, ...] = (*plain, *([None] * (3 - len(plain))), [dynamic[name] for name in wrapped.caches])
    else:
        shapes = (tuple(plain),)
    program = torch.onnx.export(
        wrapped.module,
        wrapped.arguments(example),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=list(wrapped.inputs),
        output_names=list(wrapped.outputs),
        opset_version=opset,
    )
    assert program is not None
    program.save(str(path))


def torchscript(wrapped: Wrapped, example: Tensors, path: Path, opset: int) -> None:
    """torch's older exporter, which traces with TorchScript."""
    torch.onnx.export(
        wrapped.module,
        wrapped.arguments(example),
        str(path),
        dynamo=False,
        input_names=list(wrapped.inputs),
        output_names=list(wrapped.outputs),
        dynamic_axes=wrapped.axes,
        opset_version=opset,
    )


def transformers(wrapped: Wrapped, example: Tensors, path: Path, fusions: str | None = None) -> None:
    """The exporter inside transformers, at its own opset. It exports the model without a wrapper. `fusions` names its
    fusions for ONNX Runtime."""
    tools: Any = importlib.import_module("transformers.exporters.exporter_onnx")  # slow import: only on demand
    config = tools.OnnxConfig(dynamic=True, ort_fusions=fusions)
    exported = tools.OnnxExporter().export(wrapped.module.model, wrapped.keywords(example), config=config)
    ir.save(exported.program, str(path))


EXPORTERS: dict[str, Export] = {
    "dynamo18": functools.partial(dynamo, opset=18),
    "torchscript17": functools.partial(torchscript, opset=17),
    "dynamo20": functools.partial(dynamo, opset=20),
    "dynamo23": functools.partial(dynamo, opset=23),
    "transformers": transformers,
    "transformers_cpu": functools.partial(transformers, fusions="cpu"),
}
