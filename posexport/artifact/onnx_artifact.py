"""ONNX artifacts: a `.onnx` file with its manifest `<file>.json`, written and read. Reading loads no torch.

The ONNX file alone is enough to rebuild the torch reference: metadata_props contain the spec, and the weights are its
initializers. No path, host or time is written, so the same command gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact import onnx_file
from posexport.artifact.graph_file import GraphFile, read_graph, values_of_infos
from posexport.artifact.manifest import (
    ModuleSource,
    OnnxManifest,
    Origin,
    WeightSource,
    add_manifest,
    external_data,
    read_manifest_of,
    released,
    tensors_of,
)
from posexport.artifact.profiles import profiles_of
from posexport.artifact.signing import SigningKey
from posexport.errors import RequestError, shown
from posexport.files import HashingFile, staged
from posexport.jsondata import json_sha256, parse_json, structure, unstructure
from posexport.models import read_spec
from posexport.models.weights import LazyWeights, weight_shapes
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir")
"""The packages whose versions determine the bytes of a file. Manifests name them."""

MODEL_TOOLS = ("transformers",)
"""More packages that determine the bytes of the file of a whole model."""

_METADATA = ("posexport.spec", "posexport.form", "posexport.version")
_ORIGIN, _MODULE = "posexport.origin", "posexport.module"


class ForeignFileError(RequestError):
    """A sound ONNX file, `graph`, that posexport did not write, or that lost the metadata that posexport writes."""

    def __init__(self, text: str, graph: GraphFile) -> None:
        super().__init__(text)
        self.graph = graph

    @property
    def foreign(self) -> bool:
        """Whether nothing in the file says that posexport wrote it."""
        return not any(key.startswith("posexport.") for key in self.graph.metadata())

    @property
    def is_graph(self) -> bool:
        """Whether it is complete: a file of another tool, or the export of a module, which has no spec."""
        return self.foreign or _MODULE in self.graph.metadata()


@attrs.frozen(kw_only=True)
class Artifact(GraphFile):
    """An ONNX file of posexport, read and checked. Weights in external data stay on disk until they are needed.

    `target` is "portable" if every target takes the file. `origin` is None if an earlier version wrote the file.
    """

    spec: Spec
    form: str
    target: str
    version: str
    origin: Origin | None = None

    @property
    def weight_source(self) -> WeightSource | None:
        """Where the weights come from, as far as the file itself says it."""
        return None if self.origin is None else self.origin.weights

    def profiles(self, requests: Iterable[str] = ()) -> dict[str, dict[str, list[int]]]:
        """Return {input: {min, opt, max}} for a plan of this file. Raises as `profiles_of` for the requests."""
        inputs = self.inputs()
        bounds = bounds_of(graph_inputs(self.spec), inputs)
        fixed = {dim: low for dim, (low, high) in bounds.items() if low == high}
        shapes = {name: shape for name, (shape, _) in inputs.items()}
        consecutive = self.spec.consecutive
        return profiles_of(shapes, requests, self.spec.token_limit(), fixed, consecutive=consecutive)

    def weights(self) -> LazyWeights:
        """Return the weights by public name in the file's dtype, read on demand. RequestError for a wrong shape."""
        shapes = weight_shapes(self.spec)
        tensors = {tensor.name: tensor for tensor in self.model.graph.initializer if onnx_file.is_known(tensor)}
        for name, shape in shapes.items():
            if name not in tensors:
                raise RequestError(f"{str(self.path)!r} lacks the initializer {name!r} {list(shape)}: export it again.")
            if tuple(tensors[name].dims) != shape:
                raise RequestError(
                    f"{str(self.path)!r}: initializer {name!r} has shape {list(tensors[name].dims)}, its spec needs "
                    f"{list(shape)}: export it again."
                )
        return LazyWeights(shapes, lambda name: onnx_file.tensor_of(self.path, tensors[name]))

    def array(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return a weight by public name in the file's dtype. None if the file has no such weight."""
        tensors = (one for one in self.model.graph.initializer if one.name == name and onnx_file.is_known(one))
        tensor = next(tensors, None)
        return None if tensor is None else onnx_file.array_of(self.path, tensor)

    def manifest(self) -> OnnxManifest | None:
        """Return the manifest beside the file, or None if there is none. RequestError if it cannot be used."""
        return read_manifest_of(OnnxManifest, self.path)


def module_metadata(source: ModuleSource) -> dict[str, str]:
    """Return the metadata of a model about the torch module whose export it is."""
    return {_MODULE: json.dumps(unstructure(source), separators=(",", ":"), sort_keys=True)}


def module_of(graph: GraphFile) -> tuple[ModuleSource, Origin | None] | None:
    """Return the module or whole model whose export a file is, and its origin, from the metadata. None for other files.

    RequestError for metadata that cannot be used.
    """
    properties = graph.metadata()
    if _MODULE not in properties:
        return None
    try:
        module = structure(parse_json(properties[_MODULE]), ModuleSource)
        origin = structure(parse_json(properties[_ORIGIN]), Origin) if _ORIGIN in properties else None
    except (ValueError, RecursionError, RequestError) as error:
        raise _unusable(graph.path, error) from None
    return module, origin


def _unusable(path: Path, error: Exception) -> RequestError:
    return RequestError(f"{str(path)!r} has metadata that can't be used: {str(error).rstrip('.')}.")


def is_whole_model(graph: GraphFile) -> bool:
    """Whether posexport made the file from a whole model of a checkpoint."""
    try:
        known = module_of(graph)
    except RequestError:
        return False
    origin = None if known is None else known[1]
    return origin is not None and origin.weights is not None and origin.weights.files is not None


def write_onnx(
    model: ir.Model,
    path: Path,
    external_from: int = onnx_file.EXTERNAL_FROM,
    weights: WeightSource | None = None,
    key: SigningKey | None = None,
    attentions: Sequence[Mapping[str, Any]] = (),
    beside: Mapping[str, Path] | None = None,
) -> OnnxManifest:
    """Write a model from `export` or `export_module`, and its manifest, signed if a `key` is given. Return the
    manifest.

    The manifest and the model's metadata, which are set here, say where the `weights` come from, unless they are the
    caller's own. `attentions` are written into the manifest of a whole model. Copies of the files `beside` get these
    names in its folder. If all weights together have `external_from` bytes or more, they go to `<file>.data`. Such a
    file of an earlier artifact is removed if it is no longer needed and that artifact's manifest names it. RequestError
    if the folder cannot be written; every file is then unchanged.
    """
    described = [json.loads(model.metadata_props.get(key, "null")) for key in ("posexport.spec", _MODULE)]
    if described == [None, None]:
        raise RequestError("the model is none of posexport's: write what 'export' or 'export_module' returned.")
    spec, module = described
    whole = weights is not None and weights.files is not None
    tools = {name: metadata.version(name) for name in (*TOOLS, *(MODEL_TOOLS if whole else ()))}
    # without the names of builds: all builds of one version write the same bytes
    attentions = unstructure(tuple(attentions))
    stated = json_sha256(attentions) if attentions else None
    origin = unstructure(Origin(weights=weights, tools=released(tools), attentions=stated))
    model.metadata_props[_ORIGIN] = json.dumps(origin, separators=(",", ":"), sort_keys=True)
    data = onnx_file.data_path(path)
    before = external_data(path)
    graph = onnx_file.skeleton(model).graph
    hashes: dict[str, str] = {}
    with staged() as files:
        size = sum(tensor.nbytes for tensor in onnx_file.weights_of(model).values())
        onnx_file.check_room(path.parent, size)
        if size >= external_from:
            hashes = onnx_file.write_external(model, path, files)
            sha256 = hashes.pop(path.name)
        else:
            sha256 = files.write(path, lambda file: onnx_file.write_inline(model, file))
        manifest = OnnxManifest(
            file=path.name,
            sha256=sha256,
            external_data=hashes,
            version=model.metadata_props["posexport.version"],
            form=model.metadata_props["posexport.form"],
            target=model.metadata_props.get("posexport.target"),
            spec=None if spec is None else read_spec(spec).to_dict(),
            module=None if module is None else structure(module, ModuleSource),
            inputs=tensors_of(values_of_infos(graph.input)),
            outputs=tensors_of(values_of_infos(graph.output)),
            opset=model.opset_imports[""],
            domains=dict(sorted(model.opset_imports.items())),
            tools=tools,
            weights=weights,
            attentions=tuple(attentions),
        )
        for name, source in (beside or {}).items():
            files.write(path.with_name(name), partial(HashingFile.copy, source=source))
        manifest = add_manifest(files, path, manifest, key)
    if data.name in before and not hashes:
        data.unlink(missing_ok=True)
    return manifest


def read_onnx(path: Path, expected: str | None = None) -> Artifact:
    """Read an ONNX artifact. RequestError if it is not an artifact of posexport, or is damaged.

    MismatchError, before anything is parsed, if its bytes do not have the `expected` sha256 of its manifest.
    """
    return artifact_of(read_graph(path, expected))


def artifact_of(graph: GraphFile) -> Artifact:
    """Return the artifact in a file that was read. Raises the errors of `read_onnx`."""
    path, properties = graph.path, graph.metadata()
    lacking = [key for key in _METADATA if key not in properties]
    if lacking:
        raise ForeignFileError(
            f"{str(path)!r} is not an artifact of posexport: it lacks the metadata {', '.join(lacking)}; "
            "make it with 'posexport export'.",
            graph,
        )
    form, target = properties["posexport.form"], properties.get("posexport.target", "portable")
    try:
        data = parse_json(properties["posexport.spec"])
        if not isinstance(data, dict):
            raise RequestError("it is not a table.")
        spec = read_spec(data)
        for key, value, known in (("form", form, FORMS), ("target", target, TARGETS)):
            if value not in known:
                raise RequestError(f"its {key} is {shown(value)}, known are {', '.join(known)}.")
        origin = structure(parse_json(properties[_ORIGIN]), Origin) if _ORIGIN in properties else None
    except (ValueError, RecursionError, RequestError) as error:
        raise _unusable(path, error) from None
    version = properties["posexport.version"]
    return Artifact(
        path=path,
        sha256=graph.sha256,
        spec=spec,
        form=form,
        target=target,
        version=version,
        origin=origin,
        model=graph.model,
    )
