"""Reading files to be timed: artifacts of posexport, plans, and ONNX files of other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posexport.bench.shapes import load_for_bench
from posexport.errors import RequestError
from posexport.spec.input_roles import check_input, check_role

if TYPE_CHECKING:
    from posexport.artifact.signing import TrustedKey
    from posexport.bench.timed_file import TimedFile


def load_timed(paths: Sequence[Path], trusted: Sequence[TrustedKey], roles: Mapping[str, str]) -> list[TimedFile]:
    """Load files that are timed in the same rounds. `roles` are roles of inputs by name, in files without a spec.

    RequestError for a file that can't be timed, for a role of an unknown input or of an input that needs none, and for
    an input whose role can't be guessed. One of the `trusted` keys must have signed each file.
    """
    for name, role in roles.items():
        check_role(name, role)
    files = [_load(path, trusted, roles) for path in paths]
    named = {name: None for file in files if file.no_torch for name in file.inputs}
    if roles and not named:
        raise RequestError(f"{str(paths[0])!r} is posexport's own, so the roles of its inputs are known: drop --input.")
    for name, role in roles.items():
        check_input(name, role, named)
    return files


def _load(path: Path, trusted: Sequence[TrustedKey], roles: Mapping[str, str]) -> TimedFile:
    from posexport.artifact.onnx_artifact import ForeignFileError
    from posexport.bench.timed_artifact import TimedArtifact
    from posexport.bench.timed_graph import timed_graph

    try:
        return TimedArtifact(load_for_bench(path, trusted))
    except ForeignFileError as error:
        if not error.is_graph:
            raise  # an artifact whose metadata is incomplete
        if path.suffix == ".plan":
            raise RequestError(
                f"{str(path)!r} is the plan of a graph without a spec, which can't be timed: give the graph, "
                f"{str(error.graph.path)!r}, with the --runtime that built the plan."
            ) from None
        return timed_graph(error.graph, roles)
