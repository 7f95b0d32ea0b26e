"""One operator of posexport: its torch body and schema, and its ONNX body, registered together.

The torch side is a `torch.library` operator `posexport::<name>`, opaque to torch.export. Calls outside an export run
the plain torch body, so that eager timings and torch.compile see through it.
The ONNX side is a body written with onnxscript's builder. It is specialised for its attributes, dtypes and ranks when a
graph is exported (no attribute is left to a runtime that may ignore it), and becomes a model-local function.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import onnx_ir as ir
import torch

Body = Callable[..., Any]
"""`body(op, *inputs, **attributes)`: inputs are onnx_ir values with dtype and rank, None where absent.

A body raises RequestError where the form can't carry these attributes."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Calls of operators run their plain torch bodies in exports too: the graph is what torch makes of those."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """`inputs` and `outputs` are tensors by name; the parameters of `eager` after the inputs are attributes.

    `body` is the operator in standard ONNX. `forms` holds a body for a form that has something better, and, under
    "form:target", for that form where one target takes more than all do.
    """

    name: str
    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    eager: Callable[..., Any]
    fake: Callable[..., Any]
    body: Body
    forms: Mapping[str, Body] = field(default_factory=dict)

    def __post_init__(self) -> None:
        registered = torch.library.custom_op(f"posexport::{self.name}", self.eager, mutates_args=())
        registered.register_fake(self.fake)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_exporting() and not _PLAIN.get():
            return self.overload(*args)
        return self.eager(*args)

    def body_for(self, form: str, target: str) -> Body:
        """The body that a form has for a target, the one for all targets where that has none of its own."""
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


def like_first(first: torch.Tensor, *_: object) -> torch.Tensor:
    """The fake of an operator whose output is as its first input."""
    return torch.empty_like(first)


def constant(op: Any, value: float, dtype: ir.DataType) -> ir.Value:
    """A scalar constant of a given dtype."""
    made: ir.Value = op.Constant(value=ir.tensor(value, dtype=dtype))
    return made


def cast(op: Any, value: ir.Value, have: ir.DataType, want: ir.DataType) -> ir.Value:
    """A Cast, or the value itself where the dtype is already right."""
    if have == want:
        return value
    made: ir.Value = op.Cast(value, to=want)
    return made
