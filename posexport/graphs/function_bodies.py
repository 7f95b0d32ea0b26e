"""The bodies of posexport's operators as model-local ONNX functions, built for each call's attributes and dtypes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection
from typing import Any

import attrs
import onnx.defs
import onnx_ir as ir
import onnxscript
from onnxscript.values import Op, Opset

from posexport.custom_ops.operator import Body, Operator, flat
from posexport.errors import RequestError

DOMAIN = "posexport"


@attrs.frozen
class Call:
    """What a function was built for. Inputs have a name, a dtype and a shape; absent inputs are None."""

    operator: Operator[..., Any]
    inputs: list[ir.Value | None]
    attributes: dict[str, Any]

    def by_name(self, node: ir.Node) -> dict[str, ir.Value | None]:
        """The inputs of a node of the function, by the operator's names of them."""
        given = iter(node.inputs)
        names = zip(self.operator.inputs, self.inputs, strict=True)
        return {name: None if absent is None else next(given) for name, absent in names}


class Functions:
    """The function bodies that one export needs, specialised for attributes, dtypes and ranks.

    `for_target_only` becomes true with the first body that differs from the body for all targets.
    """

    def __init__(self, opset: int, form: str, target: str, taken: Collection[str] = ()) -> None:
        """`taken` are names of functions that the model already has."""
        self.opset, self.form, self.target, self._taken = opset, form, target, set(taken)
        self.for_target_only = False
        self._calls: dict[tuple[object, ...], ir.Function] = {}
        self._bodies: dict[tuple[str, bytes], ir.Function] = {}
        self._built_for: dict[str, Call] = {}

    def translation(self, operator: Operator[..., Any]) -> Callable[..., Any]:
        """The function that torch's exporter calls for `operator`: it emits a node and keeps the body of that node."""

        def translate(*args: Any) -> Any:
            inputs = args[: len(operator.inputs)]
            function = self.function(operator, inputs, operator.attributes(args))
            given = [value for value in inputs if value is not None]
            return Op(Opset(DOMAIN, 1), function.name, _schema(operator, function.name, len(given)))(*given)

        parameters = inspect.signature(operator.eager).parameters
        translate.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
        )
        return translate

    def function(
        self, operator: Operator[..., Any], inputs: tuple[Any, ...], attributes: dict[str, Any]
    ) -> ir.Function:
        """The body of a call. `inputs` are anything with a dtype and a shape; None if absent."""
        shapes = _shapes(inputs)
        key = (operator.function, *shapes, *(v.dtype if v is not None else None for v in inputs), *attributes.items())
        if key not in self._calls:
            values = [
                ir.Value(name=name, type=ir.TensorType(v.dtype), shape=ir.Shape(shape)) if shape is not None else None
                for name, v, shape in zip(operator.inputs, inputs, shapes, strict=True)
            ]
            chosen = operator.body_for(self.form, self.target)
            function = self._build(operator, chosen, values, attributes)
            common = operator.body_for(self.form, "portable")
            if chosen is not common and not self.for_target_only:
                self.for_target_only = _differ(function, lambda: self._build(operator, common, values, attributes))
            self._calls[key] = self._kept(function)
            self._built_for.setdefault(self._calls[key].name, Call(operator, values, attributes))
        return self._calls[key]

    def call_of(self, node: ir.Node) -> Call | None:
        """What the function of a node was built for; None for a node of anything else."""
        return self._built_for.get(node.op_type) if node.domain == DOMAIN else None

    def joined(self, attention: Call, logits: Call) -> ir.Function | None:
        """One function for attention and the logits that are its bias; None if they can't be one function.

        Its inputs are those of the logits, then those of attention without the bias.
        """
        count, at = len(logits.inputs), attention.operator.inputs.index("bias")
        divided, join = logits.operator.logits_body, attention.operator.joined_body
        if divided is None or join is None:
            return None
        of_logits = [
            value if value is None else ir.Value(name=f"logits_{value.name}", type=value.type, shape=value.shape)
            for value in logits.inputs
        ]

        def chosen(op: Any, *args: Any) -> Any:
            made = flat(divided)(op, *args[:count], *logits.attributes.values())
            if isinstance(made, ir.Value):
                raise RequestError("These logits are computed for all heads at once.")
            return join(op, made, *args[count : count + at], None, *args[count + at :])

        others = [value for place, value in enumerate(attention.inputs) if place != at]
        try:
            function = self._build(attention.operator, chosen, [*of_logits, *others], attention.attributes)
        except RequestError:
            return None
        self.for_target_only = True
        return self._kept(function)

    def _kept(self, function: ir.Function) -> ir.Function:
        """The function, or an equal one that exists already: queries and keys of different widths may share one."""
        body = (function.name, ir.to_proto(function).SerializeToString(deterministic=True))
        if body not in self._bodies:
            function.name = self._name(function.name)
            self._bodies[body] = function
        return self._bodies[body]

    def _name(self, name: str) -> str:
        """The name, with a number from 2 on if it is taken."""
        return free_name(name, self._taken, 2)

    def _build(
        self, operator: Operator[..., Any], chosen: Body, values: list[ir.Value | None], attributes: dict[str, Any]
    ) -> ir.Function:
        # copies, because onnxscript makes the values inputs of the function
        values = [
            None if value is None else ir.Value(name=value.name, type=value.type, shape=value.shape) for value in values
        ]
        present = [value for value in values if value is not None]

        def body(op: Any, *_: ir.Value) -> Any:
            results = chosen(op, *values, *attributes.values())
            outputs = results if isinstance(results, tuple) else (results,)
            for value, output_name in zip(outputs, operator.outputs, strict=True):
                value.name = output_name
            return outputs

        function = onnxscript.build_function(
            body, present, domain=DOMAIN, name=operator.function, opset_imports={"": self.opset, "com.microsoft": 1}
        )
        for value in (*function.inputs, *(value for node in function for value in node.outputs)):
            value.shape = None  # needed to build the body only: one body serves every length
        for node in function:
            node.metadata_props.clear()
            node.doc_string = None
        _name_inner_values(function)
        given = ", ".join(f"{key}={value}" for key, value in attributes.items())
        function.doc_string = f"posexport.custom_ops.{operator.name}({given})" if given else None
        return function

    def attach(self, model: ir.Model) -> None:
        """Put the bodies into the model, in order of first use."""
        for function in self._bodies.values():
            model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1


def names_in(model: ir.Model) -> list[str]:
    """The names of posexport's functions that a model has."""
    return [function.name for function in model.functions.values() if function.domain == DOMAIN]


def _name_inner_values(function: ir.Function) -> None:
    """Give values in branches and loops names that no other value of the function has, not even a later one.

    ONNX Runtime writes functions out in the graph, where a name stands for one value.
    """
    outer = {*function}
    taken = {str(value.name) for value in (*function.inputs, *(value for node in outer for value in node.outputs))}
    inner = [node for node in function.all_nodes() if node not in outer]
    graphs = dict.fromkeys(node.graph for node in inner)
    values = [value for graph in graphs if graph is not None for value in graph.inputs]
    for value in (*values, *(value for node in inner for value in node.outputs)):
        value.name = free_name(str(value.name), taken, 1)


def free_name(name: str, taken: set[str], first: int) -> str:
    """The name, with a number from `first` on if it is in `taken`. The result is added to `taken`."""
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(first)))
    free = next(one for one in names if one not in taken)
    taken.add(free)
    return free


def _differ(function: ir.Function, other: Callable[[], ir.Function]) -> bool:
    """Whether a body differs from the one that `other` builds, or `other` can't build one."""
    try:
        second = other()
    except RequestError:
        return True
    one, two = (ir.to_proto(body).SerializeToString(deterministic=True) for body in (function, second))
    return bool(one != two)


def _shapes(values: tuple[Any, ...]) -> list[tuple[int | str, ...] | None]:
    """The shapes of values, None for an absent one. Equal dynamic dimensions get equal names."""
    names: dict[str, str] = {}
    return [
        None
        if value is None
        else tuple(dim if isinstance(dim, int) else names.setdefault(str(dim), f"d{len(names)}") for dim in value.shape)
        for value in values
    ]


def _schema(operator: Operator[..., Any], name: str, inputs: int) -> onnx.defs.OpSchema:
    make, kinds = onnx.defs.OpSchema, ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(int64)"]
    return make(
        name,
        DOMAIN,
        1,
        inputs=[make.FormalParameter(f"in{index}", f"T{index}") for index in range(inputs)],
        outputs=[make.FormalParameter(output, "U") for output in operator.outputs],
        type_constraints=[(f"T{index}", kinds, "") for index in range(inputs)] + [("U", kinds, "")],
    )
