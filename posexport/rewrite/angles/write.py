"""Puts exact cosines and sines into a graph, where its rotations read cosines and sines.

    positions [B or 1, S] int64 -> ExactSinusoids -> cos, sin [B or 1, S, P] fp32 -> laid out, in the dtype of the old

The old values stay for everything else that reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import attrs
import onnx_ir as ir
import torch

from posexport.custom_ops.angles import exact_sinusoids
from posexport.graphs.attention.rotary import AngleSource
from posexport.graphs.function_bodies import DOMAIN, Functions, names_in
from posexport.graphs.nodes import Nodes
from posexport.models.angles import exact_turns
from posexport.rewrite.angles.columns import Columns
from posexport.rewrite.angles.plan import AnglePlan
from posexport.rewrite.angles.positions import PositionSource
from posexport.rewrite.surgery import lower, remove_unused, values_of

Reader = tuple[str, int]
"""The name of a node's first output, and the place of the input that reads cosines or sines."""


@attrs.frozen(kw_only=True, eq=False)
class Written:
    """A plan to write, with the places where rotations read each of its values."""

    plan: AnglePlan
    readers: tuple[tuple[Reader, ...], ...]


def write_exact(
    model: ir.Model, written: Sequence[Written], dtypes: Mapping[str, ir.DataType], ranks: Mapping[str, int], form: str
) -> dict[AnglePlan, tuple[AngleSource, ...]]:
    """Put exact angles into `model`, a copy of a view's model; returns the values that have them now.

    `dtypes` and `ranks` are those of the values that are replaced, by name.
    """
    values = values_of(model)
    taken = set(values) | {node.name or "" for node in model.graph}
    functions = Functions(model.opset_imports[""], form, "portable", names_in(model))
    writer = _Writer(Nodes(taken, prefix="posexport/exact"), functions, values)
    nodes = {node.outputs[0].name or "": node for node in model.graph if node.outputs}
    replaced: list[ir.Value] = []
    for one in written:
        plan = one.plan
        places = zip(plan.sources, plan.columns, one.readers, strict=True)
        angles = writer.angles(plan, values[plan.positions.value.name or ""])
        for source, columns, readers in places:
            name = source.value.name or ""
            new = writer.laid_out(angles, plan, source, columns, dtypes[name], ranks[name])
            new.shape = values[name].shape
            for output, at in readers:
                nodes[output].replace_input_with(at, new)
            replaced.append(values[name])
    model.graph.extend(writer.nodes.nodes)
    remove_unused(model, replaced)
    model.graph.sort()
    lower(model, writer.functions, form)
    model.graph.sort()
    nodes = {node.outputs[0].name or "": node for node in model.graph if node.outputs}
    return {one.plan: tuple(map(partial(_moved, nodes), one.plan.sources, one.readers)) for one in written}


def _moved(nodes: Mapping[str, ir.Node], source: AngleSource, readers: Iterable[Reader]) -> AngleSource:
    """The source with the new value."""
    output, at = next(iter(readers))
    value = nodes[output].inputs[at]
    assert value is not None
    return attrs.evolve(source, value=value)


class _Writer:
    """Writes cosines and sines with these nodes."""

    def __init__(self, nodes: Nodes, functions: Functions, values: Mapping[str, ir.Value]) -> None:
        self.nodes, self.functions, self._values = nodes, functions, values

    def angles(self, plan: AnglePlan, value: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Cosines and sines [B or 1, S, P] of a plan, whose positions are `value`."""
        positions = self._positions(plan.positions, value)
        turns = self.nodes.constant(exact_turns(torch.from_numpy(plan.exact.frequencies)).tolist())
        attributes = {"scale": plan.exact.scale}
        described = (_described(positions, ("batch", "seq")), _described(turns, (2, len(plan.exact.frequencies))))
        function = self.functions.function(exact_sinusoids, described, attributes)
        cos, sin = self.nodes.op(
            function.name, [positions, turns], outputs=2, domain=DOMAIN, dtype=ir.DataType.FLOAT, key=function.name
        )
        return cos, sin

    def _positions(self, source: PositionSource, value: ir.Value) -> ir.Value:
        nodes = self.nodes
        value = nodes.one("Cast", value, dtype=ir.DataType.INT64, to=int(ir.DataType.INT64))
        if source.batch is None:
            return nodes.shaped(value, 1, -1)
        dropped = [axis for axis in range(source.rank) if axis not in (source.batch, source.tokens)]
        if dropped:
            value = nodes.one("Squeeze", value, nodes.constant(dropped))
        return value if source.batch < source.tokens else nodes.one("Transpose", value, perm=[1, 0])

    def laid_out(
        self,
        angles: tuple[ir.Value, ir.Value],
        plan: AnglePlan,
        source: AngleSource,
        columns: Columns,
        dtype: ir.DataType,
        rank: int,
    ) -> ir.Value:
        """The features of the cosines and sines of a plan, with the axes of a value with this `rank`."""
        nodes = self.nodes
        value = nodes.cast(self._features(angles, columns, len(plan.exact.frequencies)), dtype)
        if source.batch is None:
            value = nodes.one("Squeeze", value, nodes.constant([0]))
        elif plan.positions.batch is None and plan.rows is not None:
            name, axis = plan.rows
            lengths = nodes.one("Shape", self._values[name], dtype=ir.DataType.INT64)
            count = nodes.one("Gather", lengths, nodes.constant([axis]), axis=0)
            value = nodes.one("Expand", value, nodes.one("Concat", count, nodes.constant([1, 1]), axis=0))
        kept = source.axes
        order = [kept.index(axis) for axis in sorted(kept)]
        if order != sorted(order):
            value = nodes.one("Transpose", value, perm=order)
        added = [axis for axis in range(rank) if axis not in kept]
        return nodes.one("Unsqueeze", value, nodes.constant(added)) if added else value

    def _features(self, angles: tuple[ir.Value, ir.Value], columns: Columns, pairs: int) -> ir.Value:
        """[B or 1, S, F] made from [B or 1, S, P] with P = `pairs`, fp32."""
        nodes, count = self.nodes, pairs
        kinds = sorted(set(zip(columns.sines, columns.negative, strict=True)))
        parts = [angles[sine] if not negative else nodes.one("Neg", angles[sine]) for sine, negative in kinds]
        whole = [*range(count)]
        if len(kinds) == 1 and list(columns.pairs) == whole * (len(columns.pairs) // count):
            times = len(columns.pairs) // count
            return nodes.one("Concat", *parts * times, axis=-1) if times > 1 else parts[0]
        both = nodes.one("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
        places = [
            kinds.index((sine, negative)) * count + pair
            for pair, sine, negative in zip(columns.pairs, columns.sines, columns.negative, strict=True)
        ]
        return nodes.one("Gather", both, nodes.constant(places), axis=2)


def _described(value: ir.Value, shape: tuple[int | str, ...]) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=ir.Shape(shape))
