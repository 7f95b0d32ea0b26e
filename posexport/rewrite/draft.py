"""A rewritten file that waits in a folder beside its target until it is published with its manifest, or is deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__, temporary
from posexport.artifact.manifest import OnnxManifest, add_manifest, external_data
from posexport.artifact.onnx_artifact import TOOLS
from posexport.artifact.onnx_file import data_path
from posexport.artifact.rewrite_record import RewriteRecord
from posexport.artifact.signing import SigningKey
from posexport.errors import system_error
from posexport.files import check_output, protect, staged
from posexport.progress import Progress, silent
from posexport.rewrite.process import rewrite_in_child
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import RewriteResult


@attrs.frozen(kw_only=True)
class Draft:
    """The rewritten file at `path`, with its external data beside it, for `target`."""

    path: Path
    target: Path
    options: RewriteOptions
    result: RewriteResult

    def publish(self, key: SigningKey | None = None) -> OnnxManifest:
        """Move the file to its target, with a manifest that is signed if a `key` is given; returns the manifest.

        Weights of an earlier file of this name are removed, if its manifest names them.
        """
        data, before = data_path(self.target), external_data(self.target)
        with staged() as files:
            for name in self.result.hashes:
                files.take(self.path.with_name(name), self.target.with_name(name))
            manifest = add_manifest(files, self.target, self.manifest(), key)
            if data.name in before and data.name not in self.result.hashes:
                files.remove(data)
        return manifest

    def manifest(self) -> OnnxManifest:
        """The manifest of the new file. For an artifact of posexport, it says what the file's own metadata say."""
        result, hashes = self.result, dict(self.result.hashes)
        sha256 = hashes.pop(self.target.name)
        return OnnxManifest(
            file=self.target.name,
            sha256=sha256,
            external_data=hashes,
            inputs=result.inputs,
            outputs=result.outputs,
            opset=result.opset,
            domains=result.domains,
            rewrite=RewriteRecord(
                source=result.source,
                seed=self.options.seed,
                only=self.options.only,
                kv_cache=self.options.kv_cache,
                angles=self.options.angles,
                changed=result.changed,
                attentions=result.attentions,
                whole=result.whole,
            ),
            **self._description(),
        )

    def _description(self) -> dict[str, Any]:
        """Version, form, target and tools; for a block, also spec and weights."""
        result, tools = self.result, {name: metadata.version(name) for name in TOOLS}
        if result.block is None:
            return {"version": __version__, "form": result.form, "target": result.target, "tools": tools}
        block = attrs.asdict(result.block, recurse=False)
        return block | {"tools": result.block.tools or tools}


@contextlib.contextmanager
def draft(path: Path, target: Path, options: RewriteOptions, progress: Progress = silent) -> Iterator[Draft]:
    """Rewrite the ONNX file at `path` into a folder beside `target`, which is removed after the `with` block.

    RequestError for files and options that can't be used, and if the child process fails.
    """
    check_output(target, ".onnx")
    with system_error(f"can't write to the folder {str(target.parent)!r}", "give an existing, writable one"):
        made = temporary.folder_beside(target)
    with made as folder:
        result = rewrite_in_child(folder, path, target, options, progress)
        for name in (result.source.file, *result.source.external_data):
            protect(path.with_name(name))
        yield Draft(path=folder / target.name, target=target, options=options, result=result)


def rewrite_file(
    path: Path,
    target: Path,
    options: RewriteOptions | None = None,
    *,
    key: SigningKey | None = None,
    progress: Progress = silent,
) -> RewriteResult:
    """Rewrite the ONNX file at `path` to `target` with its manifest, tested in float64, not on runtimes.

    (`posexport.verify.rewritten` does both.) With `require_all`, nothing is written if an attention is left: see
    `is_complete` of the result. RequestError as `draft` raises it; every file is then unchanged.
    """
    options = options or RewriteOptions()
    with draft(path, target, options, progress) as made:
        if not options.require_all or made.result.is_complete:
            made.publish(key)
    return made.result
