"""Builds a plan in a child process, `python -P -m posexport.runtimes.tensorrt.build_process`, for the command line.

A damaged or hostile file can end the process that parses it, or use all memory. Here that becomes one sentence. A
request is {path, sha256, options, folder, shapes}, its answer {version, profiles, kernels, memory, seconds}. The plan
and its caches are files in the folder. The steps of the build are reported while it runs. Ctrl-C ends the child at
once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from posexport import machine, temporary
from posexport.artifact.graph_file import GraphFile, read_graph
from posexport.artifact.manifest import PlanKernels
from posexport.artifact.onnx_artifact import read_onnx
from posexport.errors import PosexportError, Reason, RequestError, RuntimeMissingError
from posexport.files import read_bytes
from posexport.jsondata import structure, unstructure
from posexport.processes import INVALID, LIMITED, MEMORY, MISSING, Worker, failure_of, report, serve
from posexport.progress import Progress, silent
from posexport.runtimes import gpu_missing
from posexport.runtimes.tensorrt.builder import Built, Shapes, build
from posexport.runtimes.tensorrt.options import BuildOptions

LONGEST_STEP = 3600.0
"""The seconds that one step of a build may take; the builder reports each step."""

_PLAN, _TIMING, _RUNTIME = "plan", "timing", "runtime"  # the files in the folder


@contextlib.contextmanager
def build_process() -> Iterator[Worker]:
    """The child process. It starts at once and ends with the block."""
    worker = Worker("posexport.runtimes.tensorrt.build_process")
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


def build_in_child(
    worker: Worker,
    artifact: GraphFile,
    options: BuildOptions,
    progress: Progress = silent,
    shapes: Shapes | None = None,
) -> Built:
    """Build an ONNX file into a plan in another process, with `shapes` if it is not an artifact of posexport.

    Raises the errors of `posexport.export.compile.compile_plan`, and RequestError if the engine crashes, runs out of
    memory or raises anything else.
    """
    now = "starting"

    def note(step: str) -> None:
        nonlocal now
        now = step
        progress(step)

    with temporary.folder() as folder:
        plain = attrs.asdict(options, value_serializer=lambda _, __, value: str(value) if _is_path(value) else value)
        source: dict[str, Any] = {"path": str(artifact.path.absolute()), "sha256": artifact.sha256}
        source["shapes"] = None if shapes is None else attrs.asdict(shapes)
        reply = worker.ask({**source, "options": plain, "folder": str(folder)}, LONGEST_STEP, note)
        failure = failure_of(reply)
        if failure is not None:
            raise _error(failure, f"{options.runtime} can't build {str(artifact.path)!r}", now)
        files = {
            file: read_bytes(folder / file, machine.available()) if (folder / file).is_file() else None
            for file in (_PLAN, _TIMING, _RUNTIME)
        }
    return Built(
        plan=files[_PLAN],
        version=reply["version"],
        profiles=reply["profiles"],
        kernels=structure(reply["kernels"], PlanKernels),
        memory=reply["memory"],
        seconds=reply["seconds"],
        timing_cache=files[_TIMING],
        runtime_cache=files[_RUNTIME],
    )


def _error(failure: Reason, problem: str, step: str) -> PosexportError:
    """The error for a failure of the child, in which `problem` failed at this step."""
    if failure.code == MISSING:
        return RuntimeMissingError(failure.text)
    if failure.code == INVALID:
        return RequestError(failure.text)
    text = failure.text.rstrip(".")
    if failure.code in (MEMORY, LIMITED):
        return RequestError(f"{problem}, there is not enough memory ({text}): give smaller shapes with --profile.")
    return RequestError(f"{problem}, it failed at the step {step!r} ({text}): export the file again.")


def _is_path(value: Any) -> bool:
    return isinstance(value, Path)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Build the plan and write it into the folder."""
    options, folder = BuildOptions(**request["options"]), Path(request["folder"])
    if gpu_missing() is not None:  # CUDA maps far more memory than it uses
        machine.limit_to_what_is_free()
    read: Callable[[Path, str], GraphFile] = read_onnx if request["shapes"] is None else read_graph
    artifact = read(Path(request["path"]), request["sha256"])  # exactly the checked file, not a later one
    shapes = None if request["shapes"] is None else Shapes(**request["shapes"])
    built = build(artifact, options, report, shapes)
    (folder / _PLAN).write_bytes(memoryview(built.plan))
    if built.timing_cache is not None:
        (folder / _TIMING).write_bytes(memoryview(built.timing_cache))
    if options.runtime_cache is not None:
        from posexport.runtimes.tensorrt.engine import warm_cache

        report("compiling kernels for this GPU")
        warmed = warm_cache(options.runtime, built.plan, artifact, built.profiles, options.runtime_cache)
        (folder / _RUNTIME).write_bytes(warmed)
    return {
        "version": built.version,
        "profiles": built.profiles,
        "kernels": unstructure(built.kernels),
        "memory": built.memory,
        "seconds": built.seconds,
    }


if __name__ == "__main__":
    serve(answer)
