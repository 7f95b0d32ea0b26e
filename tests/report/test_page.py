"""The report page as a document: complete, self-contained, safe for any content of files, and accessible. Also its
Markdown form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_helpers import DOCS, Reader, bench, everything, html_of, write_all

from posexport.report.page.blocks import Page
from posexport.report.page.markdown import to_markdown
from posexport.report.page.page import FOLDER, make_page, to_html
from posexport.spec.forms import TARGETS

pytestmark = pytest.mark.few_inputs

EVIL = "<script>alert(1)</script><img src=x onerror=\"alert('2')\"> | `a` *b* &amp; \x00\x1b\ud800"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return make_page(write_all(tmp_path_factory.mktemp("page"), everything()))


@pytest.fixture(scope="module")
def page(made: Page) -> str:
    return to_html(made)


def test_the_page_has_three_boxes_and_a_section_for_each_kind_of_result(page: str) -> None:
    read = Reader(page)
    headings = re.findall(r'<h2 id="([\w-]+)"', page)
    assert headings == [
        "fastest", "wrong", "not-run", "artifacts", "tune", "latency", "parity", "matrix", "angles", "plots"
    ]  # fmt: skip
    links = [link["href"] for link in read.all("a")]
    assert links == ["#content", *(f"#{name}" for name in headings[3:])]
    for said in (
        "What is fastest",
        "What is wrong",
        "What was not run",
        "got slower",
        "no GPU: there is no NVIDIA driver",
    ):
        assert said in read.text(), said


def test_sections_stand_only_for_what_is_there(tmp_path: Path) -> None:
    page = html_of(tmp_path, {"bench": bench()})
    assert re.findall(r'<h2 id="([\w-]+)"', page) == ["fastest", "wrong", "not-run", "artifacts", "latency"]
    assert "Nothing was checked here" in page


def leaks(page: str) -> list[str]:
    """Everything in a page that would make a browser send a request."""
    read = Reader(page)
    found = [
        f"{tag} {name}={value}"
        for tag, attributes in read.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        and not re.match("#|data:", value or "")
    ]
    found += [tag for tag, _ in read.elements if tag in ("iframe", "object", "embed", "base", "form", "use", "image")]
    return found + re.findall(r"@import|url\(|fetch\(|XMLHttpRequest|https?:", page)


def test_the_page_asks_for_nothing(page: str) -> None:
    assert leaks(page) == []
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none';")


@pytest.mark.parametrize(
    "planted",
    ['<img src="a.png">', '<link href="https://a.b/c.css">', "<style>@import 'a';</style>", "<iframe></iframe>"],
)
def test_a_page_that_asks_for_something_is_caught(page: str, planted: str) -> None:
    assert leaks(page.replace("</main>", f"{planted}</main>"))


def evil(data: Any) -> Any:
    """The data with every text replaced by markup and invalid characters, except known names."""
    known = {"bench", "tune", "verify", "passed", "failed", "not run", "refused", "timed", "won", "raced", "dropped",
             "slower", "chart", "linear", "log", "parity", "exact", "fastest",
             "unsupported", "ort-cpu", "torch", "lower_bound", "image", *TARGETS}  # fmt: skip
    if isinstance(data, str):
        return data if data in known else EVIL
    if isinstance(data, list):
        return [evil(each) for each in data]
    if isinstance(data, dict):
        return {key: evil(value) for key, value in data.items()}
    return data


def test_markup_in_results_stays_text(tmp_path: Path) -> None:
    files = {name: evil(data) for name, data in everything().items()}
    made = make_page(write_all(tmp_path, files), title=EVIL.encode("ascii", "ignore").decode())
    page, markdown = to_html(made), to_markdown(made)
    page.encode()
    read = Reader(page)
    assert len(read.all("script")) == 1
    assert not read.all("img")
    assert not [name for _, attributes in read.elements for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>" in read.text()
    assert "\x00" not in page and "\x1b" not in page
    assert not re.search("<(?!/?details>|/?summary>)", markdown)
    for line in markdown.splitlines():
        if line.startswith("| "):
            assert "`" not in line.replace("\\`", "")


def test_the_check_for_markup_catches_a_template_that_does_not_escape(page: str) -> None:
    planted = page.replace("</main>", f"{EVIL[: EVIL.index(' |')]}</main>")
    assert len(Reader(planted).all("script")) == 2


def test_tables_and_drawings_are_named_for_those_who_hear_them(page: str) -> None:
    read = Reader(page)
    tables, captions = read.all("table"), [path for path, _ in read.texts if path[-1] == "caption"]
    assert len(tables) == len(captions) > 10
    assert all(head.get("scope") in ("row", "col", "colgroup") for head in read.all("th"))
    drawings = [each for each in read.all("svg") if each.get("role") == "img"]
    assert len(drawings) >= 6
    assert all(each["aria-label"] for each in drawings)
    assert len([path for path, _ in read.texts if path[-1] == "desc"]) == len(drawings)
    assert all(
        each.get("tabindex") == "0" and each.get("aria-label")
        for each in read.all("div")
        if each.get("class") == "scroll"
    )
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert read.all("html")[0]["lang"] == "en"


def test_drawings_have_only_colours_of_the_style_sheet(page: str) -> None:
    drawings = re.findall('<svg class="chart".*?</svg>', page, re.DOTALL)
    names = colours(FOLDER.joinpath("page.css").read_text(encoding="utf-8"))[0]
    for drawing in drawings:
        assert set(re.findall(r"var\(--([\w-]+)\)", drawing)) <= names.keys()
        assert not re.search("#[0-9a-fA-F]{3}|rgb|black", drawing)
        for style in re.findall('<text style="([^"]*)"', drawing):
            assert "fill: var(--" in style, style


def test_every_state_has_a_symbol_and_every_colour_a_word(page: str) -> None:
    read = Reader(page)
    for tone, mark in {"bad": "✗", "refused": "–", "away": "·", "h1": "✓"}.items():
        cells = re.findall(rf'<t[dh][^>]*class="{tone}[^>]*>([^<]+)', page)
        assert [text for text in cells if text.startswith(mark)], tone
    assert "✗ failed" in read.text("li") and "· not run" in read.text("li")


INKS = {
    "ink": ("page", "card"), "soft": ("page", "card"), "link": ("page", "card"),
    "good": ("card",), "bad": ("card", "bad-back"), "care": ("card",),
    **{f"h{step}-ink": (f"h{step}",) for step in range(1, 6)},
    "refused-ink": ("refused",), "away-ink": ("away", "card"),
    "best-ink": ("best", "card"), "position-ink": ("position",),
}  # fmt: skip


def colours(css: str) -> list[dict[str, str]]:
    """The named colours: for light mode and for dark mode."""
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", css)
    return [{name: pair[way] for name, *pair in found} for way in (0, 1)]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("way", [0, 1], ids=["light", "dark"])
def test_letters_stand_out_from_their_ground(way: int) -> None:
    css = FOLDER.joinpath("page.css").read_text(encoding="utf-8")
    names = colours(css)[way]
    for ink, grounds in INKS.items():
        for ground in grounds:
            assert contrast(names[ink], names[ground]) >= 4.5, (ink, ground)
    for line in ("bar-best", "bar-ours", "bar-alternative", "bound", *(f"c{at}" for at in range(6))):
        assert contrast(names[line], names["card"]) >= 3, line
    assert contrast("#777777", "#888888") < 4.5 < contrast("#000000", "#ffffff") == pytest.approx(21)
    assert set(re.findall(r"var\(--([\w-]+)\)", css)) <= names.keys()


@pytest.mark.slow
def test_the_same_files_give_the_same_page(page: str, tmp_path: Path) -> None:
    assert html_of(tmp_path, everything()) == page
    assert str(tmp_path) not in page


@pytest.mark.slow
def test_a_matrix_of_thousands_of_cells_makes_a_page_of_moderate_size() -> None:
    made = make_page([DOCS / "results" / "matrix"])
    page = to_html(made)
    assert len(page) < 300_000 < (DOCS / "results" / "matrix" / "matrix.json").stat().st_size
    text = Reader(page).text()
    cells = json.loads((DOCS / "results" / "matrix" / "matrix.json").read_bytes())["cells"]
    passed = sum(cell["state"] == "passed" for cell in cells)
    assert f"all {passed:,} checks that ran passed" in text
    for name in {cell["encoding"] for cell in cells}:
        assert f">{name}</th>" in page
    for reason in {cell["reason"] for cell in cells if cell.get("reason")}:
        assert " ".join(reason.split()) in text
    assert len(to_markdown(made)) < 100_000


def test_the_markdown_says_what_the_page_says(made: Page) -> None:
    lines = to_markdown(made).splitlines()
    assert lines[0] == "## posexport report"
    assert [line for line in lines if line.startswith("### ")][:3] == [
        "### ★ What is fastest", "### ✗ What is wrong", "### · What was not run"
    ]  # fmt: skip
    told = "\n".join(lines)
    for box in made.boxes:
        assert box.verdict.replace("*", "\\*") in told
    tables = [at for at, line in enumerate(lines) if line.startswith("| ---") or line.startswith("| ---:")]
    assert len(tables) > 8
    for at in tables:
        width = lines[at].count("|")
        assert lines[at - 1].replace("\\|", "").count("|") == lines[at + 1].replace("\\|", "").count("|") == width
