"""Values of a graph that depend on no features, such as cosines, masks and biases, computed on chosen inputs.

Only the inputs that a value needs are drawn, and only the nodes that it needs are run. So long sequences are cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
import onnx_ir as ir
import torch

from posexport.graphs.attention.dataflow import values_read
from posexport.graphs.attention.rotary import AngleSource
from posexport.graphs.axes import AXES, BATCH, CACHED, ENCODER, HEIGHT, PAST, SEQ, WIDTH, Axes, is_token_first
from posexport.graphs.draw import DrawnInputs, Kinds, draw_inputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.roles import Role
from posexport.graphs.sizes import fitted, is_dynamic, side_of, step_of
from posexport.graphs.view import View
from posexport.runtimes.tensors import to_torch

Positions = Sequence[Sequence[int]]
"""The positions of the tokens of one row, with one number for each axis."""

Rows = Sequence[Positions]
"""The positions of several rows."""

POSITIONS = "position_ids"
"""The role of inputs with positions."""


class Measure:
    """Values of the graph of a view, computed in float64 on chosen inputs."""

    def __init__(self, view: View) -> None:
        self._view, self._evaluator = view, Evaluator(view.model)
        self._inputs: dict[ir.Value, frozenset[str]] = {}

    def inputs_of(self, values: Iterable[ir.Value]) -> frozenset[str]:
        """The names of the graph inputs that values are computed from."""
        return frozenset().union(*(self._inputs_of(value) for value in values))

    def kinds_of(self, values: Iterable[ir.Value]) -> set[str]:
        """The roles of the graph inputs that values are computed from."""
        return {self._view.roles[name].kind for name in self.inputs_of(values)}

    def axes_of(self, values: Iterable[ir.Value]) -> int | None:
        """The number of axes of a position; None unless the values are computed from positions that are inputs.

        Only inputs with a position for each token count: these positions can be chosen one by one.
        """
        for name in sorted(self.inputs_of(values)):
            role = self._view.roles[name]
            if self._has_chosen_positions(role):
                return int(self._view.inputs.arrays[name].shape[role.axes.index(AXES)]) if AXES in role.axes else 1
        return None

    def _has_chosen_positions(self, role: Role) -> bool:
        """Whether an input has the positions of all tokens. First positions count if rows have only one token."""
        return role.kind == POSITIONS and (not role.is_first_position or self.sizes(2)[SEQ] == 1)

    def shares_positions(self, values: Iterable[ir.Value]) -> bool:
        """Whether all rows share the positions that the values are computed from."""
        roles = [self._view.roles[name] for name in self.inputs_of(values)]
        return all(BATCH not in role.axes for role in roles if self._has_chosen_positions(role))

    def position_limit(self, values: Iterable[ir.Value]) -> int | None:
        """The rows of the smallest table that positions are looked up in; None if there is none."""
        rows = [self._view.roles[name].rows for name in self.inputs_of(values)]
        return min((count for count in rows if count is not None), default=None)

    def varies(self, meaning: str) -> bool:
        """Whether the graph has an axis of this meaning that may vary (posexport.graphs.axes)."""
        return is_dynamic(self._view.roles, meaning)

    def sizes(self, seq: int, past: int = 0, batch: int = 1, sides: Mapping[str, int] | None = None) -> dict[str, int]:
        """Sizes by meaning, as near to these as the graph allows."""
        return fitted(self._view.roles, {BATCH: batch, SEQ: seq, PAST: past, **(sides or {})})

    def other_sides(self) -> dict[str, int] | None:
        """A height and a width of images, other than each other and the model's own; None if they are fixed."""
        images = [role for role in self._view.roles.values() if {HEIGHT, WIDTH} <= {*role.axes}]
        if not images or not (self.varies(HEIGHT) and self.varies(WIDTH)):
            return None
        steps = {axis: step_of(images[0], axis) for axis in (HEIGHT, WIDTH)}
        patches = side_of(images[0], HEIGHT) // steps[HEIGHT]
        return {HEIGHT: (patches + 1) * steps[HEIGHT], WIDTH: (patches + 3) * steps[WIDTH]}

    def run(
        self,
        values: Sequence[ir.Value],
        *,
        batch: int = 1,
        seq: int,
        past: int = 0,
        padding: str = "none",
        positions: Positions | Rows | None = None,
        sides: Mapping[str, int] | None = None,
        seed: int = 0,
        marks: bool = False,
    ) -> tuple[list[torch.Tensor], DrawnInputs]:
        """Values on inputs of these sizes, as near as the graph allows, and the inputs.

        `padding` is as in posexport.graphs.draw. `positions` are those of `batch` rows of `seq` tokens, or of one row
        for all, and those of as many tokens of an encoder. `sides` are the height and the width of images, by default
        the model's own. Ids that the graph compares tokens with are among the tokens only with `marks`.
        """
        needed = self.inputs_of(values)
        roles = {name: role for name, role in self._view.roles.items() if name in needed}
        sizes = self.sizes(seq, past, batch, sides)
        if positions is not None and any(role.kind == POSITIONS and ENCODER in role.axes for role in roles.values()):
            sizes[ENCODER] = sizes[SEQ]
        drawn = draw_inputs(self._sized(roles), sizes, np.random.default_rng(seed), Kinds(padding=padding, marks=marks))
        for name, role in roles.items():
            if role.marks and not marks:
                drawn.arrays[name][np.isin(drawn.arrays[name], role.marks)] = _unmarked(role)
            if positions is not None and self._has_chosen_positions(role):
                drawn.arrays[name][...] = _positions(drawn.arrays[name].shape, role.axes, positions)
        arrays = {name: to_torch(drawn.arrays[name]) for name in roles}
        names = [value.name or "" for value in values]
        results = self._evaluator.run(arrays, [*dict.fromkeys(names)])
        return [results[name] for name in names], drawn

    def _sized(self, roles: Mapping[str, Role]) -> dict[str, Role]:
        """The roles, with a small input for a cache of the graph if they have none: otherwise nothing is cached."""
        caches = [role for role in self._view.roles.values() if role.kind in CACHED]
        if not caches or any(role.kind in CACHED for role in roles.values()):
            return dict(roles)
        one = caches[0]
        pairs = [
            (1, 1) if isinstance(axis, int) else (dim, axis) for dim, axis in zip(one.shape, one.axes, strict=True)
        ]
        shape, axes = zip(*pairs, strict=True) if pairs else ((), ())
        return {**roles, one.name: attrs.evolve(one, shape=shape, axes=axes)}

    def _inputs_of(self, value: ir.Value) -> frozenset[str]:
        if value not in self._inputs:
            seen, pending = {value}, [value]
            names = set()
            while pending:
                one = pending.pop()
                node = one.producer()
                if node is None or one.name in self._view.roles:
                    if one.name in self._view.roles or (one.is_graph_input() and not one.is_initializer()):
                        names.add(one.name or "")
                    continue
                sources = {*values_read(node)} - seen
                seen |= sources
                pending += sources
            self._inputs[value] = frozenset(names)
        return self._inputs[value]


def _unmarked(role: Role) -> int:
    """An id that the graph doesn't compare tokens with."""
    return next(one for one in range(len(role.marks) + 1) if one not in role.marks)


def _positions(shape: tuple[int, ...], axes: Axes, positions: Positions | Rows) -> np.ndarray:
    """An array of this shape with positions [batch, seq, axes], or [seq, axes] in every row."""
    table = np.asarray(positions, np.int64)
    table = table if table.ndim == 3 else table[None]
    table = table.swapaxes(0, 1) if is_token_first(axes) else table
    if AXES not in axes:
        return np.broadcast_to(table[..., 0] if len(shape) > 1 else table[0, :, 0], shape)
    return np.broadcast_to(np.moveaxis(table, -1, axes.index(AXES)), shape)


def angles_in(source: AngleSource, value: torch.Tensor) -> torch.Tensor:
    """The cosines or sines [B or 1, S, P] of an AngleSource in its value, without the first `prefix` tokens."""
    return source.sign * source.by_token(value)[..., list(source.indices)]
