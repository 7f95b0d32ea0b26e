"""The shape of a graph in an ONNX file: counts of operators, and the longest path from input to output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from posexport.artifact.graph_file import GraphFile


@attrs.frozen(kw_only=True)
class GraphShape:
    """One ONNX file: the counts of its operators and of the operators inside its functions, and its longest path.

    `graph` is the file itself if it has no spec of posexport.
    """

    name: str
    summary: str
    operators: Counter[str]
    inside: Counter[str]
    path: tuple[str, ...]
    graph: GraphFile | None = None


def read_graph_shape(path: Path, name: str) -> GraphShape:
    """Read the shape of the file at `path`, which gets this `name`."""
    from posexport.artifact.graph_file import read_graph
    from posexport.artifact.onnx_artifact import ForeignFileError, artifact_of

    file, foreign = read_graph(path), False
    try:
        artifact = artifact_of(file)
        summary = f"{artifact.spec.encoding.name}, {artifact.form}, {artifact.spec.dtype}, opset {artifact.opset}"
    except ForeignFileError as error:
        if not error.is_graph:
            raise
        summary, foreign = f"a graph without a spec, opset {file.opset}", True
    graph, inputs = file.model.graph, list(file.inputs())
    bodies = {function.name: Counter(node.op_type for node in function.node) for function in file.model.functions}
    return GraphShape(
        name=name,
        summary=summary,
        operators=Counter(map(_operator, graph.node)),
        inside=sum((bodies[node.op_type] for node in graph.node if node.op_type in bodies), Counter()),
        path=longest_path(graph.node, inputs[0], graph.output[0].name) if inputs and graph.output else (),
        graph=file if foreign else None,
    )


def _operator(node: Any) -> str:
    domain = {"": "", "ai.onnx": "", "com.microsoft": "ms."}.get(node.domain, f"{node.domain}.")
    return f"{domain}{node.op_type}"


_Step = tuple[int, str, Any]
"""The length of the longest path to a value, its last operator, and the step before. A path itself would be copied."""


def longest_path(nodes: Sequence[Any], start: str, end: str) -> tuple[str, ...]:
    """Return the operators on the longest path from value `start` to value `end`. Nodes are in topological order."""
    steps: dict[str, _Step] = {start: (0, "", None)}
    for node in nodes:
        reached = [steps[name] for name in node.input if name in steps]
        if reached:
            before = max(reached, key=lambda step: step[0])
            steps |= dict.fromkeys(filter(None, node.output), (before[0] + 1, _operator(node), before))
    path, step = [], steps.get(end)
    while step is not None and step[0]:
        path.append(step[1])
        step = step[2]
    return tuple(reversed(path))
