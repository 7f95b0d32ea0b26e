"""The programs of a tuning on the disk: exported once, sized for the scenario, and identified by what they compute.

The store keeps lasting facts: files, sizes, graphs, and what the scenario refuses. A full disk, a crash or a time limit
is temporary, and is tried again the next time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact import onnx_artifact
from posexport.artifact.manifest import OnnxManifest, WeightSource, external_data
from posexport.bench.scenarios import Scenario
from posexport.bench.shapes import free_dimensions, load_for_bench, scenario_sizes
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.space import NARROW, Program
from posexport.errors import Reason, RequestError
from posexport.export import exporter, support
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
"""Seconds to open or build one program."""


@attrs.frozen(kw_only=True)
class Block:
    """What is tuned: its spec in every dtype that it may have, and where its weights come from.

    `load` gives the spec (with the biases that a file of weights has) and the weights in a dtype; RequestError where
    they overflow there. `source` names the weights: two blocks with the same one have the same weights.
    `weight_source` is what a manifest says of them. `fixed` holds the sizes that are fixed of `batch`, `seq` and
    `max_seq`, as posexport.export takes them.
    """

    specs: Mapping[str, Spec]
    load: Callable[[str], tuple[Spec, Mapping[str, Tensor]]]
    source: str
    weight_source: WeightSource | None = None
    fixed: dict[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class PreparedProgram:
    """A program that can be timed: the sha256 of its file with its external data (`content`), its size in bytes, sizes
    of the scenario, requests for a profile up to that shape and tuned for it, and its spec."""

    sha256: str
    size: int
    sizes: Mapping[str, int]
    profile: tuple[str, ...]
    spec: Mapping[str, Any]

    def profile_under(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The requests for the profile that its plan is built with under these options; none: the wide one."""
        return self.profile if options.get("profile") == NARROW else ()


class Programs:
    """Programs by what they are; every question is answered from the store where it can be."""

    def __init__(self, block: Block, runtime: str, scenario: Scenario, store: Store, progress: Progress) -> None:
        self._block, self._runtime, self._scenario, self._store = block, runtime, scenario, store
        self._progress = progress
        self._worker = Worker("posexport.bench.tune.worker")
        self._made: set[Path] = set()
        self.engines = versions(ENGINES)

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        self._store.clear_files()

    def refusal(self, program: Program) -> str | None:
        """Why a program can't be written or run, in one sentence without a full stop, known without exporting it."""
        spec = self._block.specs[program.dtype]
        reason = support.unsupported_reason(spec, program.form, program.target, program.opset)
        unsupported_dtype = RUNTIMES[self._runtime].unsupported_dtypes.get(program.dtype)
        return unsupported_dtype or (None if reason is None else reason.text)

    def prepare(self, program: Program) -> PreparedProgram | str:
        """The program, exported and sized; or why it can't be had."""
        exported = self._exported(program)
        if "refused" in exported:
            return str(exported["refused"])
        key = {"what": "fit", "sha256": exported["sha256"], "scenario": str(self._scenario)}
        sized = self._store.get(key, lambda: self._prepare(program))
        if "refused" in sized:
            return str(sized["refused"])
        return PreparedProgram(**exported, **{**sized, "profile": tuple(sized["profile"])})

    def identity(
        self, program: Program, prepared: PreparedProgram, level: str | None = None
    ) -> tuple[str, Reason | None]:
        """(a hash of what the runtime makes of it, None), or ("", why the runtime can't open it)."""
        fact = self._asked("identify", f"opening {program}", program, prepared, level=level)
        error = Reason(fact["code"], fact["error"]) if "error" in fact else None
        return str(fact.get("identity", "")), error

    def kernels(self, program: Program, prepared: PreparedProgram, profile: tuple[str, ...]) -> dict[str, Any]:
        """What the builder chose (posexport.bench.tune.worker), or {error}."""
        return self._asked("kernels", f"building {program}", program, prepared, profile=list(profile))

    def _asked(self, do: str, step: str, program: Program, prepared: PreparedProgram, **fields: Any) -> dict[str, Any]:
        key = {"what": do, "sha256": prepared.sha256, "runtime": self._runtime, "engines": self.engines, **fields}

        def find() -> dict[str, Any]:
            self._progress(step)
            return self.ask(program, do, runtime_name=self._runtime, **fields)

        return self._store.get(key, find, lambda fact: "error" not in fact)

    def ask(self, program: Program, do: str, **fields: Any) -> dict[str, Any]:
        """The child process's answer about a program, or {error, code}."""
        reply = self._worker.ask({"do": do, "path": str(self.path(program).resolve()), **fields}, LIMIT)
        reason = failure_of(reply)
        if reason is not None:
            return {"error": reason.text, "code": reason.code}
        return {name: value for name, value in reply.items() if name != "ok"}

    def path(self, program: Program) -> Path:
        """Its file, exported where this tuning hasn't yet; RequestError where it isn't the one that is known."""
        known, path = self._exported(program), self._path(program)
        if path not in self._made and self._export(program).get("sha256") != known["sha256"]:
            raise RequestError(
                f"{program} is not the file that it was before: the weights or the cache were changed, so tune again "
                "with --no-resume."
            )
        return path

    def write(self, program: Program, path: Path) -> OnnxManifest:
        """Export it to `path` with its manifest, as `posexport export` would; returns the manifest."""
        return onnx_artifact.write_onnx(self._model(program), path, weights=self._block.weight_source)

    def is_same(self, program: Program, prepared: PreparedProgram, manifest: OnnxManifest) -> bool:
        """Whether the file of a manifest holds what was prepared, whatever the name of its external data."""
        if not manifest.external_data:
            return manifest.sha256 == prepared.sha256
        return sorted(external_data(self.path(program)).values()) == sorted(manifest.external_data.values())

    def _model(self, program: Program) -> ir.Model:
        spec, weights = self._block.load(program.dtype)
        options: dict[str, Any] = {"form": program.form, "target": program.target, "opset": program.opset}
        return exporter.export(spec, weights, **options | self._block.fixed)

    def _path(self, program: Program) -> Path:
        return self._store.files / f"{str(program).replace('/', '-')}.onnx"

    def _exported(self, program: Program) -> dict[str, Any]:
        key = {
            "what": "export",
            "program": str(program),
            "spec": self._block.specs[program.dtype].to_dict(),
            "weights": self._block.source,
            "fixed": self._block.fixed,
            "tools": versions(TOOLS),
        }
        return self._store.get(key, lambda: self._export(program), lambda fact: "refused" not in fact)

    def _export(self, program: Program) -> dict[str, Any]:
        self._progress(f"exporting {program}")
        path = self._path(program)
        try:
            model = self._model(program)
        except RequestError as error:
            return {"refused": str(error).rstrip(".")}
        manifest = onnx_artifact.write_onnx(model, path)  # where this can't be done, the tuning can't go on
        self._made.add(path)
        data = [path, *(path.with_name(name) for name in manifest.external_data)]
        return {"sha256": content(manifest), "size": sum(file.stat().st_size for file in data)}

    def _prepare(self, program: Program) -> dict[str, Any]:
        artifact = load_for_bench(self.path(program))
        try:
            sizes = scenario_sizes(artifact, self._scenario)
        except RequestError as error:
            return {"refused": str(error).rstrip(".")}
        spans = {dim: (low, getattr(sizes, dim)) for dim, low in free_dimensions(artifact).items()}
        profile = [f"{dim}={low}:{size}:{size}" for dim, (low, size) in spans.items()]
        return {"sizes": sizes.to_dict(), "profile": profile, "spec": artifact.spec.to_dict()}


def content(manifest: OnnxManifest) -> str:
    """The sha256 of an ONNX file; where its weights lie in external data, one of both, since the file has only names of
    them."""
    if not manifest.external_data:
        return manifest.sha256
    return hashlib.sha256(f"{manifest.sha256} {dict(manifest.external_data)}".encode()).hexdigest()
