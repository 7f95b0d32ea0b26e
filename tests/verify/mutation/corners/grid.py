"""Corners of grids: clipped rows and columns, single cells, offsets without their bias."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from mutation.artifacts import Artifact
from mutation.corners.family import Apply, Fault, Random, family, on_input
from mutation.inputs import Aim
from mutation.surgery import Nodes, constant_value, insert, sites


def _grid_aims(artifact: Artifact) -> tuple[Aim, ...]:
    limit = artifact.spec.position_limit()
    if limit is not None:
        return (Aim(batch=(1, 2), seq=(limit**2, limit**2)), Aim(batch=(2, 3), seq=(30, 60)))
    return (
        Aim(batch=(1, 2), seq=(30, 60), positions=("gaps", "shuffled"), start=(0, 200)),
        Aim(batch=(1, 1), seq=(600, 1000)),
    )


@family("grid", "row or column clipped")
def _clipped_axis(artifact: Artifact, random: Random) -> Fault | None:
    axes, limit = artifact.spec.position_axes, artifact.spec.position_limit()
    if axes < 2:
        return None
    axis, most = int(random.integers(axes)), (limit or 30) - 2
    clipped = int(random.integers(2, most + 1))
    limits = [2**40] * axes
    limits[axis] = clipped

    def change(nodes: Nodes, name: str) -> str:
        return nodes.op("Min", name, nodes.const(limits))

    return Fault(f"axis {axis} above {clipped}", on_input("position_ids", change), _grid_aims(artifact))


@family("grid", "one cell misread")
def _one_cell(artifact: Artifact, random: Random) -> Fault | None:
    axes, limit = artifact.spec.position_axes, artifact.spec.position_limit()
    if axes < 2 or limit is None:
        return None
    cell, other = random.integers(0, limit, (2, axes))
    if (cell == other).all():
        return None

    def change(nodes: Nodes, name: str) -> str:
        same = nodes.op("Cast", nodes.op("Equal", name, nodes.const(cell)), to=TensorProto.INT64)
        here = nodes.op("Cast", nodes.op("ReduceMin", same, nodes.const([-1]), keepdims=1), to=TensorProto.BOOL)
        return nodes.op("Where", here, nodes.const(other), name)

    return Fault(f"{cell.tolist()} as {other.tolist()}", on_input("position_ids", change), _grid_aims(artifact))


@family("grid", "axes exchanged from a row on")
def _exchanged(artifact: Artifact, random: Random) -> Fault | None:
    axes, limit = artifact.spec.position_axes, artifact.spec.position_limit()
    if axes < 2:
        return None
    row = int(random.integers(2, (limit or 40) - 1))
    order = [1, 0, 2][:axes]

    def change(nodes: Nodes, name: str) -> str:
        rows = nodes.op("Gather", name, nodes.const([1]), axis=-1)
        other = nodes.op("Gather", name, nodes.const(order), axis=-1)
        return nodes.op("Where", nodes.op("GreaterOrEqual", rows, nodes.const(row)), other, name)

    return Fault(f"row {row}", on_input("position_ids", change), _grid_aims(artifact))


def _offset_rows(window: int, chosen: Callable[[int, int], bool]) -> list[int]:
    """Rows of a table of (2 window - 1)^2 offsets, dy first."""
    span = range(1 - window, window)
    return [(dy + window - 1) * (2 * window - 1) + dx + window - 1 for dy in span for dx in span if chosen(dy, dx)]


def _on_rows(count: int, rows: list[int], factor: float) -> Apply:
    """Multiply some rows of the table with `count` rows that a Gather reads with computed indices."""
    factors = np.ones((count, 1), np.float32)
    factors[rows] = factor

    def apply(model: onnx.ModelProto) -> bool:
        found = False
        for holder, index, node in list(sites(model, "Gather")):
            if constant_value(holder, model, node.input[1]) is not None or found:
                continue
            nodes = Nodes()
            scaled = nodes.op(
                "Mul", node.input[0], nodes.op("CastLike", nodes.const(factors, np.float32), node.input[0])
            )
            node.input[0] = scaled

            insert(holder, index, nodes)
            found = True
        return found

    return apply


@family("grid", "offsets without a bias")
def _offsets_zero(artifact: Artifact, random: Random) -> Fault | None:
    window = getattr(artifact.spec.encoding, "window_size", None)
    if window is None:
        return None
    least = int(random.integers(1, window))
    axis, sign = int(random.integers(2)), int(random.choice([-1, 0, 1]))

    def chosen(dy: int, dx: int) -> bool:
        offset = (dy, dx)[axis]
        return abs(offset) >= least if sign == 0 else offset * sign >= least

    rows = _offset_rows(window, chosen)
    factor = float(random.choice([0.0, 0.5, -1.0]))
    numbers = f"{'yx'[axis]} offsets of {least} and more, sign {sign}, times {factor}"
    return Fault(numbers, _on_rows((2 * window - 1) ** 2, rows, factor), _grid_aims(artifact))


@family("grid", "one offset misread")
def _one_offset(artifact: Artifact, random: Random) -> Fault | None:
    window = getattr(artifact.spec.encoding, "window_size", None)
    if window is None:
        return None
    dy, dx = (int(number) for number in random.integers(1 - window, window, 2))
    rows = _offset_rows(window, lambda y, x: (y, x) == (dy, dx))
    return Fault(f"dy {dy}, dx {dx}", _on_rows((2 * window - 1) ** 2, rows, 0.5), _grid_aims(artifact))
