"""The encodings of an ONNX file as rows of a plot: those of its spec, or those recognised in its attention.

Recognised encodings have the names and parameters of posexport's own encodings, so the same hooks draw them. A file's
trained weights are not read. Random weights stand in for them, as the title says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.graph_file import read_graph
from posexport.artifact.onnx_artifact import ForeignFileError, artifact_of
from posexport.errors import RequestError
from posexport.export.block_options import spec_of
from posexport.graphs.inspection import inspect_graph
from posexport.progress import Progress, silent
from posexport.report.attentions import Data, encoding_text
from posexport.report.plots.request import PlotRow
from posexport.spec.spec import Spec


@attrs.frozen(kw_only=True)
class FileRows:
    """The rows of a file, and why its other attentions have none, by name."""

    rows: list[PlotRow]
    left: dict[str, str]


def rows_of_file(path: Path, roles: Mapping[str, str], progress: Progress = silent) -> FileRows:
    """A row for each encoding of the file. `roles` are the roles of inputs that the user knows, by name.

    RequestError for a file that can't be read, and for one without any encoding that can be drawn.
    """
    graph = read_graph(path)
    try:
        spec = artifact_of(graph).spec
    except ForeignFileError as error:
        if not error.is_graph:
            raise
    else:
        if roles:
            raise RequestError(f"{str(path)!r} is posexport's own, so the roles of its inputs are known: drop --input.")
        return FileRows(rows=[PlotRow(layer, path.name) for layer in spec.distinct_layers()], left={})
    found = inspect_graph(graph, roles, progress)
    if not found.attentions:
        why = "no attention was found" if found.reason is None else str(found.reason)
        raise RequestError(f"{str(path)!r} has no encoding to draw, {why}: name an encoding instead.")
    rows: dict[Spec, PlotRow] = {}
    left: dict[str, str] = {}
    for one in found.attentions:
        drawn = list(_encodings(one))
        for encoding in drawn:
            try:
                spec = _spec(one, encoding)
            except RequestError as error:
                left[one["name"]] = _why(encoding, error)
            else:
                rows.setdefault(spec, PlotRow(spec, f"{_parameters(encoding)} in {path.name}".strip()))
        if not drawn:
            left[one["name"]] = "positions have no part in it" if one["reason"] is None else one["reason"]["text"]
    if not rows:
        name, why = next(iter(left.items()))
        raise RequestError(f"{str(path)!r} has no encoding that can be drawn ({name}: {why}): name one instead.")
    return FileRows(rows=list(rows.values()), left=left)


def _encodings(one: Data) -> Iterator[Data]:
    """What positions do in an attention: to queries and keys, to scores, and to its input."""
    seen: list[Data] = []
    for key in ("encoding", "bias", "input_encoding"):
        encoding = one[key]
        if encoding is not None and encoding["name"] != "none" and encoding not in seen:
            seen.append(encoding)
            yield encoding


def _spec(one: Data, encoding: Data) -> Spec:
    """The block of an attention with one encoding.

    RequestError if posexport doesn't have the encoding, or if the number of heads is not known.
    """
    if one["num_heads"] is None:
        raise RequestError("the number of its heads is not known.")
    parameters = {key: value for key, value in encoding.items() if key not in ("name", "rotary_start")}
    mask: Data = one["mask"] or {"kind": "none"}
    rotates = encoding not in (one["bias"], one["input_encoding"])
    fields: dict[str, Any] = {"causal": mask["kind"] in ("causal", "window", "chunk")}
    if mask["kind"] in ("window", "local"):
        fields["window"] = mask["window"]
    if mask["kind"] == "chunk":
        fields["attention_chunk_size"] = mask["chunk"]
    return spec_of(
        {
            "encoding": encoding["name"],
            "hidden_size": one["num_heads"] * one["head_dim"],
            "num_heads": one["num_heads"],
            "head_dim": one["head_dim"],
            "scale": one["scale"],
            "prefix_tokens": one["prefix_tokens"] if rotates else None,
            **fields,
        },
        parameters,
    )


def _parameters(encoding: Data) -> str:
    return encoding_text(encoding).removeprefix(str(encoding["name"])).strip()


def _why(encoding: Data, error: RequestError) -> str:
    """Why an encoding can't be drawn: the reason from recognition, or what its parameters lack."""
    if "reason" in encoding:
        return str(encoding["reason"]["text"])
    if "frequencies" in encoding:
        return "its frequencies are no function of a theta, so they have no name"
    return str(error).rstrip(".")
