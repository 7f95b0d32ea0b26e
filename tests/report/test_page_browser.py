"""The report page in a real browser: no console messages, no requests, it fits every screen, in light and dark mode and
on paper.

Each check has a page with a planted fault that it must catch. `scripts/environment.sh` installs a Chromium. Without
one, these tests do not run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_helpers import everything, html_of

from posexport.report.page.page import FOLDER

sync = pytest.importorskip("playwright.sync_api", reason="not run: playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name, path=PATH))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"not run: no Chromium (looked for {', '.join(NAMES)})")

WIDTHS = {"phone": 375, "desk": 1280}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync.sync_playwright() as play:
        one = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return html_of(tmp_path_factory.mktemp("page"), everything())


class Visit:
    """An opened page: messages of the console (`said`), requests (`asked`), and the page itself."""

    def __init__(self, browser: Any, folder: Path, text: str, width: int = 1280, **context: Any) -> None:
        path = folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.context = browser.new_context(viewport={"width": width, "height": 800}, **context)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ask(self, script: str) -> Any:
        """The result of a script on the page."""
        return self.page.evaluate(script)

    def faults(self) -> list[str]:
        """Messages, requests, and an overflow of the page's width. None of them may occur."""
        others = [url for url in self.asked[1:] if not url.startswith("data:")]
        wide = self.ask(OVERFLOW)
        return [*self.said, *others, *([f"{wide} pixels too wide"] if wide > 0 else [])]


OPEN = "for (const each of document.querySelectorAll('details')) each.open = true"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_quiet_asks_for_nothing_and_fits(browser: Any, page: str, tmp_path: Path, width: str) -> None:
    with Visit(browser, tmp_path, page, WIDTHS[width]) as visit:
        assert visit.faults() == []
        visit.ask(OPEN)
        assert visit.faults() == []
        boxes = visit.ask("[...document.querySelectorAll('.box')].map(each => each.getBoundingClientRect().x)")
        assert (len(set(boxes)) == 1) == (width == "phone")


PLANTS = {
    "console": ("<script>console.error('broken')</script>", "broken"),
    "script": ("<script>nothing.at.all()</script>", "nothing is not defined"),
    "request": ('<img src="https://example.invalid/a.png" alt="">', "example.invalid"),
    "overflow": ('<div style="width: 2000px">x</div>', "pixels too wide"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_caught(browser: Any, page: str, tmp_path: Path, plant: str) -> None:
    text, said = PLANTS[plant]
    with Visit(browser, tmp_path, page.replace("</main>", f"{text}</main>")) as visit:
        visit.page.wait_for_timeout(50)
        assert any(said in fault for fault in visit.faults()), visit.faults()


@pytest.mark.slow
def test_the_page_follows_the_reader_s_colours_and_the_button_turns_them(
    browser: Any, page: str, tmp_path: Path
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        with Visit(browser, tmp_path, page, color_scheme=scheme) as visit:
            seen[scheme] = visit.ask(ground)
            visit.page.click("#theme")
            seen[f"{scheme} turned"] = visit.ask(ground)
            assert visit.faults() == []
    css = FOLDER.joinpath("page.css").read_text(encoding="utf-8")
    light, dark = re.findall("#[0-9a-f]{6}", css[css.index("--page") :])[:2]
    rgb = [f"rgb({', '.join(str(int(each[at : at + 2], 16)) for at in (1, 3, 5))})" for each in (light, dark)]
    assert seen == {"light": rgb[0], "light turned": rgb[1], "dark": rgb[1], "dark turned": rgb[0]}


@pytest.mark.slow
def test_a_table_sorts_by_its_numbers_both_ways(browser: Any, page: str, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, page) as visit:
        visit.ask(OPEN)
        table = visit.page.locator("table", has=visit.page.locator("caption", has_text="Every timing"))
        column = "rows => rows.map(row => row.cells[3].dataset.v === undefined ? null : Number(row.cells[3].dataset.v))"
        for order in (1, -1):
            table.locator("thead button", has_text="median").click()
            numbers = table.locator("tbody tr").evaluate_all(column)
            known = [number for number in numbers if number is not None]
            assert known == sorted(known, reverse=order < 0) and len(set(known)) > 3
            assert numbers[len(known) :] == [None] * (len(numbers) - len(known)), "what has no number comes last"
        assert visit.faults() == []


@pytest.mark.slow
def test_the_page_is_whole_without_its_script(browser: Any, page: str, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, page, java_script_enabled=False) as visit:
        assert not visit.page.is_visible("#theme")
        assert visit.page.locator(".box").count() == 3
        assert visit.page.locator("svg.chart").count() >= 6
        assert visit.faults() == []


CUT = """[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth + 1)
    .map(each => each.ariaLabel)"""
HIDDEN = "[...document.querySelectorAll('details table')].filter(each => !each.checkVisibility()).length"


def test_it_prints_whole_open_and_light(browser: Any, page: str, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, page, 718, color_scheme="dark") as visit:
        assert visit.ask(HIDDEN) > 0
        written = visit.page.pdf(format="A4")
        assert written.startswith(b"%PDF-") and len(written) > 20_000
        visit.page.emulate_media(media="print")
        visit.ask("dispatchEvent(new Event('beforeprint'))")
        assert (visit.ask(HIDDEN), visit.ask(CUT), visit.ask(OVERFLOW)) == (0, [], 0)
        assert visit.ask("getComputedStyle(document.querySelector('.box')).backgroundColor") == "rgb(255, 255, 255)"
        assert not visit.page.is_visible("#theme")
        visit.ask("dispatchEvent(new Event('afterprint'))")
        visit.page.emulate_media(media="screen")
        assert visit.ask(HIDDEN) > 0, "what was closed is closed again"
    with Visit(browser, tmp_path, page.replace("</main>", _WIDE), 718) as visit:
        visit.page.emulate_media(media="print")
        assert visit.ask(CUT) == ["cut"]


_WIDE = '<div class="scroll" aria-label="cut"><div style="width: 3000px">x</div></div></main>'


@pytest.mark.slow
def test_keys_reach_the_skip_link_the_tables_and_the_button(browser: Any, page: str, tmp_path: Path) -> None:
    with Visit(browser, tmp_path, page) as visit:
        seen = []
        for _ in range(12):
            visit.page.keyboard.press("Tab")
            seen.append(visit.ask("[document.activeElement.tagName, document.activeElement.className].join('.')"))
        assert seen[0] == "A.skip" and seen[1].startswith("BUTTON")
        assert any(name.startswith("SUMMARY") for name in seen)
        assert visit.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
