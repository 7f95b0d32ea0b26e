"""`scripts/rewrite_results suite`: every tool on every file of the suite, each in a process with limits.

`WORK/scores` has one record for each pair of file and tool. Existing records are kept, so an interrupted run can
continue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from limited import SECONDS, record_of
from score_one import FAILED, score
from tools import install_onnxsim, tools

from posexport.errors import check_known


def files_of(suite: Path) -> list[dict[str, Any]]:
    """The records of the suite's files. Failed exports have no file and are left out."""
    records = json.loads((suite / "index.json").read_text(encoding="utf-8"))
    return [record for record in records if record.get("file")]


def score_path(work: Path, name: str, tool: str) -> Path:
    return work / "scores" / f"{name}--{tool.replace(' ', '-')}.json"


def run(suite: Path, work: Path, names: Sequence[str], chosen: Sequence[str], again: bool) -> None:
    """Score the tools on the files. An empty list of names or tools means all."""
    (work / "scores").mkdir(parents=True, exist_ok=True)
    install_onnxsim(work / "onnxsim")
    records = [record for record in files_of(suite) if record["name"] in names or not names]
    for tool in chosen or tools(work):
        check_known("tool", tool, tools(work))
        for record in records:
            path = score_path(work, record["name"], tool)
            if again:
                path.unlink(missing_ok=True)
            result, done = record_of(path, score, suite, record, tool, work)
            if done:
                click.echo(f"{tool} {record['name']}: {line_of(result, record)}")


def results(suite: Path, work: Path) -> list[dict[str, Any]]:
    """The files with the scores of all tools that scored every file, in the form of `rewrite_data.File`."""
    files = files_of(suite)
    paths = {tool: {one["name"]: score_path(work, one["name"], tool) for one in files} for tool in tools(work)}
    complete = [tool for tool in paths if all(path.exists() for path in paths[tool].values())]
    return [
        {
            **{key: one.get(key, "") for key in ("name", "kind", "exporter", "encoding", "rope", "sites")},
            "scores": {tool: score_of(json.loads(paths[tool][one["name"]].read_bytes())) for tool in complete},
        }
        for one in files
    ]


def score_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the form of `rewrite_data.ToolScore`."""
    if "ended" in result:
        return {"verdict": FAILED, "problem": result["ended"], "seconds": float(SECONDS)}
    said = {key: value for key, value in result.get("said", {}).items() if key in ("recognised", "kept")}
    if "problem" in result:  # without the folder of the file
        said["problem"] = re.sub(r"(?:/[\w.-]+)+/([\w.-]+\.onnx)", r"\1", str(result["problem"]))
    return {**{key: value for key, value in result.items() if key not in ("name", "tool", "said")}, **said}


def line_of(result: dict[str, Any], record: dict[str, Any]) -> str:
    """A line about one record, printed while the others are made."""
    if "ended" in result:
        return str(result["ended"])
    carried = f"{result.get('attentions', '-')} of {record['sites']}"
    kept = [one["code"] for one in result.get("said", {}).get("kept", ())]
    problem = f" {result['problem']}" if result.get("problem") else ""
    return f"{carried}, {result['verdict']}{problem} {kept or ''}".rstrip()
