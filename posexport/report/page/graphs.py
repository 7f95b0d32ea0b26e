"""ONNX files without a spec on the page: the roles of their inputs, and their attention."""

from __future__ import annotations

from collections.abc import Iterator

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.manifest import OnnxManifest, read_manifest_of
from posexport.graphs.inspection import Inspection, inspect_graph
from posexport.report.attentions import Data, alike, cache_text, encoding_text, heads_text, mask_text, more_text
from posexport.report.page.blocks import Block, Cell, Table, cells

_MOST_OPEN = 24  # rows of a table that starts open
_ATTENTION = ("attention", "heads", "mask", "encoding", "cache", "more", "operator", "not known, or kept")


def graph_blocks(graph: GraphFile, name: str) -> Iterator[Block]:
    """The inputs with their roles, and the attentions. Another process finds them."""
    found = inspect_graph(graph)
    yield _inputs(graph, name, found)
    manifest = read_manifest_of(OnnxManifest, graph.path)
    rewrite = None if manifest is None or manifest.sha256 != graph.sha256 else manifest.rewrite
    origin = "" if rewrite is None else f"Its attention was rewritten from {rewrite.source.file}."
    if found.attentions:
        groups = alike(found.attentions)
        table = Table(
            caption=f"{name}: attention",
            columns=_ATTENTION,
            rows=[_row(group[0], len(group)) for group in groups],
            note=origin,
        )
        yield table.fold(f"{name}: attention", _MOST_OPEN).trimmed()
    else:
        why = "no attention found" if found.reason is None else f"not looked for: {found.reason}"
        yield Table(caption=f"{name}: attention", columns=("state",), rows=[(why,)], note=origin)


def _inputs(graph: GraphFile, name: str, found: Inspection) -> Table:
    rows = [
        cells(input_name, str(list(shape)), dtype, found.roles.get(input_name) or "can't be guessed")
        for input_name, (shape, dtype) in graph.inputs().items()
    ]
    columns = ("input", "shape", "dtype", "what it is for")
    return Table(caption=f"{name}: inputs", columns=columns, rows=rows).fold(f"{name}: inputs", _MOST_OPEN)


def _row(one: Data, count: int) -> tuple[Cell, ...]:
    """One attention, and how many more like it follow."""
    name = one["name"] if count == 1 else f"{one['name']} and {count - 1} like it"
    reason = "" if one["reason"] is None else one["reason"]["text"]
    if one["head_dim"] is None:
        return cells(name, "", "", "", "", "", one["operator"] or "", reason)
    texts = (heads_text(one), mask_text(one["mask"]), encoding_text(one["encoding"]), cache_text(one["cache"]))
    return cells(name, *texts, more_text(one), one["operator"] or "", reason)
