"""The roles of a file's inputs if names of dimensions don't tell whether an axis is one of rows or of tokens.

The products of attention then tell (posexport.graphs.contracted_axes). Finding these evaluates the graph, so a child
process does it, once for each file.
"""

from __future__ import annotations

from collections.abc import Mapping

from posexport.artifact.graph_file import GraphFile
from posexport.graphs.axes import is_first_of_tokens
from posexport.graphs.inspection import inspect_graph
from posexport.graphs.roles import Role, roles_of, untold

_KNOWN: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
"""The inputs with tokens first, by the sha256 of the file and the given roles."""


def told_roles(graph: GraphFile, given: Mapping[str, str] | None = None) -> dict[str, Role]:
    """`posexport.graphs.roles.roles_of` for a file, with the axes that its attention tells."""
    roles = roles_of(graph, given)
    unclear = untold(roles)
    if not unclear:
        return roles
    key = (graph.sha256, tuple(sorted((given or {}).items())))
    if key not in _KNOWN:
        axes = inspect_graph(graph, given, describe=False).axes
        _KNOWN[key] = [name for name in unclear if is_first_of_tokens(axes.get(name, ()))]
    return roles_of(graph, given, _KNOWN[key]) if _KNOWN[key] else roles
