"""The parts of onnx_ir that ONNX bodies use. They load on first use.

Blocks that only run in torch never wait for onnx_ir. An example is the reference of a verification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx_ir import DataType, Shape, TensorType, Value, tensor

__all__ = ["DataType", "Shape", "TensorType", "Value", "tensor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import onnx_ir

    return getattr(onnx_ir, name)
