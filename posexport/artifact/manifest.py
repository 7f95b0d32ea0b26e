"""The manifest `<file>.json` beside an artifact: the JSON in it, and whether it belongs to the file.

The classes are the schema (posexport.jsondata). Fields have the order of the keys in the file. Imports no engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from posexport.artifact.rewrite_record import RewriteRecord
from posexport.artifact.signing import SigningKey, TrustedKey, check_signature, signature_path, untrusted
from posexport.errors import Reason, RequestError, shown
from posexport.files import TEXT_LIMIT, Staged, json_bytes, read_bytes, renewed, sha256_of, staged
from posexport.jsondata import DataError, json_sha256, omitted, parse_json, structure, unstructure
from posexport.models import read_spec
from posexport.spec.contract import Values, smallest
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.spec import Spec

MOMENTS = ("min", "opt", "max")
"""The three shapes of a profile: smallest, tuned for, largest."""

Profiles = Mapping[str, Mapping[str, tuple[int, ...]]]
"""{input: {min, opt, max}}, the shapes that a plan takes."""

MISMATCH = "manifest"
"""The failure code of an artifact that does not match its manifest."""

BUILDERS = ("tensorrt", "tensorrt-rtx")
"""The names of the runtimes that build plans (posexport.runtimes.tensorrt.api contains them)."""

M = TypeVar("M", bound="Manifest")


def _file_name(instance: object, field: attrs.Attribute[str], value: str) -> None:
    """Check that a file name has no folder, so that it cannot lead out of the artifact's folder."""
    if value in ("", ".", "..") or set("/\\:") & set(value):
        raise ValueError(f"names the file {value!r}, which must have no folder")


def _file_names(instance: object, field: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
    for name in value:
        _file_name(instance, field, name)


def _one_of(what: str, names: Iterable[str]) -> Any:
    """Return a validator for one of these names. None is valid too, if the field may be None."""

    def check(instance: object, field: attrs.Attribute[Any], value: str | None) -> None:
        if value is not None and value not in names:
            raise ValueError(f"has the {what} {shown(value)}, not one of {', '.join(names)}")

    return check


def _spec(instance: Manifest, field: attrs.Attribute[Any], value: Mapping[str, Any]) -> None:
    if instance.form is None:
        raise ValueError("lacks 'form' beside its spec")
    try:
        read_spec(value)
    except RequestError as error:
        raise ValueError(f"has a spec that can't be used: {str(error).rstrip('.')}") from None


def _some(instance: object, field: attrs.Attribute[Any], value: tuple[Tensor, ...]) -> None:
    if not value:
        raise ValueError(f"has no {field.name}")


@attrs.frozen(kw_only=True)
class Tensor:
    """An input or output of a graph. A dimension of `shape` that may vary is a name."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


def tensors_of(values: Values) -> tuple[Tensor, ...]:
    """Return inputs or outputs as a manifest lists them."""
    return tuple(Tensor(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in values.items())


def values_of(tensors: Iterable[Tensor]) -> Values:
    """Return what a manifest lists as name to (shape, dtype)."""
    return {tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}


@attrs.frozen(kw_only=True)
class WeightSource:
    """The key `weights` of a manifest. Fields that do not belong to its `source` are None and are not written.

    random: `seed`. file: the name and sha256 of the .safetensors `file`. checkpoint: the name of its `folder`, the
    sha256 of its config.json, and the first `layer` that was taken. A whole model has no `layer`, but the sha256 of
    each file of weights by name.
    """

    source: Literal["random", "file", "checkpoint"]
    seed: int | None = omitted(None)
    file: str | None = omitted(None)
    sha256: str | None = omitted(None)
    folder: str | None = omitted(None)
    config_sha256: str | None = omitted(None)
    layer: int | None = omitted(None)
    files: Mapping[str, str] | None = omitted(None)

    def __str__(self) -> str:
        if self.source == "random":
            return f"random, seed {self.seed}"
        if self.source == "file":
            return f"file {self.file}"
        return f"checkpoint {self.folder}" + ("" if self.layer is None else f", layer {self.layer}")


@attrs.frozen(kw_only=True)
class ModuleSource:
    """The torch module whose export a graph is: the `name` of its class, which may be in a `file` with this sha256."""

    name: str
    file: str | None = omitted(None)
    sha256: str | None = omitted(None)


@attrs.frozen(kw_only=True)
class Origin:
    """What an ONNX file's own metadata says about the source of its weights and about the tools that made it.
    `attentions` is the sha256 of the attentions in its manifest, None if there are none."""

    weights: WeightSource | None
    tools: Mapping[str, str]
    attentions: str | None = omitted(None)

    def pairs(self, manifest: OnnxManifest) -> dict[str, tuple[object, object]]:
        """Return pairs of what the manifest of an ONNX file says and what the file says, by key."""
        stated = json_sha256(manifest.attentions) if manifest.attentions else None
        return {
            "weights": (manifest.weights, self.weights),
            "tools": (released(manifest.tools), dict(self.tools)),
            "attentions": (stated, self.attentions),
        }


def released(tools: Mapping[str, str]) -> dict[str, str]:
    """Return versions of packages without the name of a build: `2.9.1` from `2.9.1+cpu`."""
    return {name: version.partition("+")[0] for name, version in tools.items()}


@attrs.frozen(kw_only=True)
class Manifest:
    """The common part of the manifests of ONNX files and plans.

    `external_data` is the sha256 of each file of weights beside the artifact, by name. `signer` is the fingerprint of
    the key whose signature is beside the manifest. `spec` is as Spec.to_dict returns it, None for a graph that is not a
    block. `form` is None for a file that posexport did not write. `tools` are the versions of packages that determine
    the bytes of the file.
    """

    file: str = attrs.field(validator=_file_name)
    sha256: str
    external_data: Mapping[str, str] = omitted(factory=dict, validator=_file_names)
    signer: str | None = omitted(None)
    version: str
    form: str | None = omitted(None, validator=_one_of("form", FORMS))
    target: str | None = omitted(None, validator=_one_of("target", TARGETS))
    weights: WeightSource | None = omitted(None)
    spec: Mapping[str, Any] | None = omitted(None, validator=attrs.validators.optional(_spec))
    inputs: tuple[Tensor, ...] = attrs.field(validator=_some)
    outputs: tuple[Tensor, ...] = attrs.field(validator=_some)
    opset: int
    domains: Mapping[str, int]
    tools: Mapping[str, str]

    def block(self) -> Spec:
        """Return the spec, with defaults for missing fields. RequestError if the graph has none."""
        if self.spec is None:
            raise RequestError(f"the manifest of {self.file!r} has no spec: give an artifact of 'posexport export'.")
        return read_spec(self.spec)

    def to_bytes(self) -> bytes:
        """Return the JSON file."""
        return json_bytes(unstructure(self))


@attrs.frozen(kw_only=True)
class OnnxManifest(Manifest):
    """The manifest of an ONNX file. `request` is what a project's entry asked for. `tune` is the tuning that chose it.
    `module` is the torch module whose export it is. `rewrite` says how it was made from another file. `attentions` are
    the attentions of a whole model, with the keys of `posexport rewrite --json`."""

    request: Mapping[str, Any] | None = omitted(None)
    tune: Mapping[str, Any] | None = omitted(None)
    module: ModuleSource | None = omitted(None)
    rewrite: RewriteRecord | None = omitted(None)
    attentions: tuple[Mapping[str, Any], ...] = omitted(())


@attrs.frozen(kw_only=True)
class PlanSource:
    """The ONNX file from which a plan was built. Weights and the float64 reference come from it.

    `version` is the version of posexport that wrote it. None if another tool wrote it.
    """

    file: str = attrs.field(validator=_file_name)
    sha256: str
    version: str | None = omitted(None)
    external_data: Mapping[str, str] = omitted(factory=dict, validator=_file_names)


@attrs.frozen(kw_only=True)
class Builder:
    """The runtime that built a plan. Only this runtime can open it."""

    name: str = attrs.field(validator=_one_of("builder", BUILDERS))
    version: str


@attrs.frozen(kw_only=True)
class KernelRow:
    """One kernel of a plan. `nodes` are names of ONNX nodes; inside a function they are "node | call (function)"."""

    name: str
    type: str
    nodes: tuple[str, ...]

    @property
    def attention(self) -> bool:
        """Whether it is a fused attention kernel: generated code with that name, not a product named after a node."""
        return self.type == "kgen" and re.search(r"(^|_)mha(_|$)", self.name) is not None


@attrs.frozen(kw_only=True)
class PlanAttention:
    """One attention of a graph that posexport did not write, named after its softmax or operator. `fused` says whether
    it is one kernel, None if the builder's table does not tell. `reason` says why it is not."""

    name: str
    layer: int
    fused: bool | None
    reason: Reason | None = omitted(None)


@attrs.frozen(kw_only=True)
class PlanKernels:
    """The kernels of a plan in order. If the builder did not list them, counts are None and `unknown` gives the reason.

    `fused_attention` says whether each of the `attention_layers` of the graph is one fused kernel. `unfused` says why
    not, if that is known. `decomposed_attention` is the number of layers that the builder decomposed because it had no
    kernel. `attentions` are the attentions that were recognised in a graph without a spec.
    """

    count: int | None
    fused_attention: bool | None
    attention_kernels: int | None
    attention_layers: int
    host_steps: int | None
    decomposed_attention: int = omitted(0)
    unknown: str | None = omitted(None)
    unfused: Reason | None = omitted(None)
    attentions: tuple[PlanAttention, ...] = omitted(())
    rows: tuple[KernelRow, ...]

    @classmethod
    def unlisted(cls, attention_layers: int, reason: str) -> PlanKernels:
        """Return the kernels of a plan whose builder did not list them."""
        counts: dict[str, Any] = dict.fromkeys(("count", "fused_attention", "attention_kernels", "host_steps"))
        return cls(**counts, attention_layers=attention_layers, unknown=reason, rows=())


def _profiles(instance: PlanManifest, field: attrs.Attribute[Any], value: Profiles) -> None:
    """Check that each input has one profile of its rank, with sizes that its dimensions can have."""
    if any(list(shapes) != list(MOMENTS) for shapes in value.values()):
        raise ValueError(f"has a profile without {', '.join(MOMENTS)}")
    ranks = {tensor.name: {len(tensor.shape)} for tensor in instance.inputs}
    if {name: {len(shape) for shape in shapes.values()} for name, shapes in value.items()} != ranks:
        raise ValueError("has profiles that are not those of its inputs")
    for tensor in instance.inputs:
        for shape in value[tensor.name].values():
            least = (smallest(dim) if isinstance(dim, str) else 0 for dim in tensor.shape)
            if any(size < minimum for size, minimum in zip(shape, least, strict=True)):
                raise ValueError(f"has a size of {tensor.name!r} that is too small")


@attrs.frozen(kw_only=True)
class PlanManifest(Manifest):
    """The manifest of a plan. `request` and `tune` are as in OnnxManifest."""

    onnx: PlanSource
    runtime: Builder
    target_gpus: tuple[str, ...]
    profiles: Profiles = attrs.field(validator=_profiles)
    tf32: bool
    memory_limit: int | None
    sizes: Mapping[str, int | None]
    kernels: PlanKernels
    request: Mapping[str, Any] | None = omitted(None)
    tune: Mapping[str, Any] | None = omitted(None)


def manifest_path(path: Path) -> Path:
    """Return the path `<file>.json` of an artifact's manifest."""
    return path.with_name(path.name + ".json")


def changed(path: Path) -> Reason:
    """Return the reason why a file fails whose sha256 differs from its manifest."""
    text = f"the file is not the one that its manifest {manifest_path(path).name} describes (their sha256 differ)"
    return Reason(MISMATCH, text)


def read_manifest(path: Path, trusted: Sequence[TrustedKey] = ()) -> OnnxManifest | PlanManifest | None:
    """Return the manifest of the artifact at `path`, or None if there is none. RequestError if it cannot be used.

    With `trusted` keys, MismatchError unless one of them signed it.
    """
    plan = path.suffix == ".plan"
    return read_manifest_of(PlanManifest, path, trusted) if plan else read_manifest_of(OnnxManifest, path, trusted)


def read_manifest_of(kind: type[M], path: Path, trusted: Sequence[TrustedKey] = ()) -> M | None:
    """Return the manifest of an artifact of this kind, as `read_manifest` does.

    With `trusted` keys, MismatchError unless one of them signed the bytes that are read. Its fingerprint is then the
    manifest's `signer`.
    """
    file = manifest_path(path)
    if not os.path.lexists(file):
        if trusted:
            raise untrusted(path, f"it has no manifest {file.name}, so it is not signed")
        return None
    try:
        data = read_bytes(file, TEXT_LIMIT)
        manifest = structure(parse_json(data), kind)
    except OSError as error:
        problem = f"can't be read ({error.strerror})"
    except DataError as error:
        problem = f"can't be used, {error}"
    else:
        return _signed(manifest, path, data, trusted) if trusted else manifest
    maker = "build the plan again with 'posexport compile'" if kind is PlanManifest else "make the artifact again"
    raise RequestError(f"the manifest {str(file)!r} {problem}: {maker}.")


def _signed(manifest: M, path: Path, data: bytes, trusted: Sequence[TrustedKey]) -> M:
    """Return the manifest with the trusted key that signed its bytes, `data`. The name of the file is signed too."""
    key = check_signature(path, manifest_path(path), data, manifest.signer, trusted)
    if manifest.file != path.name:
        raise untrusted(path, f"its manifest was signed for a file of the name {manifest.file!r}")
    return attrs.evolve(manifest, signer=key.fingerprint)


def add_manifest(files: Staged, path: Path, manifest: M, key: SigningKey | None = None) -> M:
    """Write the manifest of the artifact at `path` with the other `files`. Sign it if a `key` is given. Return it.

    Without a key, the signature of an earlier manifest is removed.
    """
    file = manifest_path(path)
    manifest = attrs.evolve(manifest, signer=None if key is None else key.fingerprint)
    data = manifest.to_bytes()
    files.write(file, lambda opened: opened.write(data))
    if key is None:
        files.remove(signature_path(file))
    else:
        signature = key.sign(data)
        files.write(signature_path(file), lambda opened: opened.write(signature))
    return manifest


def write_manifest(path: Path, manifest: Manifest, key: SigningKey | None = None) -> None:
    """Replace the manifest of the artifact at `path`, as `add_manifest` writes it."""
    with staged() as files:
        add_manifest(files, path, manifest, key)


def external_data(path: Path) -> Mapping[str, str]:
    """Return the sha256 of each file of weights beside an artifact, by name. Empty without a usable manifest."""
    try:
        with renewed():  # these files may be written afterwards
            manifest = read_manifest(path)
    except RequestError:
        return {}
    return {} if manifest is None else manifest.external_data


def matches_manifest(path: Path) -> bool | None:
    """Whether the file and its external data match the manifest, None without one. Raises as `read_manifest`."""
    manifest = read_manifest(path)
    if manifest is None:
        return None
    hashes = {path.name: manifest.sha256, **manifest.external_data}
    files = {path.with_name(name): sha256 for name, sha256 in hashes.items()}
    return all(file.is_file() and sha256_of(file) == sha256 for file, sha256 in files.items())
