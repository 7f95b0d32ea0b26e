"""Steps that are the same for every program that torch traced from a module, and for its graph."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from posexport import __version__
from posexport.artifact.manifest import ModuleSource
from posexport.artifact.onnx_artifact import module_metadata
from posexport.errors import RequestError, shown
from posexport.export.attention_heads import with_equal_heads
from posexport.export.bfloat16 import without_bfloat16_arithmetic
from posexport.export.checked_values import with_translatable_checks
from posexport.export.complex_numbers import without_complex_operators
from posexport.export.constant_operators import with_computed_constants
from posexport.export.exact_decays import with_exact_decays
from posexport.export.known_sizes import with_known_sizes, without_idle_squeezes
from posexport.export.subtraction import with_converted_tensors
from posexport.export.untranslated_operators import with_translated_operators

_CHANGES = (
    with_computed_constants,
    with_translated_operators,
    with_exact_decays,
    with_translatable_checks,
    without_complex_operators,
    without_bfloat16_arithmetic,
    with_equal_heads,
    with_converted_tensors,
    with_known_sizes,
    without_idle_squeezes,
)


def translatable(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program in operators that torch's exporter translates to the same numbers."""
    for change in _CHANGES:
        program = change(program)
    return program


def describe(model: ir.Model, source: ModuleSource, form: str, target: str | None) -> None:
    """Write into the metadata what the file is an export of, its form, and its target if the file is not portable."""
    model.metadata_props.update({"posexport.form": form, "posexport.version": __version__, **module_metadata(source)})
    if target is not None:
        model.metadata_props["posexport.target"] = target
    model.producer_name, model.producer_version = "posexport", __version__


def name_values(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs their names, which nothing else in the graph may have.

    An output that is an input or a weight, or another output, becomes a separate value.
    """
    graph = model.graph
    taken = {*inputs, *outputs}
    clash = {*outputs} & ({*inputs} | {*graph.initializers})
    if clash or len(taken) < len(inputs) + len(outputs):
        raise RequestError(f"an output has the name of an input or a weight, {shown(min(clash))}: give output_names.")
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}_inner"
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = name
    seen: set[ir.Value] = set()
    for at, (value, name) in enumerate(zip(graph.outputs, outputs, strict=True)):
        if value.producer() is None or value in seen:
            node = ir.node("Identity", [value], num_outputs=1)
            graph.append(node)
            own = node.outputs[0]
            own.shape, own.type = value.shape, value.type
            graph.outputs[at] = value = own
        seen.add(value)
        value.name = name
