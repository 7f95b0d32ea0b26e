"""One operator of posexport: its torch body and schema, and its ONNX bodies, declared together.

    @operator("HeadBias", "biased")
    def add_head_bias(q: Tensor, bias: Tensor) -> Tensor:
        # with a docstring that gives dtypes and shapes
        return q + bias.reshape(-1)

    @add_head_bias.onnx
    def _head_bias_onnx(op: Ops, q: ir.Value, bias: ir.Value) -> ir.Value:
        ...

The torch side is a `torch.library` operator `posexport::<name>`, which is opaque to torch.export. Outside an export,
calls run the plain torch body, so that eager timings and torch.compile see its operations. Arguments are given by
position or by name. They are checked against the docstring (posexport.custom_ops.arguments).

The ONNX side is a body written with onnxscript's builder. An export specialises it for its attributes, dtypes and
ranks, so that no attribute is left to a runtime that may ignore it. The specialised body becomes a model-local
function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, get_origin

import torch
from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import Arguments

P = ParamSpec("P")
"""The parameters of an operator."""

R = TypeVar("R")
"""What an operator returns: a tensor or several."""

T = TypeVar("T", Tensor, "ir.Value")
"""The inputs of a body: torch's tensors, or values of an ONNX graph."""


class Ops(Protocol):
    """ONNX's operators as methods of onnxscript's builder. `op.Add(a, b)` appends a node and returns its output.

    Numbers and lists become constants. `_outputs`, `_domain` and `_version` are the builder's own options.
    """

    @property
    def builder(self) -> Any: ...

    def __getattr__(self, name: str) -> Callable[..., ir.Value]: ...

    def Split(self, *inputs: Any, **attributes: Any) -> Sequence[ir.Value]: ...

    def GroupQueryAttention(self, *inputs: Any, **attributes: Any) -> tuple[ir.Value, ir.Value, ir.Value]: ...


Body = Callable[..., Any]
"""`body(op, *inputs, *attributes)`. Inputs are onnx_ir values with dtype and rank, or None if absent.

A body raises RequestError if the form cannot express these attributes.
"""

B = TypeVar("B", bound=Body)

MICROSOFT: dict[str, Any] = {"_domain": "com.microsoft", "_version": 1}
"""The builder's options for operators of ONNX Runtime."""

ORT_FORMS = tuple(f"{form}:ort" for form in ("decomposed", "function", "native", "contrib"))
"""Every form for ONNX Runtime only, for `Operator.form`."""

TENSORRT_FORMS = tuple(f"{form}:tensorrt" for form in ("decomposed", "function", "native"))
"""Every form for TensorRT only."""

_plain: list[bool] = []
"""Not empty inside `plain_torch`. Not a ContextVar, which torch.export cannot read when it traces bytecode."""


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the plain torch bodies of operators in exports too, so that the graph contains torch's own operators."""
    _plain.append(True)
    try:
        yield
    finally:
        _plain.pop()


def flat(body: Body) -> Body:
    """Return `body` with each dataclass parameter replaced by its fields. Arguments are passed only by position.

    The dataclass may be generic, in a file that postpones the evaluation of annotations.
    """
    parameters = signature(body, eval_str=True).parameters.values()
    kinds = [get_origin(parameter.annotation) or parameter.annotation for parameter in parameters]
    groups: list[tuple[Any, int]] = [(kind, len(fields(kind))) if is_dataclass(kind) else (None, 1) for kind in kinds]

    def flattened(*args: Any) -> Any:
        values: list[Any] = []
        for group, count in groups:
            values += [group(*args[:count])] if group else args[:count]
            args = args[count:]
        return body(*values, *args)

    return flattened


class Operator(Generic[P, R]):
    """One operator, made by the decorator `operator` from its torch body `eager`, which takes arguments by position.

    `inputs` and `outputs` are names of tensors. The parameters of the torch body after the inputs are attributes.
    `body` is the operator in standard ONNX. A parameter of `body` that is a dataclass stands for its fields. `forms`
    contains better bodies: under "form" for all targets, and under "form:target" for one target that supports more.
    `logits_body` and `joined_body` are the bodies of an operator of logits and of attention, if both become one
    function.
    """

    body: Body

    def __init__(
        self, torch_body: Callable[P, R], function: str, outputs: tuple[str, ...], fake: Callable[..., Any] | None
    ) -> None:
        self.name, self.function, self.outputs = torch_body.__name__, function, outputs
        self.eager: Callable[..., R] = torch_body
        self.forms: dict[str, Body] = {}
        self.logits_body: Body | None = None
        self.joined_body: Body | None = None
        self._fake = fake
        self._arguments = Arguments(torch_body)
        self.inputs, self.names = self._arguments.tensors, self._arguments.names
        self.__name__ = self.__qualname__ = self.name
        self.__signature__, self.__doc__ = self._arguments.signature, torch_body.__doc__

        def run(*args: Any) -> R:
            return self.eager(*args)

        run.__signature__ = self._arguments.torch_signature()  # type: ignore[attr-defined]
        torch.library.custom_op(f"posexport::{self.name}", run, mutates_args=()).register_fake(self.fake)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = self._arguments.complete(args, kwargs)
        if torch.compiler.is_exporting() and not _plain:
            result: R = self.overload(*call)
            return result
        return self.eager(*call)

    def __get__(self, instance: object, owner: object = None) -> Operator[P, R]:
        """Return the operator itself. With this method, `help` shows the signature, as for any function."""
        return self

    def __repr__(self) -> str:
        return f"<operator posexport.custom_ops.{self.name}>"

    def fake(self, *args: Any) -> Any:
        """Return outputs of the right shapes and dtypes, without values. torch.export uses this for a call."""
        if self._fake is None:
            return self.eager(*args)
        return self._fake(SimpleNamespace(**dict(zip(self.names, args, strict=True))))

    def onnx(self, body: B) -> B:
        """Decorator of the body in standard ONNX."""
        self.body = body
        return body

    def form(self, *names: str) -> Callable[[B], B]:
        """Decorator of a better body for these forms, "form" or "form:target"."""

        def add(body: B) -> B:
            self.forms |= dict.fromkeys(names, body)
            return body

        return add

    def logits(self, body: B) -> B:
        """Decorator of a body that computes logits one head after the other, or for some queries at a time.

        Decomposed attention on ONNX Runtime uses it if the logits are its bias. It returns a ByHead or a ByQueries
        (posexport.custom_ops.by_head and by_queries).
        """
        self.logits_body = body
        return body

    def joined(self, body: B) -> B:
        """Decorator of the body of such attention: `body(op, logits, *inputs, *attributes)`."""
        self.joined_body = body
        return body

    def body_for(self, form: str, target: str) -> Body:
        """Return the body of a form for a target: the target's own, else the form's, else the standard body."""
        return flat(self.forms.get(f"{form}:{target}") or self.forms.get(form) or self.body)

    @property
    def overload(self) -> Any:
        """The torch operator, as an exported program and a translation table name it."""
        return getattr(torch.ops.posexport, self.name).default

    def attributes(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return the attributes of a call by name, from its positional arguments."""
        values = (tuple(arg) if isinstance(arg, list) else arg for arg in args[len(self.inputs) :])
        return dict(zip(self.names[len(self.inputs) :], values, strict=True))


def operator(
    function: str, *outputs: str, fake: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator that makes an Operator from a torch body. `function` is its name in ONNX graphs.

    `fake` returns empty outputs for a call. The call is an object with the arguments by name. By default, the torch
    body itself runs on tensors without values. If it combines dynamic sizes of two inputs, this leaves checks of them
    in the graph.
    """
    return lambda torch_body: Operator(torch_body, function, outputs, fake)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits and biases: float32, or float64 in the reference."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the dtype of an operator's input. ValueError if it is unknown."""
    if value.dtype is None:
        raise ValueError(f"the dtype of {value.name} is unknown")
    return value.dtype


def shape_of(value: ir.Value) -> ir.Shape:
    """Return the shape of an operator's input. ValueError if it is unknown."""
    if value.shape is None:
        raise ValueError(f"the shape of {value.name} is unknown")
    return value.shape


def rank_of(value: ir.Value) -> int:
    """Return the number of dimensions of an operator's input. ValueError if it is unknown."""
    return len(shape_of(value))


def size_of(value: ir.Value, axis: int) -> int:
    """Return a fixed size of an operator's input. ValueError if it is unknown or may vary."""
    size = shape_of(value)[axis]
    if not isinstance(size, int):
        raise ValueError(f"axis {axis} of {value.name} has no fixed size")
    return size


def constant(op: Ops, value: float, dtype: ir.DataType | None = None) -> ir.Value:
    """Return a scalar constant of a given dtype, by default fp32."""
    return op.Constant(value=ir.tensor(value, dtype=dtype or ir.DataType.FLOAT))


def cast(op: Ops, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return a Cast, or the value itself if it already has this dtype."""
    return value if dtype_of(value) == dtype else op.Cast(value, to=dtype)


def either_onnx(
    op: Ops, condition: ir.Value, yes: Callable[[Ops], ir.Value], no: Callable[[Ops], ir.Value]
) -> ir.Value:
    """Return the result of one of two bodies, by an If. Its branches read values of the outer graph."""
    branches = {
        name: op.builder.subgraph(lambda inner, body=body: body(inner), [], [ir.Value(name=name)], name=name)
        for name, body in (("then_branch", yes), ("else_branch", no))
    }
    return op.If(condition, **branches)


FEW = 32
"""The maximum number of queries that ONNX Runtime computes in another way, such as all heads at once."""


def few_onnx(
    op: Ops,
    ort: bool,
    queries: ir.Value,
    few: Callable[[Ops], ir.Value],
    many: Callable[[Ops], ir.Value],
    limit: int | None = None,
) -> ir.Value:
    """Return `few` for at most `limit` queries (by default FEW) on ONNX Runtime, otherwise `many`.

    For other targets there is no If, because an If divides TensorRT's kernels.
    """
    limit = FEW if limit is None else limit
    return either_onnx(op, op.LessOrEqual(op.Squeeze(queries), limit), few, many) if ort else many(op)
