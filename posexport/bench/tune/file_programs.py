"""The programs of a tuning of any ONNX file: the file as it is, and its attention rewritten into each form.

In a rewritten program, at least one attention was rewritten. All programs have the inputs and outputs of the file, and
each is verified against it. The file's dtype and caches stay, and so does its opset if the form takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.graph_writer import copy_graph
from posexport.artifact.manifest import OnnxManifest, add_manifest, tensors_of
from posexport.artifact.onnx_artifact import ForeignFileError, artifact_of
from posexport.artifact.rewrite_record import RewriteRecord, RewriteSource
from posexport.artifact.signing import SigningKey
from posexport.bench.timed_graph import TimedGraph
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.programs import TOOLS, PreparedProgram, Programs, content_of
from posexport.bench.tune.space import ORIGINAL, Program, Request
from posexport.errors import RequestError
from posexport.files import sha256_of, staged
from posexport.machine import versions
from posexport.progress import Progress
from posexport.rewrite.draft import draft
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import block_of
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import FORM_OPSETS, FORMS, unsupported_opset


@attrs.frozen(kw_only=True)
class TunedFile:
    """What is tuned: a file, read for bench, and `roles` of inputs that the user knows. `key` signs the winner."""

    graph: TimedGraph
    roles: Mapping[str, str] = attrs.field(factory=dict)
    key: SigningKey | None = None

    @property
    def title(self) -> str:
        """Its name in results."""
        return self.graph.path.name

    def programs(self, request: Request, store: Store, progress: Progress) -> FilePrograms:
        """Its programs for one request."""
        return FilePrograms(self, request, store, progress)


class FilePrograms(Programs):
    """Programs made from one file."""

    def __init__(self, tuned: TunedFile, request: Request, store: Store, progress: Progress) -> None:
        self._prepare_for(tuned.key, request, store, progress)
        self._tuned, self._file = tuned, tuned.graph.graph
        self.against, self.roles = self._file.path, tuned.roles

    def candidates(self) -> Iterator[Program]:
        """The file itself, and every form for every target, in the file's opset or the lowest that the form takes."""
        limits, runtime = self.request.limits, self.request.runtime
        common = {"dtype": self._tuned.graph.dtype}
        if not limits.forms and not limits.opsets:
            yield Program(form=ORIGINAL, opset=self._file.opset, **common)
        targets = limits.targets or ("portable", "ort" if runtime.startswith("ort") else "tensorrt")
        for form, target in product(limits.forms or FORMS, targets):
            for opset in limits.opsets or (max(self._file.opset, FORM_OPSETS[form][0]),):
                yield Program(form=form, target=target, opset=opset, **common)

    def others(self, best: Program) -> list[Program]:
        """None, because another opset is a conversion of the whole file, which is not tuning."""
        return []

    def refusal(self, program: Program) -> str | None:
        """Why a program can't be made or run, if that is known without making it."""
        unsupported_dtype = RUNTIMES[self.request.runtime].unsupported_dtypes.get(program.dtype)
        opset = None if program.form == ORIGINAL else unsupported_opset(program.form, program.target, program.opset)
        return unsupported_dtype or (None if opset is None else str(opset))

    def prepare(self, program: Program) -> PreparedProgram | str:
        """The program, written and sized, or why it can't be made."""
        made = self._exported(program)
        if "refused" in made:
            return str(made["refused"])
        graph = self._tuned.graph
        try:
            sizes = graph.scenario_sizes(self.request.scenario)
        except RequestError as error:
            return str(error).rstrip(".")
        request = graph.request(sizes)
        roles = tuple(request.pop("roles"))
        engine = graph.engine_options(RUNTIMES[self.request.runtime], [sizes])
        self.prepared[program] = PreparedProgram(**made, sizes=request, profile=(), roles=roles, engine=engine)
        return self.prepared[program]

    def path(self, program: Program) -> Path:
        """Its file. For the original, this is the file itself."""
        return self._file.path if program.form == ORIGINAL else super().path(program)

    def write(self, program: Program, path: Path) -> OnnxManifest:
        """Write it to `path` with its manifest, as `posexport rewrite` would; returns the manifest."""
        if program.form == ORIGINAL:
            return _copied(self._file, path, self.key)
        made = self._rewritten(program, path)
        if isinstance(made, str):
            raise RequestError(f"{program} can't be written again, {made}: tune again.")
        return made

    def is_same(self, program: Program, manifest: OnnxManifest) -> bool:
        """Whether the file of a manifest contains what was prepared. Names of external data may differ."""
        if program.form != ORIGINAL:
            return super().is_same(program, manifest)
        return sha256_of(self._file.path) == self._file.sha256

    def _exported(self, program: Program) -> dict[str, Any]:
        if program.form == ORIGINAL:
            return {"sha256": content_of(self._file.sha256, self._file.external_sha256), "size": _size(self._file)}
        return super()._exported(program)

    def _source(self, program: Program) -> dict[str, Any]:
        return {"file": self._file.sha256, "data": self._file.external_sha256, "roles": dict(self.roles)}

    def _make(self, program: Program, path: Path) -> OnnxManifest | str:
        self.progress(f"rewriting to {program}")
        return self._rewritten(program, path)

    def _rewritten(self, program: Program, path: Path) -> OnnxManifest | str:
        """Rewrite the file to `path`. Returns its manifest, or why no attention could be rewritten."""
        options = RewriteOptions(
            form=program.form, target=program.target, opset=program.opset, roles=self.roles, seed=self.request.seed
        )
        try:
            with draft(self._file.path, path, options) as made:
                if made.result.changed:
                    return made.publish(self.key)
        except RequestError as error:
            return str(error).rstrip(".")
        reasons = [one["reason"]["text"] for one in made.result.attentions if one["reason"] is not None]
        return f"no attention was rewritten: {reasons[0] if reasons else 'none was found'}".rstrip(".")


def _size(file: GraphFile) -> int:
    return sum(part.stat().st_size for part in (file.path, *map(file.path.with_name, file.external_files())))


def _copied(file: GraphFile, path: Path, key: SigningKey | None) -> OnnxManifest:
    """Copy the file, with the manifest of a rewrite that changed nothing."""
    described: dict[str, Any] = {"version": __version__, "tools": versions(TOOLS)}
    with suppress(ForeignFileError):
        block = attrs.asdict(block_of(artifact_of(file), file.metadata()), recurse=False)
        described |= {name: value for name, value in block.items() if value is not None}
    with staged() as files:
        hashes = copy_graph(file, path, files)
        manifest = OnnxManifest(
            file=path.name,
            sha256=hashes.pop(path.name),
            external_data=hashes,
            inputs=tensors_of(file.inputs()),
            outputs=tensors_of(file.outputs()),
            opset=file.opset,
            domains=file.domains(),
            rewrite=RewriteRecord(
                source=RewriteSource(file=file.path.name, sha256=file.sha256, external_data=file.external_sha256),
                seed=0,
                changed=False,
                attentions=(),
                whole=None,
            ),
            **described,
        )
        return add_manifest(files, path, manifest, key)
