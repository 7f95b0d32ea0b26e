"""docs/guide/ci.md and its examples: the workflow's commands exist and do what the page says."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pages
import pytest
import yaml
from helpers import cli

from posexport.cli import main
from posexport.runtimes.tensorrt.options import PlanOptions
from posexport.workflows.project.file import Entry, Project, find_project
from posexport.workflows.project.limits import Budget, Latency, Tolerances

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "guide" / "ci.md").read_text()
WORKFLOW = yaml.safe_load((DOCS / "examples" / "github-workflow.yml").read_text())
STEPS = WORKFLOW["jobs"]["verify"]["steps"]


def commands(text: str) -> list[list[str]]:
    """The posexport commands of a script, split as a shell does."""
    text = text.replace("$GITHUB_STEP_SUMMARY", "summary.md")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("posexport ")]


SCRIPT = [command for step in STEPS for command in commands(step.get("run", ""))]


def test_the_workflow_builds_verifies_times_and_reports() -> None:
    assert [command[0] for command in SCRIPT] == ["build", "verify", "bench", "report"]
    always = [step for step in STEPS if step.get("if") == "always()"]
    assert len(always) == 2
    assert always[1]["with"]["path"] == "results"


@pytest.mark.parametrize("command", SCRIPT, ids=" ".join)
def test_every_option_is_one_of_its_command(command: list[str]) -> None:
    row = main.get_command(None, command[0])  # type: ignore[arg-type]
    assert row is not None
    known = {option for parameter in row.params for option in parameter.opts}
    assert {part for part in command if part.startswith("-")} <= known


def test_every_key_of_the_file_is_documented() -> None:
    kinds = (Project, Entry, Budget, Latency, PlanOptions, Tolerances)
    names = {field.name for kind in kinds for field in kind.__attrs_attrs__}  # type: ignore[attr-defined]
    for name in names - {"file", "entries", "options"}:
        assert f"`{name.replace('_', '-')}`" in TEXT, name


def test_the_example_is_a_project_that_is_not_built_yet(tmp_path: Path) -> None:
    shutil.copy(DOCS / "examples" / "posexport.toml", tmp_path)
    assert len(find_project(str(tmp_path / "posexport.toml")).entries) == 2
    result = cli("build", "--project", tmp_path / "posexport.toml", "--check")
    assert result.exit_code == 1
    assert "4 out of date" in result.stdout


@pytest.mark.slow
def test_the_documented_commands_and_then_the_workflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.chdir(tmp_path)
    assert pages.run(DOCS / "guide" / "ci.md", tmp_path, slow=True) == 4
    (tmp_path / "results").mkdir()
    for command in SCRIPT:
        pages.run_command(shlex.join(["posexport", *command]).replace("'>'", ">"), tmp_path, pages.QUICK["ci.md"])
    assert "<html" in (tmp_path / "results" / "report.html").read_text()
    assert "encoder-native" in (tmp_path / "summary.md").read_text()
