"""One tool on one file of the suite, in its own process: what it fused, and whether the result computes the same
function."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from graph_facts import facts_of
from make_one import one_line
from outputs import LIMITS, Arrays, Reference, difference, outputs_of, references, session_of
from timing import cpu_seconds
from tools import NotInstalledError, quiet, tools

from posexport import temporary

EXACT, WRONG, BROKEN, UNKNOWN, FAILED, NOT_RUN = "exact", "wrong", "broken", "unknown", "failed", "not run"
"""The verdicts: the same function; another function; the result does not run but the original did; neither runs; the
tool failed; the tool is not installed."""


def score(suite: Path, record: Mapping[str, Any], tool: str, work: Path) -> dict[str, Any]:
    """The record of one tool on the file of `record`."""
    logging.disable(logging.CRITICAL)
    result: dict[str, Any] = {"name": record["name"], "tool": tool}
    source = suite / record["file"]
    with temporary.folder() as folder:
        target = folder / "out" / record["file"]
        target.parent.mkdir()
        start = cpu_seconds()
        try:
            with quiet():
                result["said"] = tools(work)[tool](source, target)
        except NotInstalledError as error:
            result |= {"verdict": NOT_RUN, "problem": str(error)}
        except Exception as error:
            result |= {"verdict": FAILED, "problem": one_line(error)}
        result["seconds"] = round(cpu_seconds() - start, 2)
        if "verdict" not in result:
            facts = facts_of(onnx.load(target))
            result |= {"attentions": facts.attentions, "rotations": facts.rotations, "nodes": facts.nodes}
            limit = LIMITS[record.get("dtype", "float32")]
            result |= judged(source, target, list(references(suite, record)), limit)
    return result


def judged(source: Path, target: Path, cases: list[Reference], limit: float) -> dict[str, Any]:
    """The verdict on a file, with its largest error against the original.

    If ONNX Runtime cannot run the original (for example a graph of torch at opset 23), torch's outputs replace its
    outputs.
    """
    error, runs, problem = 0.0, False, ""
    for case in cases:
        expected, original = _attempt(source, case.feeds, optimised=False)
        actual, failure = _attempt(target, case.feeds)
        if expected is None and actual is not None:
            expected = dict(zip(actual, case.outputs, strict=False))
        if expected is not None and actual is None:
            return {"verdict": BROKEN, "problem": f"{case.label}: {failure}"}
        if expected is None or actual is None:
            problem = original
            continue
        runs, error = True, max(error, difference(expected, actual, case.feeds))
    if not runs:
        return {"verdict": UNKNOWN, "problem": f"ONNX Runtime does not run the original: {problem}"}
    return {"verdict": EXACT if error <= limit else WRONG, "error": error if math.isfinite(error) else None}


def _attempt(path: Path, feeds: Arrays, *, optimised: bool = True) -> tuple[Arrays | None, str]:
    """The outputs, or the reason why there are none."""
    try:
        return outputs_of(session_of(path, optimised=optimised), feeds), ""
    except Exception as error:
        return None, one_line(error)
