"""What can be said of artifacts before an engine is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posexport.artifact.paths import check_artifact, find_artifacts
from posexport.errors import RequestError
from posexport.verify.result import Report, Unreadable


def unreadable_report(paths: Sequence[Path], seed: int) -> Report | None:
    """The report where none of the artifacts that `paths` name can be read; None where one may be.

    Raises RequestError where they name none.
    """
    unreadable = []
    for path in find_artifacts(paths):
        try:
            check_artifact(path)
        except RequestError as error:
            unreadable.append(Unreadable(str(path), str(error)))
        else:
            return None
    return Report(verdicts=(), unreadable=tuple(unreadable), seed=seed)
