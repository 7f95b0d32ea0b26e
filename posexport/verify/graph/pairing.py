"""Whether two files have the same inputs and outputs, by name, and the roles that inputs of both may have."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from posexport.errors import Reason, shown
from posexport.graphs.axes import SLOTS
from posexport.graphs.roles import Role
from posexport.spec.contract import Shape, Values
from posexport.verify.graph.subject import GraphSubject

INTERFACE = "interface"
"""The code of a file whose inputs or outputs are not those of the file that it is compared with."""

_KINDS = {"fp32": "f", "fp16": "f", "bf16": "f", "fp64": "f", "bool": "b", "": ""}


def mismatch(subject: GraphSubject, other: GraphSubject) -> Reason | None:
    """The first way in which inputs or outputs differ, in one clause; None if they match.

    Floats may have another dtype, and whole numbers another width. Dimensions that one file fixes may vary in the
    other.
    """
    for kind, mine, theirs in (("input", subject.inputs, other.inputs), ("output", subject.outputs, other.outputs)):
        text = _difference(kind, mine, theirs, other.path.name)
        if text is not None:
            return Reason(INTERFACE, text)
    return None


def cache_mismatch(roles: Mapping[str, Role], others: Mapping[str, Role], name: str) -> Reason | None:
    """Why two files can't be compared: the cache of one grows and that of the other, `name`, is a buffer; else None."""
    for cache, role in roles.items():
        mine, theirs = (SLOTS in one.axes for one in (role, others[cache]))
        if role.kind == "past" and mine != theirs:
            kinds = ("a buffer of a fixed length", "one that grows")
            text = f"its cache {shown(cache)} is {kinds[not mine]}, that of {name} is {kinds[not theirs]}"
            return Reason(INTERFACE, f"{text}, so no inputs fit both: verify each file alone")
    return None


def _difference(kind: str, mine: Values, theirs: Values, name: str) -> str | None:
    for value in theirs:
        if value not in mine:
            return f"it lacks the {kind} {shown(value)} of {name}: it has {', '.join(mine) or 'none'}"
    for value, (shape, dtype) in mine.items():
        if value not in theirs:
            return f"it has the {kind} {shown(value)}, which {name} does not have"
        other_shape, other_dtype = theirs[value]
        kinds = {_KINDS.get(one, "i") for one in (dtype, other_dtype)} - {""}
        if len(kinds) > 1:
            return f"its {kind} {shown(value)} is {dtype}, that of {name} is {other_dtype}"
        if shape and other_shape and not _fit(shape, other_shape):
            return f"its {kind} {shown(value)} has shape {list(shape)}, that of {name} {list(other_shape)}"
    return None


def _fit(shape: Shape, other: Shape) -> bool:
    """Whether two shapes may be the same: sizes that both fix are equal."""
    if len(shape) != len(other):
        return False
    return all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in zip(shape, other, strict=True))


def shared_roles(roles: Mapping[str, Role], others: Mapping[str, Role]) -> dict[str, Role]:
    """The roles of the first file, with the demands of the other: the sizes that it fixes, and the rows of its tables.

    Tokens and positions of the other file's tables are tried even if the first file's tables have fewer rows.
    """
    shared = {}
    for name, role in roles.items():
        other = others[name]
        pairs = zip(role.shape, other.shape, strict=False) if len(other.shape) == len(role.shape) else ()
        shape = tuple(b if isinstance(a, str) and isinstance(b, int) else a for a, b in pairs) or role.shape
        rows = role.rows if other.rows is None else other.rows
        shared[name] = attrs.evolve(role, shape=shape, rows=rows, grouped=role.grouped or other.grouped)
    return shared
