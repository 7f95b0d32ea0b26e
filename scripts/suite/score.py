"""`python scripts/suite/score.py SUITE WORK`: every tool on every file of the suite, each in a process with limits.

`WORK/scores` has one record for each; those that are there are kept, so that it can be stopped and goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from limited import record_of
from score_one import score
from tools import install_onnxsim, tools


def files_of(suite: Path) -> list[dict[str, Any]]:
    """The records of the suite's files: of the exports that did not fail."""
    records = json.loads((suite / "index.json").read_text(encoding="utf-8"))
    return [record for record in records if record.get("file")]


def score_path(work: Path, name: str, tool: str) -> Path:
    return work / "scores" / f"{name}--{tool.replace(' ', '-')}.json"


@click.command()
@click.argument("suite", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("work", type=click.Path(path_type=Path, file_okay=False))
@click.option("--only", "names", multiple=True, help="a file, by its name without .onnx; repeatable; else all")
@click.option("--tool", "chosen", multiple=True, type=click.Choice(list(tools(Path()))), help="repeatable; else all")
@click.option("--again", is_flag=True, help="those that have a record too")
def main(suite: Path, work: Path, names: tuple[str, ...], chosen: tuple[str, ...], again: bool) -> None:
    """Score the tools on the files of SUITE; records and environments are kept in WORK."""
    (work / "scores").mkdir(parents=True, exist_ok=True)
    install_onnxsim(work / "onnxsim")
    records = [record for record in files_of(suite) if record["name"] in names or not names]
    for tool in chosen or tools(work):
        for record in records:
            path = score_path(work, record["name"], tool)
            if again:
                path.unlink(missing_ok=True)
            result, done = record_of(path, score, suite, record, tool, work)
            if done:
                click.echo(f"{tool} {record['name']}: {line_of(result, record)}")


def line_of(result: dict[str, Any], record: dict[str, Any]) -> str:
    """What to tell of one record while the others are made."""
    if "ended" in result:
        return str(result["ended"])
    carried = f"{result.get('attentions', '-')} of {record['sites']}"
    kept = [one["code"] for one in result.get("said", {}).get("kept", ())]
    problem = f" {result['problem']}" if result.get("problem") else ""
    return f"{carried}, {result['verdict']}{problem} {kept or ''}".rstrip()


if __name__ == "__main__":
    main()
