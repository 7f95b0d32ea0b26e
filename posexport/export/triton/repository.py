"""Writes a model, or a version of it, into a model repository of Triton.

    <repository>/<name>/config.pbtxt                the configuration, shared by all versions
    <repository>/<name>/<version>/model.onnx        or model.plan, the bytes of the artifact
    <repository>/<name>/<version>/model.onnx.json   its manifest: `posexport verify` accepts a packaged ONNX file too
    <repository>/<name>/<version>/model.onnx.json.sig   the manifest's signature, if it is signed
    <repository>/<name>/<version>/<file>.data       external data, under the name that the graph has

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.manifest import write_manifest
from posexport.artifact.signing import SigningKey
from posexport.errors import RequestError
from posexport.export.triton.config import read_config
from posexport.export.triton.served_artifact import BACKENDS, ServedArtifact, copy_file
from posexport.files import TEXT_LIMIT, check_name, read_bytes, renewed, write_folder
from posexport.progress import Progress


@attrs.frozen
class ModelVersion:
    """A place in a repository; with `force`, existing files may be replaced."""

    repository: Path
    name: str
    version: int
    force: bool

    @property
    def home(self) -> Path:
        """The model's folder."""
        return self.repository / self.name

    @property
    def folder(self) -> Path:
        """The version's folder."""
        return self.home / str(self.version)

    def check(self) -> None:
        """RequestError if something is in the way of the model's folder or of this version, or the name is not
        valid."""
        check_name(self.folder)
        if not self.repository.parent.is_dir():
            raise RequestError(
                f"the folder {str(self.repository.parent)!r} is not there: make it first, or give another."
            )
        for folder in (self.repository, self.home, self.folder):
            if folder.exists() and not folder.is_dir():
                raise RequestError(f"{str(folder)!r} is a file: give another --output or --name, or move it away.")
        if self.folder.exists() and not self.force:
            raise RequestError(
                f"{str(self.folder)!r} is there: give another --version or --name, or --force to replace it."
            )

    def write(
        self, served: ServedArtifact, config: Any, text: bytes, progress: Progress, key: SigningKey | None = None
    ) -> dict[str, str]:
        """Write the model's folder, or a version of it; returns the sha256 of each file in the version's folder.

        The manifest is signed if there is a `key`. `config` is the configuration as a message, `text` as the file.
        RequestError if it can't be replaced. What other processes write in the meantime stays: the version is added to
        it.
        """
        hashes: dict[str, str] = {}

        def fill(target: Path, folder: Path) -> None:
            inside = folder / self.folder.relative_to(target)
            if target != self.folder:
                inside.mkdir(parents=True)
                (inside.parent / "config.pbtxt").write_bytes(text)
            for name, (source, sha256) in served.files.items():
                progress(f"copying {source.name}")
                hashes[name] = copy_file(source, inside / name, sha256)
            if served.manifest is not None:
                write_manifest(inside / BACKENDS[served.backend][1], served.manifest, key)

        written = False
        while not written:
            self.check()
            self._check_config(config)
            target = next((folder for folder in (self.repository, self.home) if not folder.exists()), self.folder)
            alone = target == self.folder
            beside = {self.home / "config.pbtxt": text} if alone else {}
            written = write_folder(target, partial(fill, target), beside, replace=self.force and alone)
        return hashes

    def _check_config(self, config: Any) -> None:
        """RequestError if another configuration is there, unless `force` is set and no other version uses it."""
        path = self.home / "config.pbtxt"
        numbers = [folder for folder in self.home.glob("*") if folder.name.isascii() and folder.name.isdecimal()]
        versions = {folder.name for folder in numbers if folder.is_dir()}
        others = sorted(versions - {str(self.version)}, key=int)
        if not path.is_file() or (self.force and not others):
            return
        with suppress(RequestError), renewed():
            if read_config(read_bytes(path, TEXT_LIMIT)) == config:
                return
        advice = ": give another --name, or --force to replace it"
        if others:
            advice = f", and version {others[0]} shares it: give another --name"
        raise RequestError(f"{str(path)!r} differs from the configuration of this version{advice}.")
