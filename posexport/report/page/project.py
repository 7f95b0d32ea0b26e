"""A project's benchmarks on the page: the files that were not timed; those that were are benchmarks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from posexport.report.page.blocks import Section
from posexport.report.page.results import Result
from posexport.report.page.summary import FAILED, NOT_RUN, Finding, Found

OUT_OF_DATE = "out of date"


def section(results: Sequence[Result]) -> tuple[Section | None, Found]:
    """No section, but what the boxes learn.

    A file that is out of date fails its project's benchmark, as its exit code does.
    """
    findings = tuple(
        Finding(
            state=FAILED if file.get("state") == OUT_OF_DATE else NOT_RUN,
            who=PurePath(file["file"]).name,
            reason=file.get("reason") or "no reason was given",
            where="bench",
        )
        for result in results
        for file in result.data["files"]
        if not file.get("result")
    )
    return None, Found(findings=findings)
