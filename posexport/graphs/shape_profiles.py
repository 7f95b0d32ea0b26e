"""The shapes that a plan of any graph is built for, by the meanings of its inputs' axes: batch, seq, past_seq, ...

A dimension has the name that artifacts of posexport give it, so that requests and defaults are the same for all files
(posexport.artifact.profiles). Requests may also use the file's own names of dimensions. Imports no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from posexport.artifact.profiles import profiles_of
from posexport.graphs.axes import BATCH, ENCODER, PAST, SEQ, SLOTS, TOTAL
from posexport.graphs.inspection import Inspection
from posexport.spec.contract import Shape

NAMES = {BATCH: "batch", SEQ: "seq", PAST: "past_seq", TOTAL: "total_seq", SLOTS: "max_seq", ENCODER: "encoder_seq"}
"""The names of dimensions by the meaning of an axis. Other axes have the name of their meaning."""


def graph_profiles(
    inputs: Mapping[str, Shape], found: Inspection, requests: Iterable[str] = ()
) -> dict[str, dict[str, list[int]]]:
    """{input: {min, opt, max}} for every input of a graph; raises what posexport.artifact.profiles.profiles_of raises.

    Positions reach no farther than their table. Height and width of images are those of the model, unless a request
    says otherwise.
    """
    named = named_shapes(inputs, found)
    own = {
        dim: name
        for key, shape in inputs.items()
        for dim, name in zip(shape, named[key], strict=True)
        if isinstance(dim, str) and isinstance(name, str)
    }
    asked = [_translated(request, own, named) for request in requests]
    settled = {request.partition("=")[0].strip() for request in asked}
    free = {dim for shape in named.values() for dim in shape if isinstance(dim, str)}
    asked += [f"{side}={size}" for side, size in found.sides.items() if side in free - settled]
    fixed = {
        str(NAMES[str(meaning)]): dim
        for name, meanings in found.axes.items()
        for dim, meaning in zip(named[name], meanings, strict=True)
        if isinstance(dim, int) and meaning in (SEQ, PAST)
    }
    return profiles_of(named, asked, found.positions, fixed)


def named_shapes(inputs: Mapping[str, Shape], found: Inspection) -> dict[str, Shape]:
    """The shapes of inputs with the names of dimensions. The length of a mask is `seq` if the graph has no cache.

    A dimension without a meaning has the file's own name, or a name made of its input and its place.
    """
    shapes = {name: found.shapes.get(name, shape) for name, shape in inputs.items()}
    cached = any(meaning in (PAST, SLOTS) for meanings in found.axes.values() for meaning in meanings)
    names = NAMES if cached else {**NAMES, TOTAL: "seq"}
    named: dict[str, Shape] = {}
    for name, shape in shapes.items():
        meanings = found.axes.get(name, shape)
        pairs = enumerate(zip(shape, meanings, strict=True))
        named[name] = tuple(
            dim if isinstance(dim, int) else names.get(str(meaning)) or _own_name(name, at, dim, str(meaning))
            for at, (dim, meaning) in pairs
        )
    return named


def _own_name(name: str, place: int, dim: str, meaning: str) -> str:
    if dim == "?":
        return f"{name}.{place}" if meaning == "?" or meaning.startswith("dim ") else meaning
    return dim if meaning.startswith("dim ") else meaning


def _translated(request: str, own: Mapping[str, str], named: Mapping[str, Shape]) -> str:
    """A request with the name of a dimension by meaning in place of the file's own name."""
    name, equals, sizes = request.partition("=")
    name = name.strip()
    known = name in named or any(name in shape for shape in named.values())
    return request if known or name not in own else f"{own[name]}{equals}{sizes}"
