"""Further angles by which queries or keys are rotated, such as those of a second rotation.

A rotation is recognised between two values. Nodes above these values are not part of it, but may rotate features too.
"""

from __future__ import annotations

import onnx_ir as ir

from posexport.graphs.attention.computations import above
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.probe import Probe

_ENDS = {"Softmax", "Conv", "Loop", "If", "Scan"}
_PRODUCTS = {"MatMul", "Gemm", "Einsum", "FusedMatMul", "MatMulInteger", "MatMulNBits"}
"""Operators that end the search above queries or keys. Products end it if their weights are fixed."""


UNKNOWN_ANGLES = "its queries or keys are rotated or scaled by numbers that are not values of the graph"
"""What is said of rotations whose angles are not found."""


def one_side_text(name: str) -> str:
    """What is said if rotations of only queries or only keys (`name`) are known."""
    return f"only its {name} are known to be rotated"


def further_text(name: str) -> str:
    """What is said of queries or keys (`name`) with further angles."""
    return f"its {name} are also rotated by other angles, before or after this rotation"


def further_angles(flow: Dataflow, probe: Probe, side: Side) -> list[ir.Value]:
    """Numbers that act on queries or keys outside of their recognised rotations and may be angles.

    They are computed from cosines or sines, or have an axis besides rows and tokens, which a temperature doesn't have.
    """
    if not side.rotations:
        return []
    known = {node for rotary in side.rotations for node in flow.between(rotary.source, rotary.target)}
    rows, tokens, _ = side.rotations[0].solved[0].shape
    found: dict[ir.Value, None] = {}
    for node in _above(flow, probe, side.source.value):
        # what a Concat puts beside features, such as learned keys, doesn't rotate them
        varying = [] if node in known or node.op_type == "Concat" else _varying(flow, probe, node)
        found |= dict.fromkeys(value for value in varying if _may_be_angles(flow, probe, value, rows, tokens))
    return [*found]


def _varying(flow: Dataflow, probe: Probe, node: ir.Node) -> list[ir.Value]:
    """The floating-point values that a node reads besides features and that differ between inputs."""
    others = (value for value in node.inputs if value is not None and value not in flow.content)
    return [value for value in others if value not in probe.fixed and probe.dtype(value).is_floating_point]


def _above(flow: Dataflow, probe: Probe, start: ir.Value) -> list[ir.Node]:
    """The nodes between a value and the products with fixed weights, or the tables, that it comes from."""
    nodes: dict[ir.Node, None] = {}
    pending = [start]
    for value in pending:
        node = value.producer()
        if node is None or node in nodes or node.op_type in _ENDS:
            continue
        content = flow.content_inputs(node)
        if node.op_type in _PRODUCTS and (len(content) > 1 or not _varying(flow, probe, node)):
            continue
        nodes[node] = None
        pending += content
    return [*nodes]


def _may_be_angles(flow: Dataflow, probe: Probe, value: ir.Value, rows: int, tokens: int) -> bool:
    longer = [size for size in probe.shape(value) if size > 1]
    for length in (rows, tokens):
        if length in longer:
            longer.remove(length)
    producers = (one.producer() for one in above(flow, [value]))
    return bool(longer) or any(node is not None and node.op_type in ("Cos", "Sin") for node in producers)
