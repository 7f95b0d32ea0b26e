"""The programs of a tuning on disk: exported once, sized for the scenario, and identified by what they compute.

The store keeps lasting facts: files, sizes, graphs, and what the scenario refuses. A full disk, a crash or a time limit
is temporary, so the program is tried again the next time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from posexport.artifact import onnx_artifact
from posexport.artifact.manifest import OnnxManifest, WeightSource, external_data
from posexport.artifact.signing import SigningKey
from posexport.bench.shapes import load_for_bench, scenario_sizes
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.result import Row
from posexport.bench.tune.space import NARROW, Program, Request, other_opsets, programs
from posexport.errors import Reason, RequestError
from posexport.export import exporter, support
from posexport.files import real_path
from posexport.jsondata import unstructure
from posexport.machine import versions
from posexport.processes import Worker, failure_of
from posexport.progress import Progress
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import Tensor

TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir")
ENGINES = ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")
LIMIT = 900.0
"""Seconds allowed to open or build one program."""


@attrs.frozen(kw_only=True)
class Block:
    """What is tuned: its spec in every dtype that it may have, and where its weights come from.

    `load` returns the spec (with the biases that a file of weights has) and the weights in a dtype. RequestError if
    they overflow in it. Two blocks with the same `source` have the same weights. `weight_source` is what a manifest
    says about the weights, and `key` signs the manifest. `fixed` has the fixed sizes of `batch`, `seq` and `max_seq`,
    as in posexport.export.
    """

    specs: Mapping[str, Spec]
    load: Callable[[str], tuple[Spec, Mapping[str, Tensor]]]
    source: str
    weight_source: WeightSource | None = None
    key: SigningKey | None = None
    fixed: dict[str, int] = attrs.field(factory=dict)

    @property
    def title(self) -> str:
        """Its name in results."""
        return next(iter(self.specs.values())).encoding.name

    def programs(self, request: Request, store: Store, progress: Progress) -> Programs:
        """Its programs for one request."""
        return Programs(self, request, store, progress)


class Tunable(Protocol):
    """What can be tuned: a block, or a file (posexport.bench.tune.file_programs)."""

    @property
    def title(self) -> str:
        """Its name in results."""

    @property
    def key(self) -> SigningKey | None:
        """The key that signs what is written."""

    def programs(self, request: Request, store: Store, progress: Progress) -> Programs:
        """Its programs for one request."""


@attrs.frozen(kw_only=True)
class PreparedProgram:
    """A program that can be timed.

    `sha256` is that of its file with its external data (`content`), and `size` is in bytes. `sizes` are those of the
    scenario. `profile` requests a profile that ends at that shape and is tuned for it. A file without a `spec` has the
    `roles` of its inputs as data, and its own options of the `engine`.
    """

    sha256: str
    size: int
    sizes: Mapping[str, int]
    profile: tuple[str, ...]
    spec: Mapping[str, Any] = attrs.field(factory=dict)
    roles: tuple[Mapping[str, Any], ...] = ()
    engine: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        """What a worker draws its inputs from, in addition to the sizes."""
        return {"roles": list(self.roles)} if self.roles else {"spec": self.spec}


class Programs:
    """Programs by what they are. Every question is answered from the store if possible.

    `prepared` has those that can be timed. `prepare` comes before every other question about a program.
    """

    against: Path | None = None
    """The file that all programs must agree with. None if the spec says what they compute."""

    roles: Mapping[str, str] = {}
    """Roles of inputs that the user knows, by name."""

    def __init__(self, block: Block, request: Request, store: Store, progress: Progress) -> None:
        self._prepare_for(block.key, request, store, progress)
        self._block = block

    def _prepare_for(self, key: SigningKey | None, request: Request, store: Store, progress: Progress) -> None:
        self.request, self.store, self.progress, self.key = request, store, progress, key
        self.prepared: dict[Program, PreparedProgram] = {}
        self._worker = Worker("posexport.bench.tune.worker")
        self._made: set[Path] = set()
        self.engines = versions(ENGINES)

    def candidates(self) -> Iterator[Program]:
        """The programs to begin with."""
        return programs(self.request.runtime, self._block.specs, self.request.limits)

    def others(self, best: Program) -> list[Program]:
        """The best program in the opsets that were not tried."""
        return other_opsets(best, self.request.limits)

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        self.store.clear_files()

    def refusal(self, program: Program) -> str | None:
        """Why a program can't be written or run, in one sentence without a full stop.

        It is known without exporting the program.
        """
        spec = self._spec(program)
        reason = support.unsupported_reason(spec, program.form, program.target, program.opset)
        unsupported_dtype = RUNTIMES[self.request.runtime].unsupported_dtypes.get(program.dtype)
        return unsupported_dtype or (None if reason is None else reason.text)

    def prepare(self, program: Program) -> PreparedProgram | str:
        """The program, exported and sized, or why it can't be made."""
        exported = self._exported(program)
        if "refused" in exported:
            return str(exported["refused"])
        key = {"what": "fit", "sha256": exported["sha256"], "scenario": str(self.request.scenario)}
        sized = self.store.get(key, lambda: self._prepare(program))
        if "refused" in sized:
            return str(sized["refused"])
        self.prepared[program] = PreparedProgram(**exported, **{**sized, "profile": tuple(sized["profile"])})
        return self.prepared[program]

    def identity(self, program: Program, level: str | None = None) -> tuple[str, Reason | None]:
        """(a hash of what the runtime makes of it, None), or ("", why the runtime can't open it)."""
        fact = self._asked("identify", f"opening {program}", program, level=level)
        error = Reason(fact["code"], fact["error"]) if "error" in fact else None
        return str(fact.get("identity", "")), error

    def kernels(self, row: Row) -> dict[str, Any]:
        """What the builder chose (posexport.bench.tune.worker), or {error}."""
        return self._asked("kernels", f"building {row.program}", row.program, profile=self.profile(row))

    def profile(self, row: Row) -> list[str]:
        """The requests for the profile of a candidate's plan. Empty for the wide profile."""
        return list(self.prepared[row.program].profile) if row.options.get("profile") == NARROW else []

    def _asked(self, do: str, step: str, program: Program, **fields: Any) -> dict[str, Any]:
        runtime, sha256 = self.request.runtime, self.prepared[program].sha256
        key = {"what": do, "sha256": sha256, "runtime": runtime, "engines": self.engines, **fields}

        def find() -> dict[str, Any]:
            self.progress(step)
            return self.ask(program, do, runtime_name=runtime, **fields)

        return self.store.get(key, find, lambda fact: "error" not in fact)

    def ask(self, program: Program, do: str, **fields: Any) -> dict[str, Any]:
        """The child process's answer about a program, or {error, code}."""
        reply = self._worker.ask({"do": do, "path": str(real_path(self.path(program))), **fields}, LIMIT)
        reason = failure_of(reply)
        if reason is not None:
            return {"error": reason.text, "code": reason.code}
        return {name: value for name, value in reply.items() if name != "ok"}

    def path(self, program: Program) -> Path:
        """Its file, exported if this tuning has not done so. RequestError if it differs from the known file."""
        known, path = self._exported(program), self._path(program)
        if path not in self._made and self._export(program).get("sha256") != known["sha256"]:
            raise RequestError(
                f"{program} is not the file that it was before: the weights or the cache were changed, so tune again "
                "with --no-resume."
            )
        return path

    def write(self, program: Program, path: Path) -> OnnxManifest:
        """Export it to `path` with its manifest, as `posexport export` would; returns the manifest."""
        block = self._block
        return onnx_artifact.write_onnx(self._model(program), path, weights=block.weight_source, key=block.key)

    def is_same(self, program: Program, manifest: OnnxManifest) -> bool:
        """Whether the file of a manifest contains what was prepared. Names of external data may differ."""
        if not manifest.external_data:
            return manifest.sha256 == self.prepared[program].sha256
        return sorted(external_data(self.path(program)).values()) == sorted(manifest.external_data.values())

    def _model(self, program: Program) -> ir.Model:
        spec, weights = self._block.load(program.dtype)
        spec = attrs.evolve(spec, positions=program.positions)
        options: dict[str, Any] = {"form": program.form, "target": program.target, "opset": program.opset}
        return exporter.export(spec, weights, **options | self._block.fixed)

    def _spec(self, program: Program) -> Spec:
        return attrs.evolve(self._block.specs[program.dtype], positions=program.positions)

    def _path(self, program: Program) -> Path:
        return self.store.files / f"{str(program).replace('/', '-')}.onnx"

    def _exported(self, program: Program) -> dict[str, Any]:
        key = {"what": "export", "program": str(program), **self._source(program), "tools": versions(TOOLS)}
        return self.store.get(key, lambda: self._export(program), lambda fact: "refused" not in fact)

    def _source(self, program: Program) -> dict[str, Any]:
        """What the file of a program is made from."""
        return {
            "spec": self._spec(program).to_dict(),
            "weights": self._block.source,
            "origin": None if (origin := self._block.weight_source) is None else unstructure(origin),
            "fixed": self._block.fixed,
        }

    def _export(self, program: Program) -> dict[str, Any]:
        path = self._path(program)
        manifest = self._make(program, path)
        if isinstance(manifest, str):
            return {"refused": manifest}
        self._made.add(path)
        data = [path, *(path.with_name(name) for name in manifest.external_data)]
        return {"sha256": content(manifest), "size": sum(file.stat().st_size for file in data)}

    def _make(self, program: Program, path: Path) -> OnnxManifest | str:
        """Write the file of a program; its manifest, or why it can't be made."""
        self.progress(f"exporting {program}")
        try:
            model = self._model(program)
        except RequestError as error:
            return str(error).rstrip(".")
        # where this can't be done, the tuning can't go on
        return onnx_artifact.write_onnx(model, path, weights=self._block.weight_source)

    def _prepare(self, program: Program) -> dict[str, Any]:
        artifact = load_for_bench(self.path(program))
        try:
            sizes = scenario_sizes(artifact, self.request.scenario).to_dict()
        except RequestError as error:
            return {"refused": str(error).rstrip(".")}
        smallest = {dim: low for dim, (low, _) in artifact.bounds.items()}
        profile = artifact.profile_requests([smallest, sizes])
        return {"sizes": sizes, "profile": profile, "spec": artifact.spec.to_dict()}


def content(manifest: OnnxManifest) -> str:
    """The sha256 of an ONNX file. With external data, which the file only names, it is a hash of both."""
    return content_of(manifest.sha256, manifest.external_data)


def content_of(sha256: str, external: Mapping[str, str]) -> str:
    """The same for the sha256 of a file and of its external data by name."""
    return hashlib.sha256(f"{sha256} {dict(external)}".encode()).hexdigest() if external else sha256
