"""Artifacts: a `.onnx` or `.plan` file with its manifest `<file>.json`.

The ONNX file alone is enough to rebuild the torch reference: metadata_props hold the spec, and the weights are its
initializers. Nothing about the place, the host or the time is written: the same command gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import onnx
import onnx_ir as ir

from posexport.artifact import onnx_file
from posexport.artifact.manifest import external_of, manifest_path, read_manifest
from posexport.artifact.weight_source import WeightSource
from posexport.errors import RequestError
from posexport.files import json_bytes, staged
from posexport.jsondata import unstructure
from posexport.models import read_spec
from posexport.models.weights import LazyWeights, weight_shapes
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.spec import Spec

EXTERNAL_FROM = 1_500_000_000
"""Bytes of weights from which they go to `<file>.data` beside the file (protobuf ends at 2 GiB)."""

TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir")
"""The packages whose versions decide the bytes of a file; manifests name them."""

_METADATA = ("posexport.spec", "posexport.form", "posexport.version")
_DTYPES = {1: "fp32", 10: "fp16", 16: "bf16", 7: "int64", 6: "int32", 11: "fp64", 9: "bool"}

Shape = tuple[str | int, ...]


@attrs.frozen(kw_only=True)
class Artifact:
    """An ONNX file of ours, read and checked; weights in external data stay on the disk until asked for.

    `target` is "portable" for whatever all targets take.
    """

    path: Path
    spec: Spec
    form: str
    target: str
    version: str
    model: onnx.ModelProto

    @property
    def opset(self) -> int:
        """The opset of the default domain."""
        return int(next(entry.version for entry in self.model.opset_import if entry.domain in ("", "ai.onnx")))

    def inputs(self) -> dict[str, tuple[Shape, str]]:
        """The graph's own inputs: name to (shape, dtype), a dimension by name where it is dynamic."""
        return {value.name: _describe(value) for value in self.model.graph.input}

    def outputs(self) -> dict[str, tuple[Shape, str]]:
        """The graph's own outputs, as `inputs` gives its inputs."""
        return {value.name: _describe(value) for value in self.model.graph.output}

    def weights(self) -> LazyWeights:
        """The weights by their public names, in the file's dtype, each read when it is asked for.

        Raises RequestError where one is missing or misshapen.
        """
        wanted = weight_shapes(self.spec)
        found = {each.name: each for each in self.model.graph.initializer if onnx_file.is_known(each)}
        for name, shape in wanted.items():
            if name not in found:
                raise RequestError(f"{str(self.path)!r} lacks the initializer {name!r} {list(shape)}: export it again.")
            if tuple(found[name].dims) != shape:
                raise RequestError(
                    f"{str(self.path)!r}: initializer {name!r} has shape {list(found[name].dims)}, its spec needs "
                    f"{list(shape)}: export it again."
                )
        return LazyWeights(wanted, lambda name: onnx_file.tensor_of(self.path, found[name]))

    def manifest(self) -> dict[str, Any] | None:
        """The manifest beside the file, or None where there is none."""
        return read_manifest(self.path)


def write_onnx(
    model: ir.Model, path: Path, external_from: int = EXTERNAL_FROM, weights: WeightSource | None = None
) -> dict[str, Any]:
    """Write a model that `export` made, and its manifest; returns the manifest.

    The manifest says where the `weights` come from; it lacks that key where they are of the caller's own making.
    Weights of `external_from` bytes or more in all go to `<file>.data`; one of an earlier file, which is no longer
    needed, is removed where that file's manifest names it. Raises RequestError where the folder can't be
    written; every file is then as it was.
    """
    spec = read_spec(json.loads(model.metadata_props["posexport.spec"]))
    data = onnx_file.data_path(path)
    before = external_of(path)
    graph = onnx_file.skeleton(model).graph
    hashes: dict[str, str] = {}
    with staged() as files:
        size = sum(tensor.nbytes for tensor in onnx_file.weights_of(model).values())
        _check_room(path.parent, size)
        if size >= external_from:
            hashes = onnx_file.write_external(model, path, files)
            sha256 = hashes.pop(path.name)
        else:
            sha256 = files.write(path, lambda file: onnx_file.write_inline(model, file))
        manifest: dict[str, Any] = {
            "file": path.name,
            "sha256": sha256,
            **({"external_data": hashes} if hashes else {}),
            "version": model.metadata_props["posexport.version"],
            "form": model.metadata_props["posexport.form"],
            **({"target": target} if (target := model.metadata_props.get("posexport.target")) else {}),
            **({"weights": unstructure(weights)} if weights is not None else {}),
            "spec": spec.to_dict(),
            "inputs": [_entry(value) for value in graph.input],
            "outputs": [_entry(value) for value in graph.output],
            "opset": model.opset_imports[""],
            "domains": dict(sorted(model.opset_imports.items())),
            "tools": {name: metadata.version(name) for name in TOOLS},
        }
        files.write(manifest_path(path), lambda file: file.write(json_bytes(manifest)))
    if data.name in before and not hashes:
        data.unlink(missing_ok=True)
    return manifest


def _check_room(folder: Path, size: int) -> None:
    """RequestError where so many bytes can't be written, before gigabytes of them are."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # what is wrong with the folder is told when it is written to
        return
    if size > free:
        raise RequestError(
            f"the weights take {size / 1e9:.1f} GB and {free / 1e9:.1f} GB are free in {str(folder)!r}: free some "
            "space or give another folder."
        )


def read_onnx(path: Path) -> Artifact:
    """Read an ONNX artifact; RequestError says what a file lacks that isn't one of ours."""
    model = onnx_file.read(path)
    found = {entry.key: entry.value for entry in model.metadata_props}
    lacking = [key for key in _METADATA if key not in found]
    if lacking:
        raise RequestError(
            f"{str(path)!r} is not an artifact of posexport: it lacks the metadata {', '.join(lacking)}; "
            "make it with 'posexport export'."
        )
    try:
        data = json.loads(found["posexport.spec"])
        if not isinstance(data, dict):
            raise RequestError("it is not a table.")
        spec = read_spec(data)
        if found["posexport.form"] not in FORMS:
            raise RequestError(f"its form is {found['posexport.form']!r}, known are {', '.join(FORMS)}.")
        target = found.get("posexport.target", "portable")
        if target not in TARGETS:
            raise RequestError(f"its target is {target!r}, known are {', '.join(TARGETS)}.")
    except (ValueError, RecursionError, RequestError) as error:
        raise RequestError(f"{str(path)!r} has metadata that can't be used: {str(error).rstrip('.')}.") from None
    form, version = found["posexport.form"], found["posexport.version"]
    return Artifact(path=path, spec=spec, form=form, target=target, version=version, model=model)


def _describe(value: onnx.ValueInfoProto) -> tuple[Shape, str]:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return shape, _DTYPES.get(tensor.elem_type, onnx.TensorProto.DataType.Name(tensor.elem_type))


def _entry(value: onnx.ValueInfoProto) -> dict[str, Any]:
    shape, dtype = _describe(value)
    return {"name": value.name, "shape": list(shape), "dtype": dtype}
