"""The page and picture of `posexport matrix`, made from data only, and docs/results/matrix, which must be current."""

from __future__ import annotations

import json
import platform
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import cli

from posexport.report import matrix_picture
from posexport.report.matrix_markdown import to_markdown
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import DTYPES
from posexport.verify.matrix import run
from posexport.verify.matrix.schedule import Column, Selection, columns_here, settle
from posexport.verify.matrix.table import BUILD, COLUMNS, Cell, Entry, Matrix, idle, judged, read, summary, totals
from posexport.verify.parity import TOLERANCES

pytestmark = pytest.mark.few_inputs

DOCS = Path(__file__).parents[2] / "docs" / "results" / "matrix"
SAMPLE = {"encoding": ("t5",), "form": ("native", "contrib"), "dtype": ("fp16",), "mode": ("prefill",)}
"""The cells that are measured again on `SAMPLED`, to check that docs/results/matrix is current."""

SAMPLED = ("ort-cpu", "tensorrt-import", BUILD)
ROPE = Entry(encoding="rope", form="function", dtype="fp32", mode="prefill")


def small() -> Matrix:
    """A matrix with every state and both kinds of plan."""
    half = attrs.evolve(ROPE, dtype="fp16")
    shared = attrs.evolve(ROPE, form="contrib", mode="decode-shared")
    matrix = Matrix()
    matrix.put(
        [
            Cell(entry=ROPE, column="torch", state="passed", error=4e-7, eager=4e-7, ratio=1.0, version="2.13"),
            Cell(entry=ROPE, column="ort-cpu", state="passed", error=5e-7, eager=2e-7, ratio=2.5, version="1.31"),
            Cell(entry=half, column="ort-cpu", state="failed", reason="off <by> a | lot\n and more", version="1.31"),
            Cell(entry=ROPE, column=BUILD, state="passed", kernels=11, fused=False, version="tensorrt-rtx 1.7"),
            Cell(entry=half, column=BUILD, state="passed", kernels=6, fused=True, version="tensorrt-rtx 1.7"),
            Cell(entry=shared, column="ort-cpu", state="refused", reason="it has none"),
            Cell(entry=ROPE, column="ort-cuda", state="not run", reason="no GPU: there is none"),
        ]
    )
    return matrix


def test_the_page_says_every_cell() -> None:
    page = to_markdown(small())
    assert "2 passed" not in page and "4 passed, 1 failed, 1 refused, 1 not run" in page
    lines = page.splitlines()
    assert "| encoding | form | dtype | torch | ort-cpu | build |" in lines
    assert "| rope | function | fp32 | ✓ 4.0e-07 / 4.0e-07 | ✓ 5.0e-07 / 2.0e-07 | ✓ 11 |" in lines
    assert "| rope | function | fp16 |  | ✗ failed [1] | ✓ 6, fused |" in lines
    assert "| rope | contrib | fp32 |  | – refused [2] |  |" in lines
    assert "1. off &lt;by&gt; a | lot and more" in lines
    assert "2. it has none" in lines
    assert "- ort-cuda: no GPU: there is none" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in tables}) == 1


def test_the_summary_counts_each_state_apart() -> None:
    cells = small().ordered()
    assert summary(cells) == "4 passed, 1 failed, 1 refused, 1 not run"
    assert judged(cells) == ["torch", "ort-cpu", BUILD]
    assert idle(cells) == {"ort-cuda": "no GPU: there is none"}
    assert totals(cells) == [
        ("torch", "1", "0", "0", "0", "1x", "-"),
        ("ort-cpu", "1", "1", "1", "0", "2.5x", "-"),
        (BUILD, "2", "0", "0", "0", "-", "1 of 2"),
    ]


def pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return (imread(path)[..., :3] * 255).round().astype(int)


def area(path: Path, colour: str) -> int:
    """The number of pixels with that colour."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((pixels(path) == wanted).all(-1).sum())


STATES = {
    "failed": {"state": "failed", "reason": "off"},
    "refused": {"state": "refused", "reason": "no such operator"},
    "not run": {"state": "not run", "reason": "no bf16"},
}


@pytest.mark.parametrize("state", STATES)
def test_the_picture_shows_each_state_in_its_colour(state: str, tmp_path: Path) -> None:
    matrix, places = small(), (ROPE, "ort-cpu")
    matrix.put([attrs.evolve(matrix.cells[attrs.evolve(ROPE, dtype="fp16"), "ort-cpu"], state="passed", ratio=1.0)])
    (tmp_path / "before.png").write_bytes(matrix_picture.draw(matrix))
    matrix.put([attrs.evolve(matrix.cells[places], ratio=None, **STATES[state])])
    (tmp_path / "after.png").write_bytes(matrix_picture.draw(matrix))
    colour = matrix_picture.FILL[state]
    cell = 0.8 * 200**2 * 0.172 * 0.165
    assert area(tmp_path / "after.png", colour) - area(tmp_path / "before.png", colour) > 0.8 * cell


def test_the_picture_shades_errors_and_marks_fused_plans(tmp_path: Path) -> None:
    matrix = small()
    looks = [matrix_picture.look(attrs.evolve(matrix.cells[ROPE, "ort-cpu"], ratio=r)) for r in (0.5, 1.0, 3.0, 40.0)]
    assert [text for _, _, text in looks] == ["0.5", "1.0", "3.0", "40"]
    light = [sum(fill) for fill, _, _ in looks]
    assert light == sorted(light, reverse=True) and len(set(light)) == 4
    (tmp_path / "fused.png").write_bytes(matrix_picture.draw(matrix))
    half = attrs.evolve(ROPE, dtype="fp16")
    matrix.put([attrs.evolve(matrix.cells[half, BUILD], fused=False)])
    (tmp_path / "unfused.png").write_bytes(matrix_picture.draw(matrix))
    green = matrix_picture.FILL["fused"]
    assert area(tmp_path / "fused.png", green) > 1.5 * area(tmp_path / "unfused.png", green) > 0


def test_the_picture_names_its_axes_and_what_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    said: list[str] = []
    write = Axes.text

    def text(axes: Axes, x: float, y: float, s: str, **style: Any) -> Any:
        said.append(s)
        return write(axes, x, y, s, **style)

    monkeypatch.setattr(Axes, "text", text)
    (tmp_path / "a.png").write_bytes(matrix_picture.draw(small()))
    assert {"rope", "function", "contrib", "prefill", "decode-shared", "fp32", "fp16", "ort-\ncpu"} <= set(said)
    assert "Not run at all: ort-cuda" in said
    assert "torch" not in said, "it is the measure"
    failed = small()
    failed.put([attrs.evolve(failed.cells[ROPE, "torch"], state="failed", reason="off")])
    (tmp_path / "a.png").write_bytes(matrix_picture.draw(failed))
    assert "torch" in said


def test_page_and_picture_are_made_of_the_file_alone(tmp_path: Path) -> None:
    small().write(tmp_path / "matrix.json")
    code = (
        "import sys; from pathlib import Path; from posexport.verify.matrix.table import read\n"
        "from posexport.report.matrix_picture import draw; from posexport.report.matrix_markdown import to_markdown\n"
        "matrix = read(Path('matrix.json')); Path('a.png').write_bytes(draw(matrix)); assert to_markdown(matrix)\n"
        "assert not {'torch', 'onnx', 'onnxruntime', 'tensorrt_rtx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    (tmp_path / "b.png").write_bytes(matrix_picture.draw(small()))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_without_a_picture_an_old_one_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    everywhere = dict.fromkeys(COLUMNS, Column(missing="no GPU: there is none"))
    monkeypatch.setattr("posexport.verify.matrix.schedule.columns_here", lambda: everywhere)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "matrix.png").write_bytes(b"of other numbers")
    result = cli("matrix", "--encoding", "t5", "-o", tmp_path / "out", "--no-picture")
    assert result.exit_code == 0, result.output  # refusals need no runtime
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["matrix.json", "matrix.md"]


# docs/results/matrix


@pytest.fixture(scope="module")
def docs() -> Matrix:
    return read(DOCS / "matrix.json")


def chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += 12 + length


def carried(png: bytes) -> str:
    """The digest in a picture, read from its PNG chunks."""
    texts = dict(data.split(b"\0", 1) for kind, data in chunks(png) if kind == b"tEXt")
    return texts[b"Source"].decode()


def test_the_files_of_docs_are_of_one_matrix(docs: Matrix) -> None:
    assert (DOCS / "matrix.json").read_bytes() == docs.to_bytes()
    assert (DOCS / "matrix.md").read_text(encoding="utf-8") == to_markdown(docs)
    assert carried((DOCS / "matrix.png").read_bytes()) == matrix_picture.digest(docs)
    docs_later = Matrix(cells=dict(list(docs.cells.items())[1:]))
    assert matrix_picture.digest(docs_later) != matrix_picture.digest(docs)


def test_docs_hold_every_cell_and_none_failed_or_unexplained(docs: Matrix) -> None:
    assert list(docs.cells) == Selection().cells(), "run posexport matrix -o docs/results/matrix"
    for cell in docs.cells.values():
        assert cell.state != "failed", (cell.entry.name, cell.column, cell.reason)
        assert (cell.reason is None) == (cell.state == "passed"), cell
        assert cell.reason is None or re.match(r"\w.{15,}", cell.reason), cell
        if cell.state == "passed" and cell.column == BUILD:
            assert cell.kernels is not None and cell.fused is not None, cell
        elif cell.state == "passed":
            assert cell.error is not None and cell.eager is not None and cell.cases, cell


def test_docs_measured_on_every_runtime_that_needs_no_gpu(docs: Matrix) -> None:
    free = [name for name, row in RUNTIMES.items() if not row.needs_gpu]
    assert {*free, BUILD} <= set(judged(docs.cells.values()))


def test_errors_in_docs_are_within_what_parity_allows(docs: Matrix) -> None:
    floors = {dtype: TOLERANCES[dtype].floor for dtype in DTYPES}
    for cell in docs.cells.values():
        if cell.error is not None and cell.eager is not None:
            limit = TOLERANCES[cell.entry.dtype].multiple * cell.eager + 30 * floors[cell.entry.dtype]
            assert cell.error <= 1.1 * limit, cell


def test_refusals_in_docs_are_those_of_today(docs: Matrix) -> None:
    today, _ = settle(None, Selection(), dict.fromkeys(COLUMNS, Column(version="1")), docs.target)
    assert today.cells == {key: cell for key, cell in docs.cells.items() if cell.state == "refused"}


@pytest.mark.slow
def test_a_sample_of_docs_is_what_is_measured_now_and_a_second_run_measures_nothing(
    docs: Matrix, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {name: column for name, column in columns_here().items() if name in SAMPLED and column.missing is None}
    out = tmp_path / "out"
    asked: list[str | Path] = ["matrix", "-o", out]
    for option, names in {**SAMPLE, "runtime": tuple(here)}.items():
        for name in names:
            asked += [f"--{option}", name]
    first = cli(*asked, "--json")
    assert first.exit_code == 0, first.output
    (cpu,) = json.loads(first.stdout)["cpus"]
    assert cpu["architecture"] == platform.machine() and set(cpu) >= {"cpu", "vendor", "cores", "instruction_sets"}
    assert json.loads(first.stdout) == json.loads((out / "matrix.json").read_bytes())
    found = read(out / "matrix.json")
    assert len(found.cells) == 2 * len(here) > 0
    for key, cell in found.cells.items():
        stated = docs.cells[key]
        assert (cell.state, cell.reason, cell.spec) == (stated.state, stated.reason, stated.spec), key
        if cell.version == stated.version:
            assert (cell.kernels, cell.fused) == (stated.kernels, stated.fused), key
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(written) == {"matrix.json", "matrix.md", "matrix.png"}
    assert not [line for line in written["matrix.json"].decode().splitlines() if str(tmp_path) in line]
    monkeypatch.setattr(run, "WORKER", "no.such.module")
    assert cli(*asked).exit_code == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == written
    others = {name: attrs.evolve(column, version="9") for name, column in columns_here().items()}
    monkeypatch.setattr("posexport.verify.matrix.schedule.columns_here", lambda: others)
    again = cli(*asked)
    assert again.exit_code == 1, "the child that isn't there was asked"
    assert "No module named" in again.stdout
    assert zlib.crc32(written["matrix.png"]) != zlib.crc32((out / "matrix.png").read_bytes())
