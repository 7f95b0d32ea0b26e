"""The opset of a rewritten graph: its own if the form has it, else the nearest above, to which it is converted."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from onnxscript import version_converter

from posexport.errors import RequestError, shown
from posexport.graphs.branches import with_few_queries
from posexport.graphs.load import inlined
from posexport.rewrite.headless_caches import append_with_heads
from posexport.spec.forms import FORM_OPSETS, unsupported_opset

LATEST = 26
"""The latest opset of files that are rewritten, which ONNX Runtime 1.31 still takes. A file of a later opset than those
of the form keeps its own: the operators of the form are the same in it."""

_BY_CHANNEL = 21
"""The opset from which on GroupNormalization has a scale for each channel."""

_ASIDE = "operators-that-onnx-does-not-know"
"""The domain of operators that onnx's converter must not see."""


def converted(model: ir.Model, form: str, target: str, opset: int | None, shared: bool = False) -> ir.Model:
    """A copy of the model in an opset of the form: its own, or the nearest above; or `opset` if that is given.

    `shared` means that its caches become buffers; the copy then appends to all of them in the same way.
    """
    own = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    lowest = 24 if form == "native" and shared else FORM_OPSETS[form][0]  # it has TensorScatter
    if own > LATEST:
        raise RequestError(
            f"the file is of opset {own}: rewritten files have {LATEST} at most, the latest that ONNX Runtime takes, "
            "so export the file in that or an earlier one."
        )
    wanted = opset if opset is not None else max(own, lowest)
    written = min(wanted, FORM_OPSETS[form][-1]) if wanted == own else wanted  # what is new after it is not written
    why = unsupported_opset(form, target, written if target != "tensorrt" else wanted, shared)
    if why is not None:
        raise RequestError(f"{why}.")
    if wanted < own:
        raise RequestError(f"opset is {wanted}: the file is of opset {own}, so give {own} or more, or none.")
    copy = model.clone()
    with_few_queries(copy)
    if shared:
        append_with_heads(copy)
    if wanted == own:
        return copy
    inlined(copy)  # keeps functions of another opset with unchanged operators; the converter refuses all functions
    if copy.functions:
        name = shown(next(iter(copy.functions.values())).name)
        raise RequestError(
            f"opset {own} can't be converted to {wanted}: the function {name} has operators of another opset than the "
            f"graph, or is given a graph. Export the file in opset {wanted}, or give a form that is written in its own."
        )
    _check_groups(copy, own, wanted)
    problem = "onnx's converter can't"
    with _set_aside(copy):
        try:
            version_converter.convert_version(copy, wanted, fallback=True)
        except Exception as error:  # it may raise anything, or leave the model as it is
            problem = f"{type(error).__name__}: {error}"
    if copy.opset_imports.get("") != wanted:
        raise RequestError(
            f"opset {own} can't be converted to {wanted} ({problem}): export the file in that, or give a form "
            "that is written in its own."
        )
    return copy


def _check_groups(model: ir.Model, own: int, wanted: int) -> None:
    """RequestError for a GroupNormalization whose scale would change its meaning.

    There is one scale for each group before opset 21, and one for each channel from then on. onnxscript's converter
    leaves the operator unchanged if it doesn't know the number of channels.
    """
    groups = [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == ("", "GroupNormalization")]
    if not own < _BY_CHANNEL <= wanted or not groups:
        return
    if any(_channels(node) is None for node in groups):
        ShapeInferencePass()(model)
    for node in groups:
        if _channels(node) is None:
            raise RequestError(
                f"opset {own} can't be converted to {wanted}, since GroupNormalization means something else from "
                f"{_BY_CHANNEL} on, and the file doesn't say how many channels {node.name!r} has: give its shape, or a "
                "form of its own opset."
            )


def _channels(node: ir.Node) -> int | None:
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    return shape[1] if shape is not None and len(shape) > 1 and isinstance(shape[1], int) else None


@contextlib.contextmanager
def _set_aside(model: ir.Model) -> Iterator[None]:
    """Move ONNX Runtime's operators in the standard's domain, such as SimplifiedLayerNormalization, to another domain.

    They are moved back afterwards: onnx's converter refuses a graph with unknown names in that domain.
    """
    unknown = {node.op_type for node in model.graph.all_nodes() if not node.domain and not onnx.defs.has(node.op_type)}
    if not unknown:
        yield
        return
    _move(model, unknown, "", _ASIDE)
    model.opset_imports[_ASIDE] = 1
    try:
        yield
    finally:
        _move(model, unknown, _ASIDE, "")
        model.opset_imports.pop(_ASIDE, None)


def _move(model: ir.Model, names: Collection[str], domain: str, other: str) -> None:
    for node in model.graph.all_nodes():
        if node.domain == domain and node.op_type in names:
            node.domain = other
