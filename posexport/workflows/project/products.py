"""The files of a project's artifacts, and whether each is what its entry asks for.

The manifest of a file holds under `request` everything that decides its bytes, weights by their sha256 or seed. A file
is up to date where the request, the versions that wrote it and its sha256 are as expected. Local parts of versions
(`+cpu`) are not compared: they name a build of a package, which writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__
from posexport.artifact.manifest import (
    Manifest,
    PlanManifest,
    external_data,
    manifest_path,
    matches_manifest,
    read_manifest,
)
from posexport.artifact.onnx_artifact import TOOLS
from posexport.errors import RequestError
from posexport.files import sha256_of, write_json
from posexport.jsondata import unstructure
from posexport.workflows.project.file import Entry, Project, stem_of


@attrs.frozen(kw_only=True)
class Product:
    """One file of a project: the ONNX file of one form (None: the form of its config), or with `plan` the plan that is
    built from it."""

    entry: Entry
    form: str | None
    path: Path
    plan: bool = False

    @property
    def source(self) -> Path:
        """The ONNX file that a plan is built from; an ONNX file is its own source."""
        return self.path.with_suffix(".onnx") if self.plan else self.path

    def bytes(self) -> int:
        """The size of the file, with the external data that its manifest names."""
        external = [self.path.with_name(name) for name in external_data(self.path)]
        return sum(file.stat().st_size for file in (self.path, *external) if file.is_file())


def products(project: Project, chosen: tuple[str, ...] = ()) -> list[Product]:
    """Every file of a project, or of its artifacts of the `chosen` names; a plan comes after its ONNX file."""
    files = []
    for entry in project.entries:
        if chosen and entry.name not in chosen:
            continue
        for form in entry.all_forms:
            path = project.root / project.folder / f"{stem_of(entry, form)}.onnx"
            files.append(Product(entry=entry, form=form, path=path))
            if entry.compile is not None:
                files.append(Product(entry=entry, form=form, path=path.with_name(path.stem + ".plan"), plan=True))
    return files


def out_of_date(product: Product, request: Mapping[str, Any]) -> str | None:
    """Why the file is not what `request` asks for, as a clause without a full stop; None where it is."""
    if not product.path.is_file():
        return "it is not there"
    try:
        manifest = read_manifest(product.path)
    except RequestError as error:
        return str(error).rstrip(".")
    if manifest is None:
        return f"its manifest {manifest_path(product.path).name} is not there"
    made = manifest.request
    if made is None:
        return "it was not made by 'posexport build'"
    if not matches_manifest(product.path):
        return "the file is not the one that its manifest describes (their sha256 differ)"
    return _changed(made, request) or _other_versions(product, manifest) or _other_source(product, manifest)


def stamp(path: Path, request: Mapping[str, Any]) -> None:
    """Add to a file's manifest what the file was made from."""
    manifest = read_manifest(path)
    if manifest is None:
        raise RequestError(f"{str(path)!r} has no manifest: make it again with 'posexport build'.")
    write_json(manifest_path(path), unstructure(attrs.evolve(manifest, request=request)))


def _changed(made: Mapping[str, Any], request: Mapping[str, Any], within: str = "") -> str | None:
    """The first difference of two requests, with its name; None where they are equal."""
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


def _other_versions(product: Product, manifest: Manifest) -> str | None:
    expected = {"posexport": __version__}
    made = {"posexport": manifest.version, **manifest.tools}
    for name in ("onnx", _runtime(product)) if product.plan else TOOLS:
        installed = _version(name)
        if installed is not None:  # a machine without the builder can't compare its version
            expected[name] = installed
    for name, version in expected.items():
        if _public(made.get(name)) != _public(version):
            return f"it was made by {name} {made.get(name)}, here is {version}"
    return None


def _runtime(product: Product) -> str:
    assert product.entry.compile is not None
    return product.entry.compile.runtime


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _other_source(product: Product, manifest: Manifest) -> str | None:
    """The reason where a plan was built from another ONNX file than the one beside it."""
    if not isinstance(manifest, PlanManifest):
        return None
    source = manifest.onnx
    if not product.source.is_file() or source.sha256 != sha256_of(product.source):
        return f"it was built from another {product.source.name}"
    if source.external_data != external_data(product.source):
        return f"it was built from other weights than those beside {product.source.name}"
    return None


def _public(version: Any) -> str:
    return str(version).partition("+")[0]
