"""Small results of every kind for the tests of the report page. The classes that write real results make them."""

from __future__ import annotations

import copy
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import attrs
from test_matrix_files import small
from test_report import REPORT

from posexport.bench.result import Benchmark, Change, Gate, Shape, Timing
from posexport.bench.statistics import Ratio, Summary
from posexport.bench.tune.result import Cost, Result, Row
from posexport.bench.tune.space import Program
from posexport.jsondata import unstructure
from posexport.report.page.page import make_page, to_html
from posexport.report.plots.panels import Absent, Chart, Line, Mark

DOCS = Path(__file__).parents[2] / "docs"


def summary(median: float) -> Summary:
    return Summary(median=median, p10=0.9 * median, p90=1.2 * median, p99=1.5 * median, count=60)


def ratio(median: float) -> Ratio:
    return Ratio(median=median, low=0.95 * median, high=1.05 * median, confidence=0.95)


def timed(runtime: str, seconds: float, torch: float, floor: float) -> Timing:
    return Timing(
        runtime=runtime, state="timed", seconds=summary(seconds), memory=50_000_000, load_seconds=0.2,
        ratios={"torch": ratio(seconds / torch), "lower_bound": ratio(seconds / floor)},
    )  # fmt: skip


def shape(scenario: str | None, seq: int, best: float = 0.006) -> Shape:
    times = {"lower_bound": 0.005, "torch": 0.01, "ort-cpu": best}
    rows = [timed(name, seconds * seq / 128, 0.01 * seq / 128, 0.005 * seq / 128) for name, seconds in times.items()]
    rows.append(Timing(runtime="ort-cuda", state="not run", reason="no GPU: there is no NVIDIA driver"))
    return Shape(scenario=scenario, batch=1, seq=seq, rounds=20, results=tuple(rows))


def bench(form: str = "native", shapes: tuple[Shape, ...] = (), **over: Any) -> dict[str, Any]:
    """A benchmark with the given shapes, or with one prefill of 128."""
    fields = {
        "file": f"rope-{form}.onnx", "sha256": f"{form:0<64}", "encoding": "rope", "form": form, "opset": 23,
        "dtype": "fp32", "spec": {"hidden_size": 64, "layers": 1}, "rounds": 20, "burst": 3, "processes": 5, "seed": 0,
        "machine_load": 0.01, "machine": {"cpu": "a processor", "cores": 2, "turbo": True, "gpu": None},
        "threads": None, "cuda_graph": False,
        "shapes": shapes or (shape("prefill:128", 128),), **over,
    }  # fmt: skip
    return Benchmark(**fields).to_dict()


def gate(state: str, change: float | None = 1.12) -> dict[str, Any]:
    """The data that `--baseline` adds to a benchmark."""
    row = Change(
        runtime="ort-cpu", shape="prefill:128", state=state, reference="lower_bound", before=1.2, now=1.35,
        change=change,
        low=None if change is None else change - 0.03, high=None if change is None else change + 0.03,
        reason="" if change else "too few processes",
    )  # fmt: skip
    made = Gate(limit=0.05, confidence=0.99, changes=(row,), notes=("The machines differ.",))
    data: dict[str, Any] = unstructure(made)
    return data


def tune() -> dict[str, Any]:
    programs = [Program(form=form, dtype="fp32", opset=23) for form in ("native", "contrib", "decomposed", "function")]
    won, raced, dropped, refused = (Row.of(program, {}) for program in programs)
    rows = (
        attrs.evolve(won, state="won", reason="the fastest", reason_code="fastest", rounds=20,
                     seconds=summary(0.006), ratio=ratio(1.0), size=9000, verified="ort-cpu"),
        attrs.evolve(raced, state="raced", rounds=20, seconds=summary(0.007), ratio=ratio(1.16)),
        attrs.evolve(dropped, state="dropped", reason="1.9x of native", reason_code="slower", rounds=5,
                     seconds=summary(0.012)),
        attrs.evolve(refused, state="refused", reason="the form has no cache", reason_code="unsupported"),
    )  # fmt: skip
    return Result(
        encoding="rope", target="ort-cpu", scenario="prefill:128", objective="latency", method="raced on the runtime",
        winner=attrs.evolve(rows[0], file="tuned.onnx", sha256="7" * 64), candidates=rows,
        cost=Cost(seconds=12.0, timed_runs=45, everything_runs=120, known_before=0), machine_load=0.0,
        machine={"cpu": "a processor"},
    ).to_dict()  # fmt: skip


def plot() -> dict[str, Any]:
    chart = Chart(
        title="rope", note="largest error", x="position", y="absolute error", scales=(1.0, 1e-8),
        lines=(
            Line(label="parity, torch", x=(0, 10, 1000), y=(0.0, 1e-6, 1e-3), look=(0, 0), angles="parity"),
            Line(label="exact, torch", x=(0, 10, 1000), y=(0.0, math.nan, 1e-7), look=(0, 1), angles="exact"),
        ),
        marks=(Mark(label="what exact promises", at=2.5e-7, end="right"),),
        absent=(Absent(name="ort-cuda", reason="no GPU: there is none", failed=False),),
    )  # fmt: skip
    return {"file": "rope.png", "rows": [[chart.to_dict()]]}


def angles() -> dict[str, Any]:
    data = json.loads((DOCS / "results" / "angles.json").read_bytes())
    return {**data, "rows": [row for row in data["rows"] if row["encoding"] == "rope"]}


def everything() -> dict[str, dict[str, Any]]:
    """One file of each kind, by name."""
    return copy.deepcopy(
        {
            "verify": REPORT.to_dict(),
            "bench": bench(shapes=tuple(shape(f"prefill:{seq}", seq) for seq in (16, 128, 1024))),
            "bench-contrib": {**bench("contrib", (shape("prefill:128", 128, 0.008),)), "gate": gate("slower")},
            "tune": tune(),
            "matrix": small().to_dict(),
            "angles": angles(),
            "plot": plot(),
        }
    )


def write_all(folder: Path, files: dict[str, Any]) -> list[Path]:
    """Write the data as JSON files `<name>.json`."""
    paths = [folder / f"{name}.json" for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_text(json.dumps(data), encoding="utf-8")
    return paths


def html_of(folder: Path, files: dict[str, Any]) -> str:
    """The page of these results."""
    return to_html(make_page(write_all(folder, files)))


VOID = {"meta", "link", "br", "img", "input", "hr"}


class Reader(HTMLParser):
    """The page as a list of elements (tag, attributes) and the text in each. Unbalanced tags are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((tuple(self.open), " ".join(data.split())))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of every element with a tag."""
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, *tags: str) -> str:
        """The text inside elements with these tags. Without tags, all text except styles and scripts."""
        return " ".join(
            text for path, text in self.texts
            if (set(tags) & set(path) if tags else not {"style", "script"} & set(path))
        )  # fmt: skip
