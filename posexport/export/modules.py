"""Writes any torch module as an ONNX model in one of the forms.

Attention by posexport's operators (`posexport.custom_ops`) is written in the form directly. Otherwise torch's exporter
writes attention in its own way, and posexport.rewrite recognises it and gives it the form.

Axes are dynamic as `dynamic_shapes` says. Without it, torch finds out which axes can be: all except those of size 1 in
the example, and those that something in the module fixes, such as the size of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from posexport import temporary
from posexport.artifact import onnx_file
from posexport.artifact.manifest import ModuleSource
from posexport.custom_ops.arguments import related_sizes
from posexport.custom_ops.attention import KINDS
from posexport.errors import RequestError, shown
from posexport.export import exporter, support
from posexport.export.expert_loops import LoopsOverAllExperts
from posexport.export.fewer_nodes import with_fewer_nodes
from posexport.export.module_axes import Axes
from posexport.export.module_conversions import traced_conversions
from posexport.export.random_draws import draw_of
from posexport.export.traced import describe, name_values, translatable
from posexport.graphs.function_bodies import DOMAIN, Functions
from posexport.progress import Progress, silent
from posexport.rewrite.result import is_left, site_record
from posexport.runtimes.module_values import Bound, bind, outputs_of, tensors_of
from posexport.runtimes.trace_errors import tracing

if TYPE_CHECKING:
    from posexport.rewrite.rewriter import Rewritten

_ATTENTION = tuple(operator.function for operator in KINDS)
"""The functions of a graph that stand for attention."""


@attrs.frozen(kw_only=True)
class ExportedModule:
    """A module as a model.

    `operators` is the number of attentions that are written by posexport's operators. If there are none, `rewritten`
    tells the result for torch's attentions. `fixed` are axes that can't vary because their size in the example is 1.
    """

    model: ir.Model
    operators: int
    rewritten: Rewritten | None
    fixed: tuple[str, ...]

    def attentions(self) -> list[dict[str, Any]]:
        """A record of each attention that torch wrote, with `name`, `state`, `reason`, `error` and `cases`."""
        sites = () if self.rewritten is None else self.rewritten.sites
        return [site_record({"name": site.attention.name}, site.state, site.reason, site.evidence) for site in sites]

    def left(self) -> list[dict[str, Any]]:
        """The records of the attentions that are not in the form."""
        return [one for one in self.attentions() if is_left(one)]

    def summary(self) -> str:
        """How attention is written, in words."""
        found, left = len(self.attentions()), len(self.left())
        if self.operators:
            return f"{self.operators} by posexport's operators"
        return f"{found - left} of {found} in the form" if found else "none found"


def export_module(
    module: torch.nn.Module,
    args: Any,
    dynamic_shapes: Any = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    form: str = "decomposed",
    target: str = "portable",
    opset: int | None = None,
) -> ir.Model:
    """A torch module as an ONNX model in one of the forms, for posexport.artifact.write_onnx.

    `args` are example inputs: a tensor, a tuple in the order of `forward`, or a dictionary by parameter; tensors may be
    in lists and dictionaries. `dynamic_shapes` is as torch.export takes it, from axis to torch.export.Dim or a name for
    each parameter; None leaves it to torch. Inputs are named after the parameters, outputs after the keys of the
    returned dictionary or `output`, unless names are given in the order of the tensors.
    Raises RequestError for what the form can't express, for values that are not tensors and for what torch's exporter
    doesn't take, and the errors of the module.
    """
    return export_any(
        module,
        args,
        dynamic_shapes,
        input_names=input_names,
        output_names=output_names,
        form=form,
        target=target,
        opset=opset,
    ).model


def export_any(
    module: torch.nn.Module,
    example: Any,
    dynamic_shapes: Any = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    form: str = "decomposed",
    target: str = "portable",
    opset: int | None = None,
    source: ModuleSource | None = None,
    progress: Progress = silent,
) -> ExportedModule:
    """Like `export_module`, with information about the export; `source` is where the module comes from."""
    functions = Functions(support.checked_opset(None, form, target, opset), form, target)
    bound = bind(module, example)
    axes = Axes(bound, dynamic_shapes)
    temporary.usual_parent()
    with _in_eval_mode(module), torch.no_grad():
        progress("running the module")
        outputs = _run(module, bound)
        inputs = _names("input_names", input_names, tensors_of(bound))
        results = _names("output_names", output_names, outputs)
        progress("tracing the module")
        sizes = related_sizes() if axes.found else nullcontext()
        with exporter.quiet(), tracing(module, not axes.found), sizes, traced_conversions(), LoopsOverAllExperts():
            program = torch.export.export(
                module,
                bound.args,
                bound.kwargs,
                dynamic_shapes=axes.shapes,
                strict=False,
                # comparisons of sizes that are declared dynamic are left for run time, as in torch.onnx.export; others
                # fix sizes, or make them equal
                prefer_deferred_runtime_asserts_over_guards=not axes.found,
            )
            _check_draws_nothing(program, module)
            program = translatable(program)
        progress("writing the graph")
        with tracing(module, not axes.found):
            model = exporter.capture(program, functions)
    calls = [node.op_type for node in model.graph if node.domain == DOMAIN]
    operators = sum(name.startswith(_ATTENTION) for name in calls)
    exporter.finish(model, form)
    axes.name_dimensions(model)
    name_values(model, inputs, results)
    rewritten = None
    if not calls:  # posexport's operators already give a module its form
        progress("looking for attention")
        rewritten = _rewritten(model, form, target, opset)
        model = rewritten.model
        RemoveUnusedOpsetsPass()(model)
    with_fewer_nodes(model)
    alone = functions.for_target_only or (rewritten is not None and rewritten.changed and target != "portable")
    describe(model, source or ModuleSource(name=type(module).__name__), form, target if alone else None)
    onnx_file.check(model)
    return ExportedModule(model=model, operators=operators, rewritten=rewritten, fixed=axes.fixed)


def _rewritten(model: ir.Model, form: str, target: str, opset: int | None) -> Rewritten:
    """The graph with torch's attention in the form."""
    from posexport.rewrite.rewriter import rewrite_model

    return rewrite_model(model, form=form, target=target, opset=opset)


def _names(what: str, given: Sequence[str] | None, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """The names of inputs or outputs; RequestError unless there is one for each tensor."""
    if given is None:
        return tuple(tensors)
    names = tuple(given) if isinstance(given, list | tuple) else ()
    if not all(isinstance(name, str) and name for name in names) or not len({*names}) == len(names) == len(tensors):
        raise RequestError(
            f"{what} are {shown(given)}: give a list of {len(tensors)} different names, for {', '.join(tensors)}."
        )
    return names


def _run(module: torch.nn.Module, bound: Bound) -> dict[str, torch.Tensor]:
    """The outputs of a call; RequestError for a forward that changes a tensor in place, which a graph can't do."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers()), **tensors_of(bound)}
    before = {name: tensor._version for name, tensor in held.items()}
    buffers = {name: tensor.clone() for name, tensor in module.named_buffers()}
    outputs = outputs_of(module(*bound.args, **bound.kwargs))
    changed = [name for name, tensor in held.items() if tensor._version != before[name]]
    # a batch norm in training changes its averages without a new version
    changed += [name for name, tensor in module.named_buffers() if not _equal(tensor, buffers.get(name, tensor))]
    if changed:
        raise RequestError(
            f"forward changes {shown(changed[0])} in place, and a graph has no state: return the new value instead."
        )
    return outputs


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and bool(((first == second) | ((first != first) & (second != second))).all())


def _check_draws_nothing(program: torch.export.ExportedProgram, module: torch.nn.Module) -> None:
    """RequestError for a module that draws random numbers in eval mode."""
    drawn = draw_of(program)
    if drawn is not None:
        raise RequestError(
            f"{type(module).__name__} draws random numbers also in eval mode ({drawn}), so no file can be compared "
            "with it: draw them in training only, as dropout does with training=self.training, or make them an input."
        )


@contextmanager
def _in_eval_mode(module: torch.nn.Module) -> Iterator[None]:
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, training in modes.items():
            each.training = training
