"""README and docs: every command runs, every link has a target, and tables agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import click
import pages
import pytest
import yaml
from pages import PAGES, ROOT

from posexport.cli import main
from posexport.cli.bench_tables import COLUMNS as BENCH
from posexport.models import ENCODINGS
from posexport.models.checkpoints import ARCHITECTURES
from posexport.models.checkpoints.config import PARTS
from posexport.report.verdicts import COLUMNS as VERIFY
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.presets import preset_names
from posexport.verify.parity import TOLERANCES
from posexport.verify.properties import PROPERTIES

pytestmark = pytest.mark.few_inputs

DOCS = ROOT / "docs"
SLOW = [page for page in PAGES if any(block.slow for block in pages.blocks(page))]
SLOW = [page for page in SLOW if page.name not in {"ci.md", "deployment.md", "fleet.md"}]
"""Pages with slow blocks, except those that have a test of their own for the written files."""

FAST = [page for page in PAGES if any(block.runs and not block.slow for block in pages.blocks(page))]
LONG = {"export.md", "onnx-file.md", "own-modules.md", "whole-models.md"}
"""Pages without slow blocks that take long in total."""


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG)) for page in FAST], ids=title
)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [line for block in pages.blocks(page) if not block.slow for line in block.commands()]
    ran = pages.run(page, tmp_path, slow=False)
    assert ran or all(pages.covered(line) for line in shown)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=title)
def test_what_a_page_shows_runs_with_what_is_slow(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pages.run(page, tmp_path, slow=True)


def test_every_command_is_one_of_posexport_with_its_options() -> None:
    seen = set()
    for page, (name, *arguments) in pages.posexport_commands():
        command = main.get_command(click.Context(main), name)
        assert command is not None, (page, name)
        options, _, _ = command.make_parser(click.Context(command)).parse_args(args=list(arguments))
        assert options is not None, (page, name, arguments)
        seen.add(name)
    assert seen == set(main.list_commands(click.Context(main))), "a page shows each command"


def test_every_other_command_is_run_or_covered() -> None:
    for page in PAGES:
        for block in pages.blocks(page):
            assert block.language in {"bash", "toml", "python", "text", "console"}, (page.name, block.language)
            for line in block.commands():
                known = line.startswith(
                    ("posexport ", "openssl ", "mkdir ", "cmake ", "python docs/examples/", "./build/")
                )
                assert known or pages.covered(line), (page.name, line)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_every_script_that_is_named_is_there() -> None:
    for page in PAGES:
        for name in set(re.findall(r"\./scripts/(\w+)", page.read_text(encoding="utf-8"))):
            assert (ROOT / "scripts" / name).stat().st_mode & 0o111, (page, name)


def test_every_file_that_is_named_is_there() -> None:
    """Pages for developers name files such as `models/absolute.py`."""
    for page in [ROOT / "CONTRIBUTING.md", *(DOCS / "adr").glob("*.md"), DOCS / "reference" / "encodings.md"]:
        for name in re.findall(r"`((?:posexport|models|custom_ops|tests|scripts|docs)/[\w./-]*)`", page.read_text()):
            assert (ROOT / name).exists(), (page.name, name)


def test_the_commit_hook_runs_the_checks() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [(hook["entry"], hook["language"]) for hook in hooks] == [("./scripts/check", "system")]


def test_readme_is_short_and_the_index_has_every_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    index = (DOCS / "README.md").read_text()
    for page in PAGES:
        if page.parent.parent == DOCS:
            assert f"({page.relative_to(DOCS)})" in index, page


def reference(name: str) -> str:
    return (DOCS / "reference" / name).read_text(encoding="utf-8")


def test_the_table_of_encodings_is_complete() -> None:
    table = reference("encodings.md").split("## How each is tested")[0]
    rows = re.findall(r"^\| `([a-z][\w-]*)` \|[^|]*\|([^|]*)\|", table, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(ENCODINGS)
    for name, parameters in rows:
        for field in attrs.fields(ENCODINGS[name]):
            assert f"`{field.name}`" in parameters, (name, field.name)


def test_forms_targets_presets_and_model_types_are_complete() -> None:
    for name in (*FORMS, *TARGETS):
        assert f"| `{name}`" in reference("forms.md"), name
    for name in (*ARCHITECTURES, *PARTS):
        assert f"`{name.removesuffix('_text')}`" in reference("model-types.md"), name
    table = reference("model-types.md").split("## Presets")[1]
    assert sorted(re.findall(r"`([\w.-]+)`", table.split("| --- | --- |")[1])) == sorted(preset_names())


def test_shown_tables_have_the_columns_of_today() -> None:
    for page, columns in (("verify.md", VERIFY), ("bench.md", BENCH)):
        headers = [re.split(r" {2,}", line.strip()) for line in (DOCS / "guide" / page).read_text().splitlines()]
        assert list(columns) in headers, page


def test_the_rule_of_parity_is_that_of_the_code() -> None:
    row = r"^\| (fp32|fp16|bf16) \| (\d+) \| 2\^-(\d+) \| ([\d.]+) \|$"
    rows = re.findall(row, reference("verified.md"), re.MULTILINE)
    stated = {dtype: (float(multiple), 2.0 ** -int(power), float(ceiling)) for dtype, multiple, power, ceiling in rows}
    assert stated == {dtype: (each.multiple, each.floor, each.ceiling) for dtype, each in TOLERANCES.items()}
    assert set(re.findall(r"^\| `(\w+)` \|", reference("verified.md"), re.MULTILINE)) == set(PROPERTIES)
