"""A graph prepared for finding attention: functions inlined, inputs with roles, and one run on drawn inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs
import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.candidates import nested
from posexport.graphs.attention.dataflow import Dataflow
from posexport.graphs.attention.learned import knows_more, learned_values
from posexport.graphs.attention.probe import Probe
from posexport.graphs.attention.recognise import Found, recognise
from posexport.graphs.axes import BATCH
from posexport.graphs.contracted_axes import token_first
from posexport.graphs.draw import DrawnInputs, probe_inputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.expand import Expanded, Kind, expand, expandable, kind_of, maybe_folded
from posexport.graphs.expansion_check import wrong_ones
from posexport.graphs.frames import NodeError
from posexport.graphs.kernels.registry import Value
from posexport.graphs.load import live
from posexport.graphs.operators import Shapes
from posexport.graphs.roles import Role, roles_of, untold
from posexport.graphs.settled import settled_roles
from posexport.graphs.unread import with_unread
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import to_tensors

TOKENS = {"token_ids", "encoder_token_ids", "token_type_ids", "index"}
"""Roles of inputs that are looked up in tables of features."""

CONTENT = {"past", "encoder_past", "state", "features", "encoder_features", "images", "audio"}
"""Roles of inputs that contain features."""


@attrs.frozen(kw_only=True)
class View:
    """A model whose functions are inlined, the roles of its inputs, and what was probed in it.

    `expanded` are the operators that were written out. `operator_shapes` are the shapes of what they read.
    """

    model: ir.Model
    roles: Mapping[str, Role]
    inputs: DrawnInputs
    flow: Dataflow
    probe: Probe
    attentions: tuple[Found, ...]
    expanded: tuple[Expanded, ...]
    operator_shapes: Shapes
    _ran: dict[str, ir.DataType] = attrs.field(factory=dict, init=False, repr=False)
    """The dtypes, found by a run, of values whose dtype the graph doesn't state."""

    def operator_of(self, name: str) -> Expanded | None:
        """The operator that a node of this name comes from; None if the node was always in the graph."""
        return next((one for one in self.expanded if name in one.nodes), None)

    def shapes(self, values: Iterable[ir.Value]) -> dict[str, tuple[int, ...]]:
        """The probed shape of each value."""
        return {value.name or "": self.probe.shape(value) for value in values}

    def shapes_on(self, values: Iterable[ir.Value], inputs: Arrays) -> dict[ir.Value, tuple[int, ...]]:
        """The shapes of values on other inputs, if the inputs' shapes alone determine them."""
        shapes, values = self.probe.shapes, [*values]
        here, there = (
            shapes.on(values, {name: array.shape for name, array in arrays.items()})
            for arrays in (self.inputs.arrays, inputs)
        )
        return {value: shape for value, shape in there.items() if here.get(value) == self.probe.shape(value)}

    def dtypes(self, values: Iterable[ir.Value]) -> dict[str, ir.DataType]:
        """The dtype of each value, from the graph if it states it, otherwise from a run in the graph's own dtypes."""
        found = {value.name or "": value for value in values}
        unknown = [value for name, value in found.items() if value.dtype is None and name not in self._ran]
        if unknown:
            arrays = to_tensors(self.inputs.arrays)
            read = (value for node in self.model.graph for value in node.outputs if value.name and value.uses())
            try:  # for all at once, because each run computes the whole graph
                self._ran.update(_dtypes(self.model, arrays, [*unknown, *read]))
            except RequestError:
                self._ran.update(_dtypes(self.model, arrays, unknown))
        known = {name: value.dtype or self._ran.get(name) for name, value in found.items()}
        return {name: dtype for name, dtype in known.items() if dtype is not None}


def view_of(model: ir.Model, given: Mapping[str, str] | None = None, seed: int = 0, *, kept: str | None = None) -> View:
    """The attention of a model.

    The model's functions are inlined in place, and nodes that nothing reads are removed; View.model is the result.
    `given` are roles of inputs by name. Functions of the domain `kept` stay functions, and their attention is not
    looked for.
    RequestError if the role of an input can't be guessed, or the graph can't be evaluated.
    """
    live(model, kept)
    roles = with_unread(model, settled_roles(model, roles_of(model, given), seed))
    drawn = probe_inputs(roles, seed)
    operands = {value.name or "": value for node in expandable(model) for value in node.inputs if value is not None}
    for name, dtype in _dtypes(model, to_tensors(drawn.arrays), operands.values()).items():
        operands[name].dtype = dtype
    shapes: dict[str, tuple[int, ...]] = {}
    varying: set[tuple[str, int]] = set()
    flow, probe = _probed(model, roles, drawn, seed)
    if untold(roles) and (turned := token_first(model, probe, roles)):
        roles = with_unread(model, settled_roles(model, roles_of(model, given, turned), seed))
        drawn = probe_inputs(roles, seed)
        flow, probe = _probed(model, roles, drawn, seed)
    shapes, varying = _operator_shapes(model, probe, operands)
    work = _Expanding(model=model, roles=roles, inputs=drawn, seed=seed, flow=flow, probe=probe)
    if shapes:
        work.expand(shapes, varying)
    found = recognise(work.flow, work.probe, drawn.sizes[BATCH], work.refused)
    learned = learned_values(work.flow, found)
    if learned:
        with_learned = _probed(work.model, roles, drawn, seed, learned)
        again = recognise(*with_learned, drawn.sizes[BATCH], work.refused)
        if knows_more(again, found):
            (work.flow, work.probe), found = with_learned, again
    return View(
        model=work.model,
        roles=roles,
        inputs=drawn,
        flow=work.flow,
        probe=work.probe,
        attentions=(*found, *nested(work.model, len(found), kept)),
        expanded=tuple(work.expanded),
        operator_shapes=shapes,
    )


def _operator_shapes(
    model: ir.Model, probe: Probe, operands: dict[str, ir.Value]
) -> tuple[dict[str, tuple[int, ...]], set[tuple[str, int]]]:
    """The shapes of the inputs of operators that may be written out, and which of their axes vary.

    `operands` are the inputs of operators that stand for attention. Both are empty if there is nothing to write out.
    """
    around = {value.name or "": value for value in maybe_folded(model)} | operands
    shapes = {name: probe.shape(value) for name, value in around.items()}
    varying = {
        (name, axis)
        for name, value in operands.items()
        for axis, size in enumerate(probe.shapes.of(value))
        if not size.is_fixed
    }
    return shapes, varying


@attrs.define(kw_only=True)
class _Expanding:
    """Writes out the operators of a model that stand for attention, and takes back what is written out wrongly.

    `refused` says why operators stay, by node.
    """

    model: ir.Model
    roles: Mapping[str, Role]
    inputs: DrawnInputs
    seed: int
    flow: Dataflow
    probe: Probe
    expanded: list[Expanded] = attrs.field(factory=list)
    refused: dict[ir.Node, str] = attrs.field(factory=dict)

    def expand(self, shapes: Mapping[str, tuple[int, ...]], varying: Collection[tuple[str, int]]) -> None:
        """Write out all operators but those whose expansion can't be evaluated or gives other numbers."""
        left: dict[Kind, str] = {}
        while True:
            plain, self.refused = self.model.clone(), {}
            self.expanded = expand(self.model, shapes, varying=varying, refused=self.refused, left=left)
            wrong, why = self._wrong(plain, bool(left))
            if not wrong:
                return
            left |= {kind_of(one.node): f"what it was written out as {why}" for one in wrong}
            self.model = plain

    def _wrong(self, plain: ir.Model, again: bool) -> tuple[list[Expanded], str]:
        """The wrong expansions and what is wrong with them; `plain` is the model without expansions."""
        try:
            if self.expanded or again:
                self.flow, self.probe = _probed(self.model, self.roles, self.inputs, self.seed)
            if not self.expanded:
                return [], ""
            return [*wrong_ones(plain, self.model, self.flow, self.probe, self.expanded)], "gives other numbers"
        except RequestError as error:
            if not self.expanded:
                raise
            broken = [one for one in self.expanded if isinstance(error, NodeError) and error.node.name in one.nodes]
            return broken or self.expanded, "can't be evaluated"


def _probed(
    model: ir.Model, roles: Mapping[str, Role], drawn: DrawnInputs, seed: int, learned: Collection[str] = ()
) -> tuple[Dataflow, Probe]:
    """The dataflow of a model, and one run on drawn inputs. `learned` are values that count as features."""
    tokens = {name for name, role in roles.items() if role.kind in TOKENS}
    content = {name for name, role in roles.items() if role.kind in CONTENT}
    flow = Dataflow(model, tokens, content, learned)
    return flow, Probe(Evaluator(model), flow, to_tensors(drawn.arrays), roles, seed)


def _dtypes(model: ir.Model, arrays: Mapping[str, torch.Tensor], values: Iterable[ir.Value]) -> dict[str, ir.DataType]:
    """The dtype of each value by name, from the graph if it states it, otherwise from a run in its own dtypes."""
    found = {value.name or "": value.dtype for value in values}
    unknown = [name for name, dtype in found.items() if dtype is None]
    if unknown:

        def note(name: str, value: Value) -> None:
            if isinstance(value, torch.Tensor):
                found[name] = ir.tensor_adapters.from_torch_dtype(value.dtype)

        Evaluator(model, wide=False).run(arrays, unknown, see=note)
    return {name: dtype for name, dtype in found.items() if dtype is not None}
