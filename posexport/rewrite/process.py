"""Rewrites a file in a child process, `python -P -m posexport.rewrite.process`, for `posexport.rewrite.draft`.

A damaged or hostile file can end the process that parses and evaluates it, or use all memory: here this becomes an
error in one sentence. A request is {path, target, options, folder}, its answer a RewriteResult; the files are in the
folder. The steps of the work are reported while it runs. Ctrl-C ends the child at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posexport import machine
from posexport.errors import PosexportError, Reason, RequestError
from posexport.files import protected_inputs
from posexport.jsondata import structure, unstructure
from posexport.processes import INVALID, LIMITED, MEMORY, Worker, failure_of, report, serve
from posexport.progress import Progress, silent
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import RewriteResult

LONGEST_STEP = 3600.0
"""Seconds that one step may take."""


def rewrite_in_child(
    folder: Path, path: Path, target: Path, options: RewriteOptions, progress: Progress = silent
) -> RewriteResult:
    """`posexport.rewrite.files.rewrite_into` in another process, which has ended when this returns.

    Also RequestError if the process crashes, runs out of memory or raises any error.
    """
    request = {"path": str(path), "target": str(target), "folder": str(folder.absolute())}
    request["options"] = unstructure(options)
    reply = _asked(request, f"{str(path)!r} can't be rewritten", "starting", progress)
    return structure(reply["result"], RewriteResult)


def exact_in_child(folder: Path, path: Path, names: Sequence[str], roles: Mapping[str, str], seed: int) -> Path:
    """The ONNX file at `path` with exact angles in the attentions with these names, written into `folder`.

    Another process does this; RequestError if it isn't possible.
    """
    request = {"path": str(path), "folder": str(folder.absolute()), "exact": [*names], "roles": {**roles}, "seed": seed}
    _asked(request, f"the angles of {str(path)!r} can't be made exact", "making them exact")
    return folder / path.name


def _asked(request: dict[str, Any], problem: str, step: str, progress: Progress = silent) -> dict[str, Any]:
    """The answer of a child, which has then ended.

    If it fails, an error is raised that says that `problem` failed while `step`, or the last step that the child
    reported.
    """

    def note(reported: str) -> None:
        nonlocal step
        step = reported
        progress(reported)

    worker = Worker("posexport.rewrite.process")
    try:
        reply = worker.ask(request, LONGEST_STEP, note)
    finally:
        worker.close()
    failure = failure_of(reply)
    if failure is not None:
        raise _error(failure, problem, step)
    return reply


def _error(failure: Reason, problem: str, step: str) -> PosexportError:
    """The error for a failure of the child: `problem` failed at this step."""
    if failure.code == INVALID:
        return RequestError(failure.text)
    text = failure.text.rstrip(".")
    if failure.code in (MEMORY, LIMITED):
        return RequestError(f"{problem}, there is not enough memory ({text}): free some.")
    return RequestError(f"{problem}, it failed while {step} ({text}): export the file again.")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Rewrite the file into the folder, or only make its angles exact."""
    machine.limit_to_what_is_free()
    if "exact" in request:
        from posexport.rewrite.files import exact_into

        with protected_inputs():
            paths = Path(request["folder"]), Path(request["path"])
            exact_into(*paths, request["exact"], request["roles"], request["seed"])
        return {}
    from posexport.rewrite.files import rewrite_into

    with protected_inputs():
        options = structure(request["options"], RewriteOptions)
        result = rewrite_into(Path(request["folder"]), Path(request["path"]), Path(request["target"]), options, report)
    return {"result": unstructure(result)}


if __name__ == "__main__":
    serve(answer)
