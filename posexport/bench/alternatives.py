"""What users have without posexport, as ONNX files: the alternatives that an artifact is timed beside.

write_plain      torch's own exporter, called as a user calls it, on the same block with the same weights in plain
                 torch: none of posexport's operators, scaled_dot_product_attention where it applies
write_optimized  such a file through ONNX Runtime's transformers optimizer
write_fused      such a file through onnxscript's fusions for ONNX Runtime, which know what torch's exporter writes

All keep the artifact's inputs, outputs and dynamic dimensions, so whatever runs the artifact runs them. An
alternative must compute the same: what an optimizer breaks is refused, with how far off it is.

Measured with onnxruntime 1.31 and onnxscript 0.7: the first fuses no attention in anything that torch's exporter writes
(its patterns start at the norm behind an attention and are those of the older, TorchScript exporter), only norms and
gelus of whole layers; the second makes MultiHeadAttention of attention without caches.
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
"""What torch's exporter writes."""

MODEL_TYPES = ("bert", "gpt2", "bart", "t5", "conformer", "qwen3")
"""The optimizer's kinds of models that could fit; `phi` fails in itself, the others are of convolutions."""

_ATTENTION = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "DecoderMaskedMultiHeadAttention")
_EQUAL = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-1}
"""Most that an optimizer may change an output, of its largest value."""


def write_plain(artifact: Path, output: Path, opset: int = 20) -> None:
    """Write the block of the ONNX artifact at `artifact` as torch's exporter writes it from plain torch, to `output`.

    Weights of 1.5 GB or more go to `<output>.data`. Raises RequestError for other files and opsets, and where torch's
    exporter can't write this block, with its reason.
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
    """Write what ONNX Runtime's transformers optimizer makes of the file at `plain`, to `output`.

    It takes the kind of model as which most is fused: attention first, then the fewest nodes. Returns how many nodes
    of each operator of ONNX Runtime's own stand in the file; none where nothing was fused. Raises RequestError where
    the optimizer fails, or the result is another function or can't be run to tell.
    """
    from onnxruntime.transformers import optimizer

    sizes = {"num_heads": spec.num_heads, "hidden_size": spec.hidden_size}
    with _attempted(f"ONNX Runtime's transformers optimizer can't take {plain.name!r}"):
        models = [optimizer.optimize_model(str(plain), model_type=kind, **sizes).model for kind in MODEL_TYPES]
    best = min(models, key=lambda model: (-sum(_own_nodes(model)[name] for name in _ATTENTION), len(model.graph.node)))
    return _write_equal(best, plain, output, spec)


def write_fused(plain: Path, output: Path, spec: Spec) -> dict[str, int]:
    """Write what onnxscript's fusions for ONNX Runtime make of the file at `plain`; otherwise as `write_optimized`."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    with _attempted(f"onnxscript's optimizer for ONNX Runtime can't take {plain.name!r}"):
        model = ir.to_proto(optimize_for_ort(ir.from_proto(onnx_file.load(plain)))[0])
    return _write_equal(model, plain, output, spec)


def _own_nodes(model: onnx.ModelProto) -> Counter[str]:
    """The nodes of ONNX Runtime's own domain, by operator."""
    return Counter(node.op_type for node in model.graph.node if node.domain == "com.microsoft")


def _write_equal(model: onnx.ModelProto, plain: Path, output: Path, spec: Spec) -> dict[str, int]:
    """Write a model that computes the same as the file at `plain`; returns its nodes of ONNX Runtime's own domain."""
    with staged() as files:
        files.write(output, lambda file: file.write(model.SerializeToString(deterministic=True)))
    try:
        _check_equal(plain, output, spec)
    except BaseException:
        output.unlink()
        raise
    return dict(_own_nodes(model))


def _check_equal(plain: Path, optimized: Path, spec: Spec) -> None:
    """Run both files on ONNX Runtime's CPU on seeded inputs; RequestError where an output is another one."""
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
    """Small sizes of the dimensions of `spec`, but for those that a file with such `inputs` fixes."""
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
    for value in (*model.graph.inputs, *model.graph.outputs):  # the exporter has its own names of the same dimensions
        value.shape = ir.Shape(shapes[str(value.name)][0])
    for node in model.graph.all_nodes():  # files and lines of the place it was made in
        node.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    return model


def _reason(error: BaseException) -> str:
    """The first line of the first cause, which says what the outer ones only report."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


@contextlib.contextmanager
def _attempted(failure: str, advice: str = "leave this alternative out") -> Iterator[None]:
    """Without what exporters and optimizers print and log on the way; RequestError for whatever they raise."""
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
