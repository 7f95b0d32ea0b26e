"""ONNX files that users can make without posexport. An artifact is timed beside these alternatives.

write_plain      torch's own exporter, called as a user calls it, on the same block with the same weights in plain
                 torch: no operators of posexport, scaled_dot_product_attention where it applies
write_optimized  such a file after ONNX Runtime's transformers optimizer
write_fused      such a file after onnxscript's fusions for ONNX Runtime, which match what torch's exporter writes

All files keep the artifact's inputs, outputs and dynamic dimensions, so any runtime that runs the artifact runs them.
An alternative must compute the same function. If an optimizer changes an output, its file is refused, and the message
states the error.

Measured with onnxruntime 1.31 and onnxscript 0.7: the transformers optimizer fuses no attention in files of torch's
exporter. Its patterns start at the norm after an attention and match the older TorchScript exporter. It fuses only
norms and GELUs of whole layers. onnxscript's fusions make MultiHeadAttention of attention without caches.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch

from posexport.artifact import onnx_file
from posexport.artifact.onnx_artifact import Artifact, read_onnx
from posexport.artifact.onnx_file import EXTERNAL_FROM
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.custom_ops.operator import plain_torch
from posexport.errors import RequestError
from posexport.files import staged
from posexport.models.block import build_block
from posexport.models.weights import TORCH_DTYPES
from posexport.spec.contract import TRACED_SIZES, Shape, Values, bounds_of, graph_inputs, graph_outputs, resolved
from posexport.spec.spec import Spec

OPSETS = range(18, 25)
"""The opsets that torch's exporter can write."""

MODEL_TYPES = ("bert", "gpt2", "bart", "t5", "conformer", "qwen3")
"""The optimizer's model types that could fit. The optimizer fails for `phi`. Other types are for convolutions."""

_ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention")
_EQUAL = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-1}
"""The largest change of an output by an optimizer, relative to its largest value, or to 1 if that is larger."""


def write_plain(artifact: Path, output: Path, opset: int = 20) -> None:
    """Write the block of the ONNX artifact at `artifact` to `output` with torch's exporter, from plain torch.

    Weights of 1.5 GB or more go to `<output>.data`. Raises RequestError for other files and opsets. Raises it with the
    reason if torch's exporter can't write this block.
    """
    if opset not in OPSETS:
        raise RequestError(
            f"opset is {opset}: torch's exporter writes {OPSETS[0]} to {OPSETS[-1]}, so give one of those."
        )
    model = _exported(read_onnx(artifact), opset)
    with staged() as files:
        if sum(tensor.nbytes for tensor in onnx_file.weights_of(model).values()) >= EXTERNAL_FROM:
            onnx_file.write_external(model, output, files)
        else:
            files.write(output, lambda file: onnx_file.write_inline(model, file))


def write_optimized(plain: Path, output: Path, spec: Spec) -> dict[str, int]:
    """Write the file at `plain` to `output` after ONNX Runtime's transformers optimizer.

    It uses the model type that fuses the most attention, then the one with the fewest nodes. Returns the number of
    nodes of each of ONNX Runtime's own operators in the file; empty if nothing was fused. Raises RequestError if the
    optimizer fails, if the result computes another function, or if it can't be run to check that.
    """
    from onnxruntime.transformers import optimizer

    sizes = {"num_heads": spec.num_heads, "hidden_size": spec.hidden_size}
    with _attempted(f"ONNX Runtime's transformers optimizer can't take {plain.name!r}"):
        models = [optimizer.optimize_model(str(plain), model_type=kind, **sizes).model for kind in MODEL_TYPES]
    best = min(models, key=lambda model: (-sum(_own_nodes(model)[name] for name in _ATTENTION), len(model.graph.node)))
    return _write_equal(best, plain, output, spec)


def write_fused(plain: Path, output: Path, spec: Spec) -> dict[str, int]:
    """Like `write_optimized`, with onnxscript's fusions for ONNX Runtime."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    with _attempted(f"onnxscript's optimizer for ONNX Runtime can't take {plain.name!r}"):
        model = ir.to_proto(optimize_for_ort(ir.from_proto(onnx_file.load(plain)))[0])
    return _write_equal(model, plain, output, spec)


def _own_nodes(model: onnx.ModelProto) -> Counter[str]:
    """Count the nodes of ONNX Runtime's own domain by operator."""
    return Counter(node.op_type for node in model.graph.node if node.domain == "com.microsoft")


def _write_equal(model: onnx.ModelProto, plain: Path, output: Path, spec: Spec) -> dict[str, int]:
    """Write a model that computes the same as the file at `plain`. Return its nodes of ONNX Runtime's own domain."""
    with staged() as files:
        files.write(output, lambda file: file.write(model.SerializeToString(deterministic=True)))
    try:
        _check_equal(plain, output, spec)
    except BaseException:
        output.unlink()
        raise
    return dict(_own_nodes(model))


def _check_equal(plain: Path, optimized: Path, spec: Spec) -> None:
    """Run both files on ONNX Runtime's CPU with seeded inputs. RequestError if an output differs."""
    from posexport.runtimes import ort

    values: dict[str, tuple[Shape, str]] = {}
    for given in ir.from_proto(onnx_file.load(plain)).graph.inputs:
        values[str(given.name)] = tuple(dim if isinstance(dim, int) else str(dim) for dim in given.shape or ()), ""
    inputs = seeded_inputs(spec, Sizes.of(_sizes(spec, values)), 0)
    with _attempted(f"ONNX Runtime's CPU can't take {optimized.name!r}"):
        want, got = (ort.load(path, {}).run(inputs) for path in (plain, optimized))
    for name, value in want.items():
        one, two = (np.asarray(output, dtype=np.float64) for output in (value, got[name]))
        error = float(np.abs(one - two).max()) if one.shape == two.shape else float("inf")
        if not error <= _EQUAL[spec.dtype] * max(1.0, float(np.abs(one).max())):
            raise RequestError(
                f"the optimizer changed the function: {name} of {plain.name!r} is off by {error:.2g}, "
                "so leave this alternative out."
            )


def _sizes(spec: Spec, inputs: Values) -> dict[str, int]:
    """Small sizes for the dimensions of `spec`, or the sizes that a file with such `inputs` fixes."""
    bounds = bounds_of(graph_inputs(spec), inputs).items()
    sizes = {dim: low if low == high else TRACED_SIZES[dim] for dim, (low, high) in bounds}
    if spec.kv_cache == "shared":
        sizes["past_seq"] = min(TRACED_SIZES["past_seq"], sizes["max_seq"] - sizes["seq"])
    return sizes


def _exported(artifact: Artifact, opset: int) -> ir.Model:
    spec, inputs = artifact.spec, artifact.inputs()
    block = build_block(spec, artifact.weights())
    sizes = {**TRACED_SIZES, **_sizes(spec, inputs)}
    example = tuple(
        torch.zeros([resolved(dim, sizes) for dim in shape], dtype=getattr(torch, TORCH_DTYPES[dtype]))
        for shape, dtype in graph_inputs(spec).values()
    )
    dynamic = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(inputs[name][0]) if isinstance(dim, str)}
        for name in graph_inputs(spec)
    )
    failure = f"torch's exporter can't write {spec.encoding.name} at opset {opset}"
    with _attempted(failure, "try another opset, or leave this alternative out"), torch.no_grad(), plain_torch():
        program = torch.onnx.export(
            block,
            example,
            dynamo=True,
            opset_version=opset,
            input_names=list(graph_inputs(spec)),
            output_names=list(graph_outputs(spec)),
            dynamic_shapes=(dynamic,),
            verbose=False,
        )
    assert program is not None
    model = program.model
    shapes = artifact.inputs() | artifact.outputs()
    for value in (*model.graph.inputs, *model.graph.outputs):  # the exporter has its own names for the same dimensions
        value.shape = ir.Shape(shapes[str(value.name)][0])
    for node in model.graph.all_nodes():  # paths and lines of the source code
        node.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    return model


def _reason(error: BaseException) -> str:
    """The first line of the root cause, which has the details that outer errors lack."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


@contextlib.contextmanager
def _attempted(failure: str, advice: str = "leave this alternative out") -> Iterator[None]:
    """Hide what exporters and optimizers print and log. RequestError for anything that they raise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        raise RequestError(f"{failure} ({_reason(error)}): {advice}.") from error
    finally:
        logging.disable(before)
