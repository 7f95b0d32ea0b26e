"""Numbers that are the same for all inputs of a graph: constants, and what is computed from lengths that can't vary.

A probe has one set of inputs. A scale that is the root of the head size is the same on all others, one that is the
logarithm of the number of tokens is not, even where it is 1 on all short inputs. Exporters write both as arithmetic on
Shape. Which lengths vary is seen on inputs of other sizes; what is computed from those that don't is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.dataflow import LENGTHS, Dataflow, outer_values
from posexport.graphs.evaluate import Evaluator

_PICKS = {"Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Identity", "Reshape", "Split", "ReduceProd"}
"""Operators that choose among lengths."""


class FixedNumbers:
    """Which values of a graph are fixed. `values` are those on the probe's inputs, `others` inputs of other sizes."""

    def __init__(
        self,
        evaluator: Evaluator,
        flow: Dataflow,
        values: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
    ) -> None:
        self._evaluator, self._flow, self._values, self._others = evaluator, flow, values, others
        self._known: dict[ir.Value, bool] = {}
        self._lengths: dict[str, torch.Tensor] | None = None

    def __contains__(self, value: ir.Value) -> bool:
        if value not in self._known:
            self._known[value] = False  # of a circle, which a graph hasn't
            self._known[value] = self._is_fixed(value)
        return self._known[value]

    def _is_fixed(self, value: ir.Value) -> bool:
        if value in self._flow.constant:
            return True
        node = value.producer()
        if node is None or value in self._flow.content:
            return False
        if self._is_length(value):
            return self._is_same(value)
        return all(source in self for source in (*node.inputs, *outer_values(node)) if source is not None)

    def _is_length(self, value: ir.Value) -> bool:
        """Whether a value is one of the lengths of another, or several."""
        node = value.producer()
        while node is not None and node.op_type in _PICKS and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node is not None and node.op_type in LENGTHS

    def _is_same(self, value: ir.Value) -> bool:
        """Whether lengths are the same on inputs of other sizes."""
        if self._lengths is None:
            self._lengths = self._elsewhere()
        here, there = self._values.get(value.name or ""), self._lengths.get(value.name or "")
        return here is not None and there is not None and here.shape == there.shape and bool((here == there).all())

    def _elsewhere(self) -> dict[str, torch.Tensor]:
        """All lengths on inputs of other sizes; none where the graph doesn't take such."""
        values = [value for node in self._flow.graph for value in node.outputs if value.name]
        names = [value.name or "" for value in values if value not in self._flow.constant and self._is_length(value)]
        try:
            return self._evaluator.run(self._others, names)
        except RequestError:
            return {}
