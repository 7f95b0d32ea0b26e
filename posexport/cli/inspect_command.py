"""`posexport inspect`: shows the contents of any ONNX file or plan, its manifest and its attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.artifact.paths import check_artifact
from posexport.cli import console
from posexport.cli.options import input_roles, roles_option
from posexport.errors import RequestError

if TYPE_CHECKING:
    from posexport.artifact.graph_file import GraphFile


@click.command()
@click.argument("file")
@roles_option
@click.option(
    "--attention/--no-attention", default=True, help="look for attention; this takes some seconds  [default: yes]"
)
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def inspect(file: str, roles: tuple[str, ...], attention: bool, as_json: bool) -> None:
    """Show the inputs, operators and attention of any ONNX file, and the spec of an artifact (.onnx or .plan)."""
    path = Path(file)
    check_artifact(path)
    given = input_roles(roles)
    if path.suffix == ".onnx":
        facts, fault = _onnx(path, given, attention)
    elif given:
        raise RequestError("--input was given with a plan, whose inputs have no roles: drop it.")
    else:
        facts, fault = _plan(path)
    if fault is not None:
        console.warn(f"{file}: {fault}.")
    if as_json:
        console.show_json(facts)
        return
    console.show_facts(file, [fact for key, value in _for_people(facts).items() for fact in _facts(key, value)])
    if facts.get("attention_reason") is not None:
        console.write()
        console.write(f"attention was not looked for, {facts['attention_reason']['text']}.")
    elif facts.get("attentions") is not None:
        from posexport.cli.attentions import show_attentions

        show_attentions(file, facts["attentions"])


_APART = ("roles", "attentions", "attention_reason")
"""Keys that are not shown as facts of the file."""


def _for_people(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with one text for each tensor; inputs also have their roles."""
    shown = {key: value for key, value in facts.items() if key not in _APART}
    roles = {name: f" {role}" for name, role in facts.get("roles", {}).items() if role is not None}
    shown["inputs"] = {one["name"]: _tensor_text(one) + roles.get(one["name"], "") for one in facts["inputs"]}
    shown["outputs"] = {one["name"]: _tensor_text(one) for one in facts["outputs"]}
    if "operators" in facts:  # a plan says where its weights come from
        weights = facts["weights"]
        places = {one["name"]: f"{one['shape']}{' (external)' if one['external'] else ''}" for one in weights}
        shown["weights"] = places if "spec" in facts else f"{len(weights)} tensors"
    return shown


def _tensor_text(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['dtype']} {[*tensor['shape']]}"


def _facts(name: str, value: Any, inside: str = "") -> Iterator[tuple[str, str]]:
    """A value as lines of name and text, with its contents indented below it. Entries that say nothing are left out."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield from _facts(f"{name}.{index}", item, inside)
    elif isinstance(value, dict) and (not inside or "name" in value or "encoding" in value):
        encoding = inside != "" and "name" in value
        yield inside + name, value["name"] if encoding else "" if value else "none"
        for key, entry in console.runs(value.items()):
            silent = entry is None or entry == [] or (entry is False and not encoding)
            if not silent and key != "rows" and (key != "name" or not encoding):  # --json and `compile` show rows
                yield from _facts(key, entry, inside + "  ")
    else:
        yield inside + name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value)
    return str(value)


_MATCH = {True: "matches the file", False: "does not match the file"}


def _onnx(path: Path, roles: Mapping[str, str], attention: bool) -> tuple[dict[str, Any], str | None]:
    """The contents of the file, and why its manifest does not belong to it, or None. `_plan` returns the same for a
    plan."""
    from posexport.artifact.graph_file import read_graph
    from posexport.artifact.onnx_artifact import ForeignFileError, artifact_of
    from posexport.graphs.inspection import inspect_graph

    graph = read_graph(path)
    try:
        graph = artifact_of(graph)
    except ForeignFileError as error:
        if not error.is_graph:
            raise  # an artifact that lost some of its metadata
    facts, fault = _file(graph)
    with console.steps("looking at the graph") as progress:
        found = inspect_graph(graph, roles, progress, attention=attention)
    facts["roles"] = dict(found.roles)
    if attention:
        reason = found.reason
        facts["attentions"] = None if reason is not None else [dict(one) for one in found.attentions]
        facts["attention_reason"] = None if reason is None else {"code": reason.code, "text": reason.text}
    return facts, fault


def _file(graph: GraphFile) -> tuple[dict[str, Any], str | None]:
    """What the bytes of an ONNX file say, and why its manifest does not belong to it, or None."""
    from posexport.artifact.authenticity import signature_of
    from posexport.artifact.external import external
    from posexport.artifact.graph_file import dtype_name
    from posexport.artifact.loaded import manifest_mismatch
    from posexport.artifact.manifest import OnnxManifest, read_manifest_of, tensors_of
    from posexport.artifact.onnx_artifact import Artifact
    from posexport.jsondata import unstructure

    data = [graph.path.with_name(name) for name in graph.external_files()]
    manifest = read_manifest_of(OnnxManifest, graph.path)
    # without the weights in other files: gigabytes would take too long
    fault = None if manifest is None else manifest_mismatch(graph, manifest, external=False)
    beside = "; the weights beside it were not read, 'posexport verify' does that" if not fault and data else ""
    known = graph.model.graph
    own = {"version": graph.version, "form": graph.form} if isinstance(graph, Artifact) else {}
    facts = {
        "manifest": "none" if manifest is None else _MATCH[fault is None] + beside,
        "signature": signature_of(manifest, checked=False).text,
        **own,
        "opset": graph.opset,
        "domains": {entry.domain or "ai.onnx": entry.version for entry in graph.model.opset_import},
        **({"spec": graph.spec.to_dict()} if isinstance(graph, Artifact) else {}),
        "inputs": unstructure(tensors_of(graph.inputs())),
        "outputs": unstructure(tensors_of(graph.outputs())),
        "operators": _count(known.node),
        "functions": {function.name: _count(function.node) for function in graph.model.functions},
        "weights": [
            {
                "name": tensor.name,
                "shape": [*tensor.dims],
                "dtype": dtype_name(tensor.data_type),
                "external": bool(external(tensor)),
            }
            for tensor in known.initializer
        ],
        "bytes": sum(file.stat().st_size for file in (graph.path, *data)),
    }
    return facts, None if fault is None else fault.text


def _plan(path: Path) -> tuple[dict[str, Any], str | None]:
    from posexport.artifact.authenticity import signature_of
    from posexport.artifact.loaded import source_mismatch
    from posexport.artifact.onnx_artifact import read_onnx
    from posexport.artifact.plan import plan_manifest, plan_mismatch
    from posexport.jsondata import unstructure

    manifest = plan_manifest(path)
    fault, source = plan_mismatch(path, manifest), path.with_name(manifest.onnx.file)
    if fault is None:
        with suppress(RequestError):  # missing, another file or without a spec: nothing to compare with
            fault = source_mismatch(path, manifest, read_onnx(source, manifest.onnx.sha256))
    facts = {
        "manifest": _MATCH[fault is None],
        "signature": signature_of(manifest, checked=False).text,
        **unstructure(manifest),
        "domains": {name or "ai.onnx": version for name, version in manifest.domains.items()},
        "bytes": path.stat().st_size,
    }
    return facts, None if fault is None else fault.text


def _count(nodes: Any) -> dict[str, int]:
    names = (f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in nodes)
    return dict(Counter(names).most_common())
