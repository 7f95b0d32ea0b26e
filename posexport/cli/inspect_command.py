"""`posexport inspect`: what an artifact holds, from its own file and its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.artifact.paths import check_artifact
from posexport.cli import console

if TYPE_CHECKING:
    from posexport.spec.contract import Values


@click.command()
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def inspect(file: str, as_json: bool) -> None:
    """Show the spec, form, inputs, operators, functions and sizes of an artifact (.onnx or .plan)."""
    path = Path(file)
    check_artifact(path)
    facts, fault = _onnx(path) if path.suffix == ".onnx" else _plan(path)
    if fault is not None:
        console.warn(f"{file}: {fault}.")
    if as_json:
        console.show_json(facts)
        return
    console.show_facts(file, [fact for key, value in facts.items() for fact in _facts(key, value)])


def _facts(name: str, value: Any, inside: str = "") -> Iterator[tuple[str, str]]:
    """A value as lines of name and text; what it holds stands indented below it, without what says nothing."""
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


def _onnx(path: Path) -> tuple[dict[str, Any], str | None]:
    """What the file holds, and why its manifest is not of it, or None; so is that of a plan."""
    from posexport.artifact.authenticity import signature_of
    from posexport.artifact.loaded import manifest_mismatch
    from posexport.artifact.onnx_artifact import read_onnx
    from posexport.artifact.onnx_file import external

    artifact = read_onnx(path)
    graph = artifact.model.graph
    data = [path.with_name(name) for name in artifact.external_files()]
    manifest = artifact.manifest()
    # without the weights beside it: gigabytes would take their time
    fault = None if manifest is None else manifest_mismatch(artifact, manifest, external=False)
    beside = "; the weights beside it were not read, 'posexport verify' does that" if not fault and data else ""
    facts = {
        "manifest": "none" if manifest is None else _MATCH[fault is None] + beside,
        "signature": signature_of(manifest, checked=False).text,
        "version": artifact.version,
        "form": artifact.form,
        "opset": artifact.opset,
        "domains": {entry.domain or "ai.onnx": entry.version for entry in artifact.model.opset_import},
        "spec": artifact.spec.to_dict(),
        "inputs": _tensors(artifact.inputs()),
        "outputs": _tensors(artifact.outputs()),
        "operators": _count(graph.node),
        "functions": {function.name: _count(function.node) for function in artifact.model.functions},
        "weights": {
            tensor.name: f"{list(tensor.dims)}" + (" (external)" if external(tensor) else "")
            for tensor in graph.initializer
        },
        "bytes": sum(file.stat().st_size for file in (path, *data)),
    }
    return facts, None if fault is None else fault.text


def _plan(path: Path) -> tuple[dict[str, Any], str | None]:
    from posexport.artifact.authenticity import signature_of
    from posexport.artifact.manifest import changed, values_of
    from posexport.artifact.plan import plan_manifest
    from posexport.files import sha256_of
    from posexport.jsondata import unstructure

    manifest = plan_manifest(path)
    same = manifest.sha256 == sha256_of(path)
    facts = {
        "manifest": _MATCH[same],
        "signature": signature_of(manifest, checked=False).text,
        **unstructure(manifest),
        "inputs": _tensors(values_of(manifest.inputs)),
        "outputs": _tensors(values_of(manifest.outputs)),
        "domains": {name or "ai.onnx": version for name, version in manifest.domains.items()},
        "bytes": path.stat().st_size,
    }
    return facts, None if same else changed(path).text


def _tensors(values: Values) -> dict[str, str]:
    return {name: f"{dtype} {list(shape)}" for name, (shape, dtype) in values.items()}


def _count(nodes: Any) -> dict[str, int]:
    names = (f"{node.domain}.{node.op_type}" if node.domain else node.op_type for node in nodes)
    return dict(Counter(names).most_common())
