"""One operator of posexport: its torch body and schema, and its ONNX body, registered together.

The torch side is a `torch.library` operator `posexport::<name>`, opaque to torch.export. Outside an export, calls run
the plain torch body, so that eager timings and torch.compile see its operations.
The ONNX side is a body written with onnxscript's builder. An export specialises it for its attributes, dtypes and
ranks, so that no attribute is left to a runtime that may ignore it, and makes it a model-local function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Generic, Protocol, TypeVar

import onnx_ir as ir
import torch

R = TypeVar("R")
"""What an operator returns: a tensor or several."""


class Ops(Protocol):
    """ONNX's operators as methods of onnxscript's builder: `op.Add(a, b)` appends a node and returns its output.

    Numbers and lists become constants. `_outputs`, `_domain` and `_version` are the builder's own options.
    """

    def __getattr__(self, name: str) -> Callable[..., ir.Value]: ...

    def Split(self, *inputs: Any, **attributes: Any) -> Sequence[ir.Value]: ...

    def GroupQueryAttention(self, *inputs: Any, **attributes: Any) -> tuple[ir.Value, ir.Value, ir.Value]: ...


Body = Callable[..., Any]
"""`body(op, *inputs, **attributes)`: inputs are onnx_ir values with dtype and rank, None where absent.

A body raises RequestError where the form can't express these attributes."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Calls of operators run their plain torch bodies in exports too, so that the graph has torch's own operators."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def like_first(first: torch.Tensor, *_: object) -> torch.Tensor:
    """The fake of an operator whose output has the shape and dtype of its first input."""
    return torch.empty_like(first)


@dataclass(frozen=True, kw_only=True)
class Operator(Generic[R]):
    """`inputs` and `outputs` are tensors by name; the parameters of `eager` after the inputs are attributes.

    `fake` gives empty outputs of the right shapes and dtypes, by default like the first input. `body` is the operator
    in standard ONNX. `forms` holds better bodies: under "form" for all targets, and under "form:target" for one
    that supports more.
    """

    name: str
    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    eager: Callable[..., R]
    fake: Callable[..., Any] = like_first
    body: Body
    forms: Mapping[str, Body] = field(default_factory=dict)

    def __post_init__(self) -> None:
        registered = torch.library.custom_op(f"posexport::{self.name}", self.eager, mutates_args=())
        registered.register_fake(self.fake)

    def __call__(self, *args: Any) -> R:
        if torch.compiler.is_exporting() and not _PLAIN.get():
            result: R = self.overload(*args)
            return result
        return self.eager(*args)

    def body_for(self, form: str, target: str) -> Body:
        """The body of a form for a target: the target's own, or else the form's, or else the standard one."""
        return self.forms.get(f"{form}:{target}") or self.forms.get(form) or self.body

    @property
    def overload(self) -> Any:
        """The torch operator, as an exported program and a translation table know it."""
        return getattr(torch.ops.posexport, self.name).default

    def attributes(self, args: Sequence[Any]) -> dict[str, Any]:
        """The attributes of a call, by name, from its positional arguments."""
        names = list(signature(self.eager).parameters)
        values = (tuple(arg) if isinstance(arg, list) else arg for arg in args[len(self.inputs) :])
        return dict(zip(names[len(self.inputs) :], values, strict=True))


def dtype_of(value: ir.Value) -> ir.DataType:
    """The dtype of an operator's input; ValueError where it is unknown."""
    if value.dtype is None:
        raise ValueError(f"the dtype of {value.name} is unknown")
    return value.dtype


def shape_of(value: ir.Value) -> ir.Shape:
    """The shape of an operator's input; ValueError where it is unknown."""
    if value.shape is None:
        raise ValueError(f"the shape of {value.name} is unknown")
    return value.shape


def rank_of(value: ir.Value) -> int:
    """The number of dimensions of an operator's input; ValueError where it is unknown."""
    return len(shape_of(value))


def size_of(value: ir.Value, axis: int) -> int:
    """A fixed size of an operator's input; ValueError where it is unknown or may vary."""
    size = shape_of(value)[axis]
    if not isinstance(size, int):
        raise ValueError(f"axis {axis} of {value.name} has no fixed size")
    return size


def constant(op: Ops, value: float, dtype: ir.DataType) -> ir.Value:
    """A scalar constant of a given dtype."""
    return op.Constant(value=ir.tensor(value, dtype=dtype))


def cast(op: Ops, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A Cast, or the value itself where it already has this dtype."""
    return value if dtype_of(value) == dtype else op.Cast(value, to=dtype)
