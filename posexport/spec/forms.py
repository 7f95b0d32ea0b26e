"""The forms and opsets in which a graph can be written, and the targets for which it can be lowered."""

from __future__ import annotations

from posexport.errors import Reason

FORMS = {
    "decomposed": "standard ONNX operators only, the most portable",
    "function": "model-local onnxscript functions of the domain 'posexport', which any runtime may inline",
    "native": "ONNX's own RotaryEmbedding and Attention, of opset 23 and 24",
    "contrib": "com.microsoft RotaryEmbedding, MultiHeadAttention and GroupQueryAttention, for ONNX Runtime",
}

OPSETS = range(18, 26)
"""ONNX opsets in which a file can be written. A test exports, checks and runs each."""

TARGETS = {
    "portable": "operators that ONNX Runtime and TensorRT both support",
    "ort": "ONNX Runtime only, sometimes faster: caches inside of Attention, GroupQueryAttention, ScatterND",
    "tensorrt": "operators that TensorRT supports, no opset above 24",
}
"""What a form is lowered for. If two targets support the same graph, the bytes are the same."""

ORT_ALONE = (
    "the file is written for ONNX Runtime only: export with --target portable, in another form if that is rejected"
)
"""Why TensorRT cannot run a file for the target `ort`."""

FORM_OPSETS = {form: range(23, 25) if form == "native" else OPSETS for form in FORMS}
"""The opsets of each form. The lowest is its default."""


def scatters(form: str, target: str, shared: bool) -> bool:
    """Whether buffers of any length are written with TensorScatter, which is in opset 24."""
    return shared and form == "native" and target == "ort"


def unsupported_opset(form: str, target: str, opset: int | None, shared: bool = False) -> Reason | None:
    """Return why a form cannot be written in an opset for a target, or None. `shared`: caches become buffers."""
    problem = opset_problem(form, target, opset, shared)
    return None if problem is None else Reason("opset", f"opset {problem}")


def opset_problem(form: str, target: str, opset: int | None, shared: bool = False) -> str | None:
    """Return the same as `unsupported_opset` as a text about an opset: `is 18: ...`."""
    opsets = FORM_OPSETS[form]
    if opset is not None and opset not in opsets:
        return f"is {opset}: {form} is written in opsets {opsets[0]} to {opsets[-1]}"
    if opset is not None and opset > 24 and target == "tensorrt":
        return f"is {opset}: TensorRT takes 24 at most, so give a lower one, or target portable"
    if opset == 23 and scatters(form, target, shared):
        why = "native with shared caches for ort is written in opset 24, which has TensorScatter"
        return f"is 23: {why}: give 24, or none"
    return None
