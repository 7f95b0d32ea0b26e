"""Expands operators that stand for attention or a rotation into standard operators.

Attention-23 to 25 of ONNX, and Attention, MultiHeadAttention, GroupQueryAttention and RotaryEmbedding of com.microsoft
become products, masks and rotations. Attention is then recognised in one way, whoever wrote it, and any form can become
any other. An operator with an input or attribute that its expansion doesn't know stays.

The names of an operator's outputs stay. `Expanded` has the names of its new nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs
import onnx_ir as ir

from posexport.errors import shown
from posexport.graphs.expansions import EXPANSIONS
from posexport.graphs.folded_heads import folds_of, values_above
from posexport.graphs.grouped import PRODUCTS, around_softmaxes, may_be_written_out
from posexport.graphs.nodes import Nodes
from posexport.graphs.operators import Call, Shapes, Unexpanded

Kind = tuple[str, str]
"""The domain and the operator of a node."""


@attrs.frozen(kw_only=True)
class Expanded:
    """An operator that was written out: the old `node`, its inputs, and the names of its outputs and new nodes."""

    name: str
    node: ir.Node
    inputs: tuple[ir.Value | None, ...]
    outputs: tuple[str, ...]
    nodes: frozenset[str]


def domain_of(node: ir.Node) -> str:
    """The domain of an operator; empty for ONNX's own operators."""
    return "" if node.domain == "ai.onnx" else node.domain


def kind_of(node: ir.Node) -> Kind:
    """The domain and the operator of a node."""
    return domain_of(node), node.op_type


def expandable(model: ir.Model) -> list[ir.Node]:
    """The nodes of the main graph that have an expansion, without products with folded heads."""
    around = around_softmaxes(model.graph)
    pairs = ((node, scores) for scores, before, behind in around for node in (*before, *behind))
    products = {node for node, scores in pairs if may_be_written_out(node, scores)}
    return [
        node
        for node in model.graph
        if kind_of(node) in EXPANSIONS and (node.op_type not in PRODUCTS or node in products)
    ]


def maybe_folded(model: ir.Model) -> list[ir.Value]:
    """The values whose shapes tell which products have folded heads."""
    return values_above([(before, behind) for _, before, behind in around_softmaxes(model.graph)])


def expand(
    model: ir.Model,
    shapes: Shapes,
    names: Collection[str] | None = None,
    *,
    varying: Collection[tuple[str, int]] = (),
    refused: dict[ir.Node, str] | None = None,
    left: Mapping[Kind, str] | None = None,
) -> list[Expanded]:
    """Write operators out: those with these `names`, or all that have an expansion.

    The name of an operator is that of its first output. `shapes` has the shapes of their inputs by name; `varying` are
    the axes (name, number) whose length is not the same on all inputs. `refused` gets the operators that stay, with the
    reasons. Operators of the kinds `left` stay, for the reason given there.
    """
    found: list[Expanded] = []
    refused = {} if refused is None else refused
    taken = {value.name or "" for value in (*model.graph.inputs, *model.graph.initializers.values())}
    taken |= {value.name or "" for node in model.graph for value in node.outputs} | {
        node.name or "" for node in model.graph
    }
    folds = folds_of([(before, behind) for _, before, behind in around_softmaxes(model.graph)], shapes)
    chosen = {*expandable(model), *folds}
    for node in [node for node in model.graph if node in chosen]:
        name = node.outputs[0].name or ""
        if names is not None and name not in names:
            continue
        nodes = Nodes(taken, prefix=name)
        try:
            if left and kind_of(node) in left:
                raise Unexpanded(left[kind_of(node)])
            results = EXPANSIONS[kind_of(node)](
                Call(node=node, nodes=nodes, shapes=shapes, varying=varying, fold=folds.get(node))
            )
        except Unexpanded as reason:
            refused[node] = str(reason)
            continue
        made = [*results, *[None] * (len(node.outputs) - len(results))]
        missing = [
            old.name
            for old, new in zip(node.outputs, made, strict=False)
            if new is None and (old.uses() or old.is_graph_output())
        ]
        if missing:
            refused[node] = f"its output {shown(missing[0] or '')} is read, which it alone gives"
            continue
        inputs, outputs = tuple(node.inputs), tuple(value.name or "" for value in node.outputs)
        model.graph.insert_before(node, nodes.nodes)
        _replace(zip(node.outputs, made, strict=False))
        model.graph.remove(node, safe=True)
        names_of_new = frozenset(new.name or "" for new in nodes.nodes)
        found.append(Expanded(name=name, node=node, inputs=inputs, outputs=outputs, nodes=names_of_new))
    return found


def _replace(pairs: Iterable[tuple[ir.Value, ir.Value | None]]) -> None:
    """Put new values in place of old ones, under the old names."""
    for old, new in pairs:
        if new is not None and old.name:
            name, new.shape, new.type = old.name, old.shape, old.type or new.type
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            old.name = f"{name}/operator"
            new.name = name
