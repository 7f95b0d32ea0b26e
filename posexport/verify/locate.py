"""Where a graph departs: the first node, in topological order, that differs from a fresh export of the same block.

Export is deterministic, so a fresh export of the artifact's spec, form, opset and weights has the same nodes with the
same names. Functions are inlined in both graphs. There are two comparisons:

- structure: the first node whose operator, attributes, inputs or constants differ;
- values: every value is made an output, and the failing runtime runs both graphs: the first node whose output differs.
  If none differs, the first node that departs from onnx's reference evaluator: then the fault is the runtime's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import attrs
import numpy as np
import onnx
import onnx_ir as ir
import torch

from posexport.artifact import onnx_file
from posexport.artifact.onnx_artifact import Artifact
from posexport.errors import plain, shown
from posexport.export.exporter import export
from posexport.graphs.load import inlined, without_warnings
from posexport.models.weights import TORCH_DTYPES, LazyWeights, bytes_of, weight_shapes
from posexport.runtimes.base import Arrays
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.result import ONLY_AS_A_WHOLE

LARGEST = 1_000_000_000
"""The most bytes of weights of a graph that is written again to look inside it."""

_REFERENCE_TOLERANCE = {"fp32": 1e-3, "fp16": 3e-2, "bf16": 2e-1}  # as a part of a value's largest magnitude

Run = Callable[[Path], "Arrays | str"]
"""Maps a model file to its outputs on the failing inputs, or to one sentence that says why there are none."""


@attrs.frozen(kw_only=True)
class Graphs:
    """The graphs of the artifact and of a fresh export, both inlined."""

    mine: onnx.ModelProto
    fresh: onnx.ModelProto
    weights: frozenset[str]
    dtype: str


def load_graphs(artifact: Artifact) -> Graphs | str:
    """Both graphs with their weights, or one sentence that says why they can't be looked at."""
    weights = artifact.weights().shapes
    if bytes_of(artifact.spec) > LARGEST:
        return "the weights are too large to look inside the graph"
    bounds = bounds_of(graph_inputs(artifact.spec), artifact.inputs())
    sizes = ((dim, bounds.get(dim, (1, None))) for dim in ("batch", "seq", "max_seq"))
    fixed = tuple((dim, low) for dim, (low, high) in sizes if low == high)
    mine = onnx_file.load(artifact.path)
    if mine.functions:
        with without_warnings():  # by onnx_ir: it is Python, so a damaged graph can't end this process
            mine = ir.to_proto(inlined(ir.from_proto(mine)))
    fresh = onnx.ModelProto()
    fresh.CopyFrom(_fresh(artifact.spec, artifact.form, artifact.target, artifact.opset, fixed))
    fresh.graph.initializer.extend(tensor for tensor in mine.graph.initializer if tensor.name in weights)
    return Graphs(mine=mine, fresh=fresh, weights=frozenset(weights), dtype=artifact.spec.dtype)


@functools.lru_cache(maxsize=8)
def _fresh(spec: Spec, form: str, target: str, opset: int, fixed: tuple[tuple[str, int], ...]) -> onnx.ModelProto:
    """A fresh export without its weights: its graph doesn't depend on them. Cached, since many files may fail alike."""
    dtype, shapes = getattr(torch, TORCH_DTYPES[spec.dtype]), weight_shapes(spec)
    zeros = LazyWeights(shapes, lambda name: torch.zeros(shapes[name], dtype=dtype))
    model = onnx_file.skeleton(inlined(export(spec, zeros, form=form, target=target, opset=opset, **dict(fixed))))
    constants = [tensor for tensor in model.graph.initializer if tensor.name not in shapes]
    del model.graph.initializer[:]
    model.graph.initializer.extend(constants)
    return model


def structure(graphs: Graphs) -> str | None:
    """The first node that differs from a fresh export, in one clause; None if the graphs are the same."""
    mine, fresh = ({tensor.name: tensor for tensor in g.graph.initializer} for g in (graphs.mine, graphs.fresh))
    for index, (node, other) in enumerate(zip_longest(graphs.mine.graph.node, graphs.fresh.graph.node)):
        if node is None:
            return f"the graph ends before {_called(other)}, which a fresh export has"
        what: str | None = "comes after the last one of a fresh export"
        if other is not None:
            what = _difference(node, other) or _constant_difference(node, mine, fresh, graphs.weights)
        if what is not None:
            return f"{_called(node)}, node {index} of the graph, {what}"
    for kind in ("input", "output"):
        names = [[value.name for value in getattr(model.graph, kind)] for model in (graphs.mine, graphs.fresh)]
        if names[0] != names[1]:
            return f"the graph's {kind}s are {', '.join(names[0]) or 'none'}, a fresh export's {', '.join(names[1])}"
    return None


def values(graphs: Graphs, folder: Path, run: Run, reference: Run) -> tuple[str | None, str]:
    """The first node whose output differs, in one clause, or None; and why there is none.

    `run` is the failing runtime, `reference` onnx's evaluator; both get the failing inputs.
    """
    mine, paths = _expose(graphs.mine), (folder / "mine.onnx", folder / "fresh.onnx")
    onnx.save(mine, paths[0])
    onnx.save(_expose(graphs.fresh), paths[1])
    have, exact = run(paths[0]), run(paths[1])
    if isinstance(have, str) or isinstance(exact, str):
        error = have if isinstance(have, str) else exact
        return None, f"with its values as outputs it does not run: {' '.join(str(error).split())[:200].rstrip('.')}"
    clause = _first(mine, have, exact, 1e-6)
    if clause is not None:
        return f"{clause} a fresh export computes on the same runtime", ""
    sound = reference(paths[1])
    if isinstance(sound, str):
        return None, "its values are those of the export on the same runtime, and onnx's reference evaluator has none"
    clause = _first(mine, have, sound, _REFERENCE_TOLERANCE[graphs.dtype])
    if clause is not None:
        return f"{clause} onnx's reference evaluator computes", ""
    for node in mine.graph.node:
        if any(
            not np.isfinite(np.asarray(have[name]).astype(np.float64)).all() for name in node.output if name in have
        ):
            return None, f"{_called(node)} is the first with values that are not finite, in the export too"
    return None, ONLY_AS_A_WHOLE


def _first(model: onnx.ModelProto, have: Arrays, want: Arrays, tolerance: float) -> str | None:
    for node in model.graph.node:
        for name in node.output:
            if name not in have or name not in want:
                continue
            a, b = have[name], want[name]
            if a.shape != b.shape:
                return f"{_called(node)} gives {name!r} the shape {list(a.shape)}, not {list(b.shape)} as"
            actual, exact = (np.asarray(array).astype(np.float64) for array in (a, b))
            departs = f"{_called(node)} is the first whose output differs: {name!r}"
            invalid, other = ~np.isfinite(actual), ~np.isfinite(exact)
            if (invalid != other).any():
                return f"{departs} has {int(invalid.sum())} values that are not finite, unlike what"
            actual, exact = actual[~invalid], exact[~invalid]
            error, scale = (float(np.abs(array).max(initial=0.0)) for array in (actual - exact, exact))
            if not error <= tolerance * scale:
                return f"{departs} is off by {error:.3g} of {scale:.3g} from what"
    return None


def _called(node: onnx.NodeProto) -> str:
    operator = plain(node.op_type, 80, "")
    return f"{operator} {shown(node.name)}" if node.name else f"{operator} -> {shown(list(node.output[:1]))}"


def _difference(node: onnx.NodeProto, other: onnx.NodeProto) -> str | None:
    """How a node differs from its counterpart, without its constants."""
    if (node.domain, node.op_type) != (other.domain, other.op_type):
        return f"stands where a fresh export has {_called(other)}"
    for verb, ours, fresh in (("reads", node.input, other.input), ("writes", node.output, other.output)):
        if list(ours) != list(fresh):
            return f"{verb} {shown(list(ours), 400)}, in a fresh export {shown(list(fresh), 400)}"
    mine, theirs = ({a.name: a for a in one.attribute} for one in (node, other))
    for name in sorted({*mine, *theirs}):
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None or _value(a) != _value(b):
            return f"has {_shown(a)}, in a fresh export {_shown(b)}"
    return None


def _value(attribute: onnx.AttributeProto) -> object:
    """The value of an attribute, however it is stored: a tensor may have its numbers in one of several fields."""
    if attribute.type != onnx.AttributeProto.TENSOR:
        return attribute.SerializeToString(deterministic=True)
    array = onnx.numpy_helper.to_array(attribute.t)
    return str(array.dtype), array.shape, array.tobytes()


def _shown(attribute: onnx.AttributeProto | None) -> str:
    if attribute is None:
        return "no such attribute"
    if attribute.type == onnx.AttributeProto.TENSOR:
        return f"{attribute.name}={onnx.numpy_helper.to_array(attribute.t).ravel()[:8].tolist()}"
    return plain(f"{attribute.name}={shown(onnx.helper.get_attribute_value(attribute), 400)}", 500, "")


def _constant_difference(
    node: onnx.NodeProto, mine: dict[str, onnx.TensorProto], fresh: dict[str, onnx.TensorProto], weights: frozenset[str]
) -> str | None:
    """How an initializer that the node reads differs. Weights are not compared: both graphs have the artifact's own."""
    for name in node.input:
        if name in weights or (name not in mine and name not in fresh):
            continue
        if name not in mine or name not in fresh:
            return f"reads {name!r}, which is a constant in only one of the artifact and a fresh export"
        a, b = (onnx.numpy_helper.to_array(constants[name]) for constants in (mine, fresh))
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"reads {name!r} of {a.dtype}{list(a.shape)}, in a fresh export {b.dtype}{list(b.shape)}"
        if not np.array_equal(a, b):
            index = tuple(int(axis) for axis in np.argwhere(~(a == b))[0])
            return f"reads {name!r}, which holds {a[index]} at {list(index)}, in a fresh export {b[index]}"
    return None


def _expose(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every value of its graph as an output."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    have = {value.name for value in exposed.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in have]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return exposed
