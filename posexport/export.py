"""The export stage: a torch block becomes an ONNX graph in one of the forms.

The block calls posexport's operators; torch's exporter turns each into one node of the domain `posexport`, and this
file attaches that node's body as a model-local function. The form `function` keeps them so; `decomposed` inlines them.
Both are therefore the same operators in the same order. (torch's exporter inlines every function it is given, which is
why the bodies are attached afterwards.)
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import onnx.defs
import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from onnxscript.values import Op, Opset

from posexport import __version__, forms, onnx_file, stack, torch_operators
from posexport.custom_ops import operators
from posexport.custom_ops.operator import Body, Operator
from posexport.errors import RequestError
from posexport.initializers import Initializers, name_initializers
from posexport.models.block import build_block
from posexport.models.weights import TORCH_DTYPES, weight_shapes
from posexport.spec import Spec

DOMAIN = "posexport"
_TRACED = {"batch": 2, "seq": 7, "past_seq": 5, "total_seq": 12, "max_seq": 19, "encoder_seq": 11}
"""Lengths of the traced example, where they are dynamic; nothing of them may stay."""


def export(
    spec: Spec,
    weights: Mapping[str, torch.Tensor],
    *,
    form: str = "decomposed",
    target: str = "portable",
    opset: int | None = None,
    batch: int | None = None,
    seq: int | None = None,
    max_seq: int | None = None,
) -> ir.Model:
    """The block of `spec` with `weights` (by public names, in the spec's dtype) as an ONNX model with its metadata.

    A weight is looked up when the model is written, so that a mapping may make each as it is asked for. `batch`, `seq`
    and `max_seq` fix those dimensions; None leaves them dynamic, and for `opset` takes the form's own.
    Raises RequestError for what isn't known, and for a spec that the form can't carry for the target.
    """
    forms.check_request(form, target)
    opset = forms.default_opset(form, spec) if opset is None else opset
    forms.check(spec, form, target, opset)
    fixed = {"batch": batch, "seq": seq, "max_seq": max_seq}
    for name, size in fixed.items():
        if size is not None and size < 1:
            raise RequestError(f"{name} is {size}: a fixed size is at least 1, and None leaves it dynamic.")
    if max_seq is not None and spec.kv_cache != "shared":
        raise RequestError(f"max_seq is {max_seq} without shared caches: give --kv-cache shared too, or drop it.")
    if max_seq is not None and seq is not None and max_seq < seq:
        raise RequestError(f"max_seq is {max_seq} and seq {seq}: a buffer must hold the tokens, so raise max_seq.")
    functions = Functions(opset, form, target)
    model = _trace(spec, fixed, functions)
    initializers = Initializers(spec, weights)
    if spec.layers > 1:
        stack.instantiate(model, spec, initializers.names, initializers.tensor)
    name_initializers(model, spec, initializers)
    _finish(model, form)
    _describe(model, spec, fixed)
    model.metadata_props.update(
        {"posexport.spec": spec.to_json(), "posexport.form": form, "posexport.version": __version__}
    )
    if functions.for_target_only:
        model.metadata_props["posexport.target"] = target
    model.producer_name, model.producer_version = "posexport", __version__
    onnx_file.check(model)
    return model


def export_module(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    dynamic_shapes: tuple[dict[int, Any], ...],
    *,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    form: str = "decomposed",
    target: str = "portable",
    opset: int | None = None,
) -> ir.Model:
    """Any module that calls posexport's operators (`posexport.custom_ops`) as an ONNX model in one of the forms.

    `dynamic_shapes` holds a table per argument, from axis to torch.export.Dim, as torch.export takes it.
    """
    forms.check_request(form, target)
    opset = forms.default_opset(form) if opset is None else opset
    wrong = forms.opset_refusal(form, target, opset)
    if wrong is not None:
        raise RequestError(f"{wrong}.")
    functions = Functions(opset, form, target)
    model = _capture(module, args, dynamic_shapes, (input_names, output_names), functions)
    _finish(model, form)
    return model


def _trace(spec: Spec, fixed: Mapping[str, int | None], functions: Functions) -> ir.Model:
    """The graph of the block; of a stack one layer of each kind, marked. Weights are there by shape alone."""
    traced = attrs.evolve(spec, layers=len(spec.kinds()))
    nothing = torch.zeros((), dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
    block = build_block(traced, {name: nothing.expand(shape) for name, shape in weight_shapes(traced).items()})
    if spec.layers > 1:
        stack.mark(block.layers)
    inputs, outputs = (
        tuple(name for name in values if (stack.layer_of(name) or 0) < traced.layers)
        for values in (spec.inputs(), spec.outputs())
    )
    return _capture(block, _example(traced, fixed), (_dynamic(traced, fixed),), (inputs, outputs), functions)


def _capture(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    dynamic_shapes: tuple[Any, ...],
    names: tuple[tuple[str, ...], tuple[str, ...]],
    functions: Functions,
) -> ir.Model:
    """The graph as torch's exporter writes it, with every call of an operator of ours one function node."""
    with _quiet(), torch_operators.read_once(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module,
                args,
                dynamo=True,
                opset_version=functions.opset,
                input_names=list(names[0]),
                output_names=list(names[1]),
                dynamic_shapes=dynamic_shapes,
                custom_translation_table={
                    **{op.overload: functions.translation(op) for op in operators()},
                    **stack.translations(),
                },
                # Its optimizer folds transposed weights into new initializers, which loses their names and layout.
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # what a body raises comes wrapped in torch's own errors
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, RequestError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
    assert program is not None
    functions.attach(program.model)
    return program.model


class Functions:
    """The function bodies that one export needs, each specialised for its attributes, dtypes and ranks.

    `for_target_only` turns true once a body is another than that for all targets.
    """

    def __init__(self, opset: int, form: str, target: str) -> None:
        self.opset, self._form, self._target = opset, form, target
        self.for_target_only = False
        self._calls: dict[tuple[object, ...], ir.Function] = {}
        self._bodies: dict[tuple[str, bytes], ir.Function] = {}

    def translation(self, operator: Operator) -> Callable[..., Any]:
        """What torch's exporter calls for `operator`: it emits a node and remembers the body that the node needs."""

        def translate(*args: Any) -> Any:
            inputs = args[: len(operator.inputs)]
            function = self._function(operator, inputs, operator.attributes(args))
            given = [value for value in inputs if value is not None]
            return Op(Opset(DOMAIN, 1), function.name, _schema(operator, function.name, len(given)))(*given)

        parameters = inspect.signature(operator.eager).parameters
        translate.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
        )
        return translate

    def _function(self, operator: Operator, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> ir.Function:
        shapes = _shapes(inputs)
        key = (operator.function, *shapes, *(v.dtype if v is not None else None for v in inputs), *attributes.items())
        if key not in self._calls:
            values = [
                ir.Value(name=name, type=ir.TensorType(v.dtype), shape=ir.Shape(shape)) if shape is not None else None
                for name, v, shape in zip(operator.inputs, inputs, shapes, strict=True)
            ]
            chosen = operator.body_for(self._form, self._target)
            function = self._build(operator, chosen, values, attributes)
            common = operator.body_for(self._form, "portable")
            if chosen is not common and not self.for_target_only:
                self.for_target_only = _differ(function, lambda: self._build(operator, common, values, attributes))
            body = (operator.function, ir.to_proto(function).SerializeToString(deterministic=True))
            if body not in self._bodies:  # queries and keys of other widths may still share one body
                same = sum(name == operator.function for name, _ in self._bodies)
                function.name = operator.function if not same else f"{operator.function}_{same + 1}"
                self._bodies[body] = function
            self._calls[key] = self._bodies[body]
        return self._calls[key]

    def _build(
        self, operator: Operator, chosen: Body, values: list[ir.Value | None], attributes: dict[str, Any]
    ) -> ir.Function:
        # values of its own: onnxscript makes them the function's
        values = [
            None if value is None else ir.Value(name=value.name, type=value.type, shape=value.shape) for value in values
        ]
        present = [value for value in values if value is not None]

        def body(op: Any, *_: ir.Value) -> Any:
            made = chosen(op, *values, **attributes)
            outputs = made if isinstance(made, tuple) else (made,)
            for value, output_name in zip(outputs, operator.outputs, strict=True):
                value.name = output_name
            return outputs

        function = onnxscript.build_function(
            body, present, domain=DOMAIN, name=operator.function, opset_imports={"": self.opset, "com.microsoft": 1}
        )
        for value in (*function.inputs, *(value for node in function for value in node.outputs)):
            value.shape = None  # shapes were for building it: one body serves every length
        for node in function:
            node.metadata_props.clear()
            node.doc_string = None
        given = ", ".join(f"{key}={value}" for key, value in attributes.items())
        function.doc_string = f"posexport.custom_ops.{operator.name}({given})" if given else None
        return function

    def attach(self, model: ir.Model) -> None:
        """Put the bodies into the model, in order of first use."""
        for function in self._bodies.values():
            model.functions[function.identifier()] = function
        model.opset_imports[DOMAIN] = 1


def _differ(function: ir.Function, other: Callable[[], ir.Function]) -> bool:
    """Whether a body is another than `other` makes, or that can't be made."""
    try:
        made = other()
    except RequestError:
        return True
    one, two = (ir.to_proto(each).SerializeToString(deterministic=True) for each in (function, made))
    return bool(one != two)


def _shapes(values: tuple[Any, ...]) -> list[tuple[int | str, ...] | None]:
    """The shapes of values, None for an absent one; dimensions that vary have the same name where they vary as one."""
    names: dict[str, str] = {}
    return [
        None
        if value is None
        else tuple(dim if isinstance(dim, int) else names.setdefault(str(dim), f"d{len(names)}") for dim in value.shape)
        for value in values
    ]


def _schema(operator: Operator, name: str, inputs: int) -> onnx.defs.OpSchema:
    make, kinds = onnx.defs.OpSchema, ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(int64)"]
    return make(
        name,
        DOMAIN,
        1,
        inputs=[make.FormalParameter(f"in{index}", f"T{index}") for index in range(inputs)],
        outputs=[make.FormalParameter(output, "U") for output in operator.outputs],
        type_constraints=[(f"T{index}", kinds, "") for index in range(inputs)] + [("U", kinds, "")],
    )


def _example(spec: Spec, fixed: Mapping[str, int | None]) -> tuple[torch.Tensor, ...]:
    """Inputs of the sizes to trace, whose values nobody reads: large ones are never touched, so they take no memory."""
    example = []
    for name, (shape, dtype) in spec.inputs().items():
        sizes = [dim if isinstance(dim, int) else fixed.get(dim) or _TRACED[dim] for dim in shape]
        try:
            example.append(torch.empty(sizes, dtype=getattr(torch, TORCH_DTYPES[dtype])))
        except RuntimeError:
            raise RequestError(
                f"{name} of {sizes} has no place in memory: give smaller sizes, or leave them dynamic."
            ) from None
    return tuple(example)


def _dynamic(spec: Spec, fixed: Mapping[str, int | None]) -> tuple[dict[int, Any], ...]:
    names = {dim for shape, _ in spec.inputs().values() for dim in shape if isinstance(dim, str)}
    dims = {name: torch.export.Dim(name) for name in names if fixed.get(name) is None}
    return tuple(
        {axis: dims[dim] for axis, dim in enumerate(shape) if isinstance(dim, str) and dim in dims}
        for shape, _ in spec.inputs().values()
    )


def _describe(model: ir.Model, spec: Spec, fixed: Mapping[str, int | None]) -> None:
    """Give outputs the shapes of the contract: the exporter knows sums of lengths by names of its own."""
    for value, (shape, _) in zip(model.graph.outputs, spec.outputs().values(), strict=True):
        value.shape = ir.Shape([fixed.get(dim) or dim if isinstance(dim, str) else dim for dim in shape])


def _finish(model: ir.Model, form: str) -> None:
    """Bring the graph to its form, share what is computed twice, and drop names of files and lines."""
    # Axes and scalars that the exporter computes from constants; weights stay as they are, names and layout alike.
    optimizer.fold_constants(model, onnx_shape_inference=False, should_fold=_reads_no_initializer)
    passes: list[ir.passes.InPlacePass] = [] if form == "function" else [common.InlinePass()]
    passes += [
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    ]
    for each in passes:
        each(model)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()


def _reads_no_initializer(node: ir.Node) -> bool | None:
    return False if any(value is not None and value.is_initializer() for value in node.inputs) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporter from warning about packages that play no part here (torchvision, deprecated internals)."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
