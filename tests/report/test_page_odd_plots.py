"""Odd plot results: for any numbers and texts, `posexport report` draws them or refuses them in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from page_helpers import Reader

from posexport.report.page.charts import draw_lines
from posexport.report.plots.panels import Chart, Line, Mark
from posexport.report.text import plain_number

BROKEN = r"$\frac$ and $x$"


def chart(**fields: Any) -> dict[str, Any]:
    line = {"label": "a", "x": [1, 2, 3], "y": [0, 0, 0]}
    return {"kind": "chart", "title": "t", "note": "n", "x": "x", "y": "y", "lines": [line], **fields}


def lines(*labels: str) -> list[dict[str, Any]]:
    return [{"label": label, "x": [1, 2], "y": [1, 2]} for label in labels]


def line(*y: float | None) -> list[dict[str, Any]]:
    return [{"label": "a", "x": list(range(len(y))), "y": y}]


def reported(folder: Path, panel: dict[str, Any], *said: str) -> str:
    """The page of a result with this panel, made without output on stderr. Or "" if the result was refused in one
    sentence that contains `said`."""
    file, page = folder / "r.json", folder / "r.html"
    file.write_text(json.dumps({"file": "f.png", "rows": [[panel]]}))
    page.unlink(missing_ok=True)
    result = cli("report", file, "-o", page)
    if said or result.exit_code:
        refused(result, str(file), *said)
        assert not page.exists()
        return ""
    assert result.stderr == ""
    text = page.read_text(encoding="utf-8")
    assert len(Reader(text).all("svg")) == 1
    return text


FROM_ZERO = [1, 1e-8]

DRAWN: dict[str, dict[str, Any]] = {
    "no value above 0": {"scales": FROM_ZERO},
    "values below 0": {"scales": FROM_ZERO, "lines": line(-1, -2, -3)},
    "no value": {"scales": FROM_ZERO, "lines": line(None, None)},
    "no point": {"scales": FROM_ZERO, "lines": line()},
    "no line": {"scales": FROM_ZERO, "lines": []},
    "no line side by side": {"lines": [], "together": True},
    "a large scale": {"scales": [2**64 - 1, 10**18]},
    "no logarithm": {"scales": ["log", "log"], "lines": line(-1, 0)},
    "a mark without a logarithm": {"scales": ["log", "log"], "marks": [{"label": "m", "at": -1, "end": "left"}]},
    "next to 0": {"scales": ["log", "log"], "lines": line(0, 5e-324)},
    "huge": {"lines": line(9e99, -9e99)},
    "colours without end": {"lines": [{**lines("a")[0], "look": [look, look]} for look in (2**63, 0, -(2**63))],
                            "together": True},
    "mathematics": {"title": BROKEN, "note": BROKEN, "x": BROKEN, "y": BROKEN, "lines": lines(BROKEN, BROKEN),
                    "marks": [{"label": BROKEN, "at": 1, "end": "right"}]},
    "letters that the font lacks": {"x": "日本", "lines": lines("日本", "😀")},
    "long texts": dict.fromkeys(("title", "note", "x", "y"), "a" * 300_000),
    "a long label": {"lines": lines("a" * 300_000, "b"), "marks": [{"label": "m\n" * 9999, "at": 1, "end": "left"}]},
    "no label": {"lines": lines("", "")},
    "labels that matplotlib hides": {"lines": lines("_x", "_nolegend_")},
    "control characters": {"title": "\x00", "note": "\ud800", "x": "\x1b[31m", "y": "\u202e", "lines": lines("\ufffe")},
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fields", DRAWN.values(), ids=DRAWN)
def test_an_odd_plot_is_drawn(fields: dict[str, Any], tmp_path: Path) -> None:
    assert reported(tmp_path, chart(**fields))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scales": [1e-320, 1]}, "[0] scales has 1e-320, not linear, log or a number from 1e-30 to 1e30"),
    ({"scales": [1, 1e99]}, "[0] scales has 1e+99, not linear, log or"),
    ({"scales": ["l" * 9999, 1]}, "not linear, log or"),
    ({"marks": [{"label": "m", "at": 1, "end": "../x"}]}, "[0].marks[0].end is '../x', not one of left, right"),
    ({"marks": [{"label": "m", "at": 1e300, "end": "left"}]}, "[0].marks[0].at is 1e+300, not a finite number"),
    ({"lines": line(1, float("nan"))}, "[0].lines[0].y[1] is NaN, not a finite number"),
    ({"lines": [{"label": "a", "x": [1], "y": []}]}, "[0].lines[0] ('a') has not one number for each x"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_plot_that_can_not_be_drawn_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert not reported(tmp_path, chart(**fields), said)


def test_every_text_is_drawn_as_it_was_given() -> None:
    made = [Line(label=label, x=(1, 2), y=(1, 2)) for label in (BROKEN, "_x", "b")]
    marks = (Mark(label="_m $1$", at=1, end="left"),)
    svg = draw_lines(Chart(title="t", note="n", x="$a$", y="$b$", lines=tuple(made), marks=marks), plain_number)
    drawn = Reader(svg).text("text").split(" ")
    for text in (BROKEN, "_x", "b", "_m $1$", "$a$", "$b$"):
        assert set(text.split()) <= set(drawn), (text, drawn)


NUMBERS = (
    st.floats(-1e99, 1e99)
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.sampled_from([0, 1, 1e-8, 5e-324, 1e-99, 9e99, 1e300])
)
SCALES = st.sampled_from(["linear", "log", 1, 1e-8, 1e-30, 1e30, 1e-320])
TEXTS = st.text(max_size=9) | st.sampled_from(
    ["_", "$", BROKEN, r"\$a$", "日本", "a" * 999, "\n\n", "\x00\ud800", "<&"]
)


@st.composite
def odd_lines(draw: st.DrawFn) -> dict[str, Any]:
    points = draw(st.lists(st.tuples(NUMBERS, st.none() | NUMBERS), max_size=4))
    made: dict[str, Any] = {"label": draw(TEXTS), "x": [x for x, _ in points], "y": [y for _, y in points]}
    return made | draw(st.fixed_dictionaries({}, optional={"look": st.tuples(*[st.integers(-(2**63), 2**63)] * 2)}))


MARKS = st.fixed_dictionaries({"label": TEXTS, "at": NUMBERS, "end": st.sampled_from(["left", "right"])})
CHARTS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("title", "note", "x", "y"), TEXTS),
        **dict.fromkeys(("dots", "rising", "together"), st.booleans()),
        "lines": st.lists(odd_lines(), max_size=3),
        "scales": st.tuples(SCALES, SCALES),
        "marks": st.lists(MARKS, max_size=2),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_any_plot_is_drawn_or_refused_in_a_sentence(examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=examples)
    @given(fields=CHARTS)
    def drawn_or_refused(fields: dict[str, Any]) -> None:
        reported(tmp_path_factory.mktemp("plot"), chart(**fields))

    drawn_or_refused()
