"""The export stage: writes a torch block as an ONNX graph in one of the forms.

The block calls posexport's operators. torch's exporter turns each into one node of the domain `posexport`, and this
module attaches that node's body as a model-local function. The form `function` keeps the functions; `decomposed`
inlines them. So both have the same operators in the same order. (torch's exporter inlines every function that it gets,
so the bodies are attached afterwards.)
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import attrs
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import optimizer

from posexport import __version__, temporary
from posexport.artifact import onnx_file
from posexport.custom_ops import operators
from posexport.errors import RequestError
from posexport.export import joined_attention, layer_copies, support, torchlib_cache
from posexport.export.equal_nodes import merge_equal_nodes
from posexport.export.half_scatters import reduce_in_fp32
from posexport.export.initializers import Initializers, name_initializers
from posexport.export.padded_pools import keep_pads_of_pools
from posexport.export.sizes_of_inputs import read_from_inputs
from posexport.graphs.function_bodies import DOMAIN as DOMAIN
from posexport.graphs.function_bodies import Functions
from posexport.models.block import build_block
from posexport.models.weights import TORCH_DTYPES, weight_shapes
from posexport.spec.contract import TRACED_SIZES, graph_inputs, graph_outputs
from posexport.spec.spec import Spec


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

    A weight is looked up when the model is written, so `weights` may be a lazy mapping. `batch`, `seq` and `max_seq`
    fix those dimensions; None leaves them dynamic. The default of `opset` is the form's.
    Raises RequestError for unknown names, for a spec that the form can't express for the target, and if no temporary
    file can be created.
    """
    opset = support.checked_opset(spec, form, target, opset)
    fixed = {"batch": batch, "seq": seq, "max_seq": max_seq}
    for name, size in fixed.items():
        if size is not None and size < 1:
            raise RequestError(f"{name} is {size}: a fixed size is at least 1, and None leaves it dynamic.")
    if max_seq is not None and spec.kv_cache != "shared":
        raise RequestError(f"max_seq is {max_seq} without shared caches: give --kv-cache shared too, or drop it.")
    if max_seq is not None and seq is not None and max_seq < seq:
        raise RequestError(f"max_seq is {max_seq} and seq {seq}: a buffer must hold the tokens, so raise max_seq.")
    limit = spec.token_limit() if spec.consecutive else None
    if seq is not None and limit is not None and seq > limit:
        raise RequestError(
            f"seq is {seq}, and {spec.encoding.name} has {limit} consecutive positions: give a smaller seq, or drop "
            "--positions consecutive."
        )
    temporary.usual_parent()
    functions = Functions(opset, form, target)
    model = _trace(spec, fixed, functions)
    initializers = Initializers(spec, weights)
    if spec.layers > 1:
        layer_copies.instantiate(model, spec, initializers.names, initializers.tensor)
    if (form, target) == ("decomposed", "ort"):
        joined_attention.join(model, functions)
    name_initializers(model, spec, initializers)
    finish(model, form)
    read_from_inputs(model)
    _describe(model, spec, fixed)
    model.metadata_props.update(
        {"posexport.spec": spec.to_json(), "posexport.form": form, "posexport.version": __version__}
    )
    if functions.for_target_only:
        model.metadata_props["posexport.target"] = target
    model.producer_name, model.producer_version = "posexport", __version__
    onnx_file.check(model)
    return model


def _trace(spec: Spec, fixed: Mapping[str, int | None], functions: Functions) -> ir.Model:
    """The graph of the block; for a stack, one marked layer of each kind. Weights have shapes but no values."""
    traced = attrs.evolve(spec, layers=len(spec.distinct_layers()))
    zero = torch.zeros((), dtype=getattr(torch, TORCH_DTYPES[spec.dtype]))
    block = build_block(traced, {name: zero.expand(shape) for name, shape in weight_shapes(traced).items()})
    if spec.layers > 1:
        layer_copies.mark(block.layers)
    inputs, outputs = (
        tuple(name for name in values if (layer_copies.layer_of(name) or 0) < traced.layers)
        for values in (graph_inputs(spec), graph_outputs(spec))
    )
    names = {"input_names": list(inputs), "output_names": list(outputs)}
    dynamic_shapes = (_dynamic(traced, fixed),)
    return capture(block, functions, args=_example(traced, fixed), dynamic_shapes=dynamic_shapes, **names)


def capture(module: torch.nn.Module | torch.export.ExportedProgram, functions: Functions, **arguments: Any) -> ir.Model:
    """The graph as torch's exporter writes it, with one function node for each call of a posexport operator.

    `arguments` are further arguments of torch.onnx.export.
    """
    with quiet(), torchlib_cache.built_once(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module,
                dynamo=True,
                opset_version=functions.opset,
                custom_translation_table={
                    **{op.overload: functions.translation(op) for op in operators()},
                    **layer_copies.translations(),
                },
                # torch's optimizer folds transposed weights into new initializers, which loses names and layout.
                optimize=False,
                verbose=False,
                **arguments,
            )
        except Exception as error:  # torch wraps errors of a body in its own errors
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, RequestError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
    if program is None:
        raise AssertionError("torch's exporter gave no program")
    functions.attach(program.model)
    return program.model


def _example(spec: Spec, fixed: Mapping[str, int | None]) -> tuple[torch.Tensor, ...]:
    """Inputs to trace with. Their values are not read, so large ones take no memory."""
    example = []
    for name, (shape, dtype) in graph_inputs(spec).items():
        sizes = [dim if isinstance(dim, int) else fixed.get(dim) or TRACED_SIZES[dim] for dim in shape]
        try:
            example.append(torch.empty(sizes, dtype=getattr(torch, TORCH_DTYPES[dtype])))
        except RuntimeError:
            raise RequestError(
                f"{name} of shape {sizes} does not fit in memory: give smaller sizes, or leave them dynamic."
            ) from None
    return tuple(example)


def _dynamic(spec: Spec, fixed: Mapping[str, int | None]) -> tuple[dict[int, Any], ...]:
    names = {dim for shape, _ in graph_inputs(spec).values() for dim in shape if isinstance(dim, str)}
    dims = {name: torch.export.Dim(name) for name in names if fixed.get(name) is None}
    return tuple(
        {axis: dims[dim] for axis, dim in enumerate(shape) if isinstance(dim, str) and dim in dims}
        for shape, _ in graph_inputs(spec).values()
    )


def _describe(model: ir.Model, spec: Spec, fixed: Mapping[str, int | None]) -> None:
    """Give outputs the shapes of the contract: the exporter makes up names for sums of lengths."""
    for value, (shape, _) in zip(model.graph.outputs, graph_outputs(spec).values(), strict=True):
        value.shape = ir.Shape([fixed.get(dim) or dim if isinstance(dim, str) else dim for dim in shape])


def finish(model: ir.Model, form: str) -> None:
    """Bring the graph to its form, remove duplicate nodes, and drop the names of source files and lines."""
    for node in model.graph.all_nodes():
        length = node.inputs[1] if node.op_type == "SplitToSequence" and len(node.inputs) > 1 else None
        if length is not None and length.producer() is not None:
            length.shape = None  # the optimizer raises an error for one computed number if it knows the rank
    _fold_constants(model)
    if form != "function":
        common.InlinePass()(model)
    common.IdentityEliminationPass()(model)
    merge_equal_nodes(model)
    common.RemoveUnusedFunctionsPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.NameFixPass()(model)  # a body inside a branch may use the branch's name of a value
    reduce_in_fp32(model)
    keep_pads_of_pools(model)
    nodes = list(model.graph.all_nodes())
    outputs = [value for node in nodes for value in node.outputs]
    values = [*model.graph.inputs, *model.graph.initializers.values(), *outputs]
    holders: list[ir.Model | ir.Graph | ir.Node | ir.Value] = [model, model.graph, *nodes, *values]
    for holder in holders:
        holder.metadata_props.clear()


def _fold_constants(model: ir.Model) -> None:
    """Fold axes and scalars that the exporter computes from constants. Initializers keep their names and layout."""
    given = {*model.graph.initializers.values()}

    def may_fold(node: ir.Node) -> bool | None:
        return False if any(value in given for value in node.inputs) else None

    optimizer.fold_constants(model, onnx_shape_inference=False, should_fold=may_fold)
    # Results of the optimizer are initializers without a meaning for users: weights are those that the file was given.
    for name, value in [*model.graph.initializers.items()]:
        if value in given or value.is_graph_output():
            continue
        constant = ir.node("Constant", [], {"value": value.const_value})
        model.graph.insert_before(model.graph[0], constant)
        value.replace_all_uses_with(constant.outputs[0])
        del model.graph.initializers[name]
        constant.outputs[0].name = name


class _WithoutGraphs:
    """stderr without the graph that torch.export prints before it raises an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._dropped = stream, False

    def write(self, text: str) -> int:
        self._dropped = "def forward(self" in text or (self._dropped and text == "\n")
        return len(text) if self._dropped else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporter about packages that are not needed, such as torchvision, and details of its errors."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # an error that torch logs is raised too
    try:
        with warnings.catch_warnings(), redirect_stderr(_WithoutGraphs(sys.stderr)):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
