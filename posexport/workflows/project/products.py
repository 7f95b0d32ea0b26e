"""The files of a project's artifacts: what each is made from, and whether it is what its entry asks for.

Options are read as the commands read theirs. The manifest of a file has everything that decides its bytes under
`request`, with weights by their sha256 or seed. A file is up to date if the request, the versions that wrote it and its
sha256 are as expected. Local parts of versions (`+cpu`) are not compared, because they name a build of a package, which
writes the same bytes. Imports no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__
from posexport.artifact.manifest import (
    Manifest,
    PlanManifest,
    changed,
    external_data,
    manifest_path,
    matches_manifest,
    read_manifest,
    write_manifest,
)
from posexport.artifact.profiles import profiles_of
from posexport.artifact.signing import SigningKey
from posexport.errors import Reason, RequestError, check_known, located, shown
from posexport.export.block_options import CheckpointOptions
from posexport.export.request import ExportOptions, Request, read_request
from posexport.export.support import default_opset
from posexport.files import check_companions, renewed, sha256_of
from posexport.jsondata import unstructure
from posexport.machine import versions
from posexport.runtimes.tensorrt.options import PlanOptions
from posexport.spec.contract import Shape, graph_inputs
from posexport.spec.fields import check_types
from posexport.spec.spec import Spec
from posexport.verify.matrix.table import public_version
from posexport.workflows.project.file import EXPORT_OPTIONS, Entry, Project

OUT_OF_DATE = "out-of-date"
"""The code of a file that is not what its entry asks for."""


@attrs.frozen(kw_only=True)
class Product:
    """One file of a project: the ONNX file of one form (None: the form of its config), or the plan built from it.

    `plan` says how the plan is built. `made_from` is everything that decides the bytes of the file, as JSON data.
    `facts` are facts of its manifest that follow from that, and `original` is what it must be an export of, as fields
    of posexport.artifact.original.Original (None: its weights are random).
    """

    entry: Entry
    form: str | None
    path: Path
    made_from: Mapping[str, Any]
    facts: Mapping[str, Any] = attrs.field(factory=dict)
    original: Mapping[str, Any] | None = None
    plan: PlanOptions | None = None

    @property
    def source(self) -> Path:
        """The ONNX file from which a plan is built. An ONNX file is its own source."""
        return self.path.with_suffix(".onnx") if self.plan else self.path

    def bytes(self) -> int:
        """The size of the file, with the external data that its manifest names."""
        external = [self.path.with_name(name) for name in external_data(self.path)]
        return sum(file.stat().st_size for file in (self.path, *external) if file.is_file())


def products(project: Project, chosen: Sequence[str] = ()) -> list[Product]:
    """Every file of a project, or of its artifacts with the `chosen` names. A plan comes after its ONNX file.

    RequestError for a name that the project doesn't list, and for the first request that can't work, as far as that is
    known without exporting.
    """
    known = [entry.name for entry in project.entries]
    for name in chosen:
        check_known(f"artifact of {project.file}", name, known)
    files = []
    for entry in project.entries:
        if chosen and entry.name not in chosen:
            continue
        for form in entry.all_forms:
            path = project.root / project.folder / f"{entry.stem(form)}.onnx"
            with located(f"{project.file}, artifact {entry.name!r}"):
                check_companions(path)
            request = request_of(project, entry, form)
            source = made_from(request)
            product = Product(entry=entry, form=form, path=path, made_from=source, original=request.original())
            files.append(attrs.evolve(product, facts=_facts(request, source)))
            if entry.compile is not None:
                with located(f"{project.file}, artifact {entry.name!r}, compile"):
                    facts = _plan_facts(request, source, entry.compile)
                path, source = path.with_suffix(".plan"), unstructure(entry.compile)
                files.append(attrs.evolve(product, path=path, made_from=source, facts=facts, plan=entry.compile))
    return files


def request_of(project: Project, entry: Entry, form: str | None) -> Request:
    """The export that an entry asks for in one form (None: the form of its config). RequestError names the entry."""
    given = {**entry.options, "form": form}
    config, preset, parameters = (given.pop(name, None) for name in ("config", "preset", "set"))
    where = f"{project.file}, artifact {entry.name!r}"
    with located(where, lambda field: field.replace("_", "-") if field in EXPORT_OPTIONS else field):
        for name, value in (("config", config), ("preset", preset), ("from", given.get("from"))):
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{name} is {shown(value)}: it must be text.")
        for kind in (Spec, ExportOptions, CheckpointOptions):
            check_types(kind, given)
        request = read_request(config, preset, parameters or {}, given, project.root)
        if request.options.output is not None:
            raise RequestError("its config gives output: a project names the files, so drop it.")
    return request


def _facts(request: Request, source: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an ONNX file's manifest that follow from what the file is made from."""
    facts = {name: source[name] for name in ("form", "target", "opset")}
    spec = dict(source["spec"])
    if request.options.weights is not None:  # the file of weights decides which projections have a bias
        del spec["bias"]
    return {**facts, "spec": spec, "inputs": {name: list(shape) for name, shape in _shapes(request).items()}}


def _plan_facts(request: Request, source: Mapping[str, Any], plan: PlanOptions) -> dict[str, Any]:
    """The same for a plan; RequestError for a profile that doesn't fit the inputs of the export."""
    spec, shapes = request.spec, _shapes(request)
    profiles = profiles_of(shapes, plan.profile, spec.token_limit(), _sizes(request), consecutive=spec.consecutive)
    facts = {name: fact for name, fact in _facts(request, source).items() if name != "target"}
    facts |= {"runtime": {"name": plan.runtime}, "tf32": plan.tf32, "memory_limit": plan.memory_limit}
    if plan.runtime != "tensorrt":  # which builds for the GPU that is there
        facts["target_gpus"] = list(plan.compute_capability) or ["portable"]
    return {**facts, "profiles": profiles}


def _sizes(request: Request) -> dict[str, int]:
    """The sizes that an export fixes, by dimension."""
    return {name: size for name in ("batch", "seq", "max_seq") if (size := getattr(request.options, name)) is not None}


def _shapes(request: Request) -> dict[str, Shape]:
    """The shapes of the inputs of an export."""
    sizes = _sizes(request)
    return {
        name: tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape)
        for name, (shape, _) in graph_inputs(request.spec).items()
    }


def made_from(request: Request) -> dict[str, Any]:
    """Everything that decides the bytes of an ONNX file, as JSON data."""
    options = request.options
    if options.weights is not None:
        weights: dict[str, Any] = {"file_sha256": sha256_of(Path(options.weights))}
    elif request.weights is not None:
        from posexport.models.weights import digest_of

        weights = {"checkpoint_sha256": digest_of(request.weights)}  # of what is read, not of the whole checkpoint
    else:
        weights = {"seed": options.seed or 0}
    opset = options.opset or default_opset(options.form, request.spec)
    sizes = {name: getattr(options, name) for name in ("batch", "seq", "max_seq")}
    head = {"form": options.form, "target": options.target, "opset": opset, **sizes, "weights": weights}
    source: dict[str, Any] = json.loads(json.dumps({**head, "spec": request.spec.to_dict()}))
    return source


def out_of_date(product: Product) -> Reason | None:
    """Why the file is not what its entry asks for, a clause with OUT_OF_DATE as its code. None if it is.

    If the file does not match its manifest, the code is the one that every verdict has for such a file.
    """
    with renewed():
        if product.path.is_file() and not _is_own(product):
            return changed(product.path)
        text = _out_of_date(product)
    return None if text is None else Reason(OUT_OF_DATE, text)


def _is_own(product: Product) -> bool:
    """Whether the file matches its manifest, if it has one."""
    try:
        return matches_manifest(product.path) is not False
    except RequestError:  # `_out_of_date` reports it
        return True


def _out_of_date(product: Product) -> str | None:
    if not product.path.is_file():
        return "it is not there"
    try:
        manifest = read_manifest(product.path)
    except RequestError as error:
        return str(error).rstrip(".")
    if manifest is None:
        return f"its manifest {manifest_path(product.path).name} is not there"
    if manifest.request is None:
        return "it was not made by 'posexport build'"
    made_by = {"posexport": manifest.version, **manifest.tools}
    reason = _changed(manifest.request, product.made_from) or _other_versions(product, made_by)
    return reason or _other_facts(product, manifest) or _other_source(product, manifest)


def stamp(product: Product, key: SigningKey | None = None) -> None:
    """Add to a file's manifest what the file was made from, and sign it with a `key`."""
    with renewed():
        manifest = read_manifest(product.path)
    if manifest is None:
        raise RequestError(f"{str(product.path)!r} has no manifest: make it again with 'posexport build'.")
    write_manifest(product.path, attrs.evolve(manifest, request=product.made_from), key)


def _changed(made: Mapping[str, Any], request: Mapping[str, Any], within: str = "") -> str | None:
    """The first difference of two requests, with its name. None if they are equal."""
    for name in dict.fromkeys((*request, *made)):
        old, new = made.get(name), request.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            return _changed(old, new, f"{within}{name} ")
        if max(len(str(old)), len(str(new))) > 40:
            return f"its {within}{name} changed"
        return f"its {within}{name} is {old}, asked for is {new}"
    return None


def _other_versions(product: Product, made_by: Mapping[str, str]) -> str | None:
    from posexport.artifact.onnx_artifact import TOOLS

    here = versions(("onnx", product.plan.runtime) if product.plan else TOOLS)  # the builder of the plan may be missing
    for name, version in {"posexport": __version__, **here}.items():
        if public_version(str(made_by.get(name))) != public_version(version):
            return f"it was made by {name} {made_by.get(name)}, here is {version}"
    return None


def _other_facts(product: Product, manifest: Manifest) -> str | None:
    """The first fact of a manifest that contradicts what its file was made from. Parts that are not known are left
    out."""
    stated = json.loads(manifest.to_bytes())
    stated |= {"inputs": {each["name"]: each["shape"] for each in stated["inputs"]}}
    stated |= {"target": manifest.target or "portable"}
    facts = json.loads(json.dumps(product.facts))
    known = {
        name: {key: stated[name].get(key) for key in fact} if name in ("spec", "runtime") else stated.get(name)
        for name, fact in facts.items()
        if name in stated or name not in ("spec", "runtime")
    }
    return _changed(known, facts)


def _other_source(product: Product, manifest: Manifest) -> str | None:
    """The reason if a plan was built from another ONNX file than the one beside it."""
    if not isinstance(manifest, PlanManifest):
        return None
    source = manifest.onnx
    if not product.source.is_file() or source.sha256 != sha256_of(product.source):
        return f"it was built from another {product.source.name}"
    if source.external_data != external_data(product.source):
        return f"it was built from other weights than those beside {product.source.name}"
    return None
