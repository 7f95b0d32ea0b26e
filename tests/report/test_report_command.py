"""`posexport report` as users call it, and its boxes for small results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused, small_spec, tree
from manifest_data import plan_manifest, write_manifest_data
from page_helpers import Reader, bench, everything, gate, html_of, shape, tune, write_all
from test_matrix_files import small
from verify_helpers import write

from posexport.report.page.artifacts import OPERATOR_MARKS
from posexport.report.page.blocks import Chain, Figure, Prose, Table, cells, number
from posexport.report.page.charts import Bar, Bars, draw_bars
from posexport.report.page.page import make_page
from posexport.report.text import plain_number, seconds, times

pytestmark = pytest.mark.few_inputs


def box(folder: Path, files: dict[str, Any], name: str) -> dict[str, Any]:
    """One of the boxes that `--json` prints."""
    result = cli("report", *write_all(folder, files), "-o", folder / "r.html", "--json")
    assert result.exit_code == 0, result.output
    return next(each for each in json.loads(result.stdout)["boxes"] if each["id"] == name)


def test_the_command_writes_both_and_says_what_stands_on_top(tmp_path: Path) -> None:
    paths = write_all(tmp_path, everything())
    result = cli("report", *paths, "-o", tmp_path / "r.html", "--markdown", tmp_path / "r.md", "--title", "Nightly")
    assert result.exit_code == 0, result.output
    assert "What is fastest" in result.stdout and "1 got slower" in result.stdout
    for size in (16, 128, 1024):  # each comparison, not only the first
        assert f"                  rope, hidden 64, prefill:{size} (" in result.stdout, result.stdout
    assert "a.onnx: Add 'n'; one file, on ort-cpu; it is wrong\n" in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 185
    assert "<h1>Nightly</h1>" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert (tmp_path / "r.md").read_text(encoding="utf-8").startswith("## Nightly\n")
    assert len(tree(tmp_path)) == len(paths) + 2


def test_the_fastest_is_told_with_its_ratios_and_never_the_floor(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(), "b": bench("contrib", (shape("prefill:128", 128, 0.008),))}, "fastest")
    (point,) = found["points"]
    assert point["label"] == "rope, hidden 64, prefill:128 (128 tokens at once)"
    assert (point["head"], point["figure"]) == ("ort-cpu · native", "6.00 ms")
    assert point["text"] == (
        "clearly the fastest; ⚠ not verified on ort-cpu here; 0.60× of torch eager (0.57 to 0.63); "
        "1.20× of the lower bound (1.14 to 1.26); next ort-cpu · contrib "
        "(0.80× of torch eager, 0.76 to 0.84, in its own run)"
    )


def test_a_tie_is_told_with_its_time(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(), "b": bench("contrib", (shape("prefill:128", 128, 0.0062),))}, "fastest")
    assert found["points"][0]["text"].startswith(
        "too close to call against ort-cpu · contrib (0.62× of torch eager, 0.59 to 0.65, in its own run); "
    )


def test_a_peer_that_wins_is_said_to_win(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(shapes=(shape(None, 128, 0.02),))}, "fastest")
    assert found["points"][0]["head"] == "torch eager"
    assert found["points"][0]["label"] == "rope, hidden 64, batch 1, seq 128 (128 tokens at once)"


@pytest.mark.parametrize(("kind", "data"), [("latency", bench()), ("tune", tune())], ids=["bench", "tune"])
def test_a_busy_machine_is_told_before_its_times(kind: str, data: dict[str, Any], tmp_path: Path) -> None:
    assert len(box(tmp_path, {"a": {**data, "machine_load": 0.2}}, "fastest")["points"]) == 1
    care, point = box(tmp_path, {"a": {**data, "machine_load": 0.21}}, "fastest")["points"]
    said = "⚠ Other work took 21% of the CPU: ratios hold roughly, absolute times don't; time again at rest"
    assert (care["label"], care["head"], care["text"]) == ("", said, "in a.json")
    assert point["text"].startswith("likely the fastest; ")
    assert point["label"].startswith(("⚠ rope, hidden 64", "⚠ tuned rope"))
    section = next(each for each in make_page([tmp_path / "a.json"]).sections if each.id == kind)
    first, *blocks = section.blocks
    assert isinstance(first, Prose) and (first.tone, first.text, first.note) == ("care", f"{said}.", "(in a.json)")
    second = next(each for each in blocks if isinstance(each, Figure | Table))
    assert (second.title if isinstance(second, Figure) else second.caption).startswith("⚠ busy machine: rope")


@pytest.mark.parametrize(
    ("state", "change", "where", "said"),
    [
        ("slower", 1.12, "wrong", "12.0% slower (+9.0% to +15.0%) than before, limit 5%"),
        ("inconclusive", None, "fastest", "inconclusive whether it got slower than before: too few processes"),
        ("not run", None, "not-run", "too few processes (bench and gate)"),
    ],
)
def test_the_gate_goes_where_it_belongs(
    state: str, change: float | None, where: str, said: str, tmp_path: Path
) -> None:
    files = {"a": {**bench(), "gate": gate(state, change)}}
    texts = [point["text"] for point in box(tmp_path, files, where)["points"]]
    assert said.replace("bench and gate", "gate") in texts
    if state != "slower":
        assert box(tmp_path, files, "wrong")["points"] == []


def test_a_fine_gate_is_nowhere_but_in_its_table(tmp_path: Path) -> None:
    files = {"a": {**bench(), "gate": gate("fine", 1.01)}}
    assert "1.0% slower (-2.0% to +4.0%)" in Reader(html_of(tmp_path, files)).text("td")
    assert box(tmp_path, files, "wrong")["points"] == []
    assert len(box(tmp_path, files, "fastest")["points"]) == 1


def test_failures_stand_with_their_artifact_and_reason(tmp_path: Path) -> None:
    found = box(tmp_path, {"v": everything()["verify"], "m": small().to_dict()}, "wrong")
    said = [(point["label"], point["head"], point["text"]) for point in found["points"]]
    assert ("a.onnx", "Add 'n'", "one file, on ort-cpu; it is wrong") in said
    assert ("unreadable", "b.onnx", "'b.onnx' is not an ONNX file.") in said
    assert ("rope function fp16 prefill", "ort-cpu", "off <by> a | lot\n and more") in said
    assert found["verdict"] == "3 results failed; 8 checks ran."
    absent = box(tmp_path, {"m": small().to_dict()}, "not-run")["points"]
    assert ("Refused", "rope", "it has none (matrix)") in [
        (point["label"], point["head"], point["text"]) for point in absent
    ]


def test_nothing_wrong_is_said_only_of_what_ran(tmp_path: Path) -> None:
    assert box(tmp_path, {"a": bench()}, "wrong")["verdict"] == (
        "Nothing was checked here, so nothing is known to be wrong."
    )
    verify = everything()["verify"]
    verify["verdicts"], verify["unreadable"] = verify["verdicts"][:1], []
    assert box(tmp_path, {"v": verify}, "wrong")["verdict"] == "Nothing: the one check that ran passed."


def test_what_was_not_run_is_counted_by_reason(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(), "v": everything()["verify"]}, "not-run")
    assert found["verdict"].startswith("4 results missing")
    assert [(point["head"], point["text"]) for point in found["points"]] == [
        ("ort-cuda and tensorrt", "no GPU: there is no NVIDIA driver (bench and verify)"),
        ("rope-native.onnx", "no verdict on this page"),
        ("a.onnx", "no timing on this page"),
    ]


def test_tune_tells_the_winner_and_why_the_others_stopped(tmp_path: Path) -> None:
    point = box(tmp_path, {"t": tune()}, "fastest")["points"][0]
    assert (point["head"], point["figure"]) == ("native · fp32 · opset 23", "6.00 ms")
    text = Reader(html_of(tmp_path, {"t": tune()})).text()
    for said in ("★ won", "raced", "dropped", "1.9x of native", "– refused", "the form has no cache", "timed runs 45",
                 "A name is form/dtype/opset, then /target"):  # fmt: skip
        assert said in text, said


@pytest.mark.slow
def test_artifacts_show_their_chain_form_by_form(tmp_path: Path) -> None:
    for form in ("function", "native"):
        write(tmp_path, f"rope-{form}", small_spec("rope"), form)
    made = make_page([tmp_path])
    chains = [block for section in made.sections for block in section.blocks if isinstance(block, Chain)]
    assert [[text for mark, text in chain.steps if mark] for chain in chains] == [
        ["posexport.RotaryPosition", "posexport.PositionalAttention"],
        ["RotaryEmbedding", "Attention"],
    ]
    assert chains[0].note.endswith(" Verified: · no result on this page. Timed: · no result on this page.")
    table = next(block for block in made.sections[-1].blocks if isinstance(block, Table))
    counts = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert counts["Attention ★"] == ["–", "1"]
    assert counts["Softmax ★"] == ["+1", "–"]


KERNELS = {
    "count": 2, "fused_attention": True, "attention_kernels": 1, "attention_layers": 1, "host_steps": 3,
    "rows": [
        {"name": "_gemm_mha_v2_myl0_4", "type": "kgen", "nodes": ["Softmax_1"]},
        {"name": "node_mha_linear", "type": "gemm", "nodes": []},
    ],
}  # fmt: skip


def test_the_fused_attention_of_a_plan_is_marked(tmp_path: Path) -> None:
    plan = tmp_path / "a.plan"
    plan.write_bytes(b"x")
    write_manifest_data(plan, plan_manifest(plan, plan, kernels=KERNELS, sizes={"plan": 2_000_000}, sha256="0"))
    *_, section = make_page([tmp_path]).sections
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert [row[3].text for row in table.rows] == ["★ fused attention", ""]
    assert table.note.startswith("2 kernels, 3 host steps; attention fused; tensorrt-rtx 1.2.3; plan 2.00 MB")
    assert "does not match the file" in table.note


@pytest.mark.parametrize(
    ("mark", "names"),
    [
        ("★", "Attention CachedAttention GroupQueryAttention Softmax"),
        ("◆", "Cos RotaryEmbedding RotaryPosition AlibiBias ExactSinusoids"),
        ("", "MatMul Concat KeyPositions"),
    ],
    ids=["attention", "position", "neither"],
)
def test_what_computes_attention_or_positions_is_marked(mark: str, names: str) -> None:
    for name in names.split():
        assert [own for own, pattern in OPERATOR_MARKS.items() if pattern.fullmatch(name)] == [mark] * bool(mark), name


def test_one_slow_bar_does_not_flatten_the_others() -> None:
    def bars(*values: float, bound: float = 0.5) -> str:
        made = tuple(Bar(name="b", text="t", value=value, low=value, high=value, look="ours") for value in values)
        return draw_bars("bars", [Bars(name="", bars=made, bound=bound)])

    def widths(drawing: str) -> list[float]:
        """The widths of the bars as fractions of the drawing's width."""
        (whole,) = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ', drawing))
        corners = re.findall(r'<g class="bar ours"><path d="M 0 [\d.]+ +L ([\d.]+) ', drawing)
        return [round(float(corner) / whole, 3) for corner in corners]

    whole, cut = bars(1.0, 4.0), bars(1.0, 400.0, bound=300.0)
    assert widths(whole) == [0.235, 0.94] and "›" not in whole and "lower bound" in whole
    assert min(widths(cut)) > 0.04 and cut.count("›") == 1
    assert (whole.count("var(--bound)"), cut.count("var(--bound)")) == (3, 1), "in the legend and across each bar"


def test_columns_that_say_nothing_are_left_out() -> None:
    rows = (("a", "–", number(1), ""), ("b", None, None, ""))
    table = Table(caption="t", columns=("name", "none", "some", "empty"), rows=rows).trimmed()
    assert (table.columns, table.right, table.rows[1]) == (("name", "some"), {1}, cells("b", "–"))


def test_numbers_are_written_for_people() -> None:
    assert [seconds(value) for value in (2.5, 0.012, 4.5e-6, 3e-9)] == ["2.50 s", "12.0 ms", "4.50 µs", "3.00 ns"]
    assert [seconds(value, "{:.3g}".format) for value in (1.0, 1e-3, 1e-5)] == ["1 s", "1 ms", "10 µs"]
    assert [times(value) for value in (0.0024, 0.6, 12.3, 456)] == ["0.0024×", "0.60×", "12.3×", "456×"]
    assert [plain_number(value) for value in (0, 1024, 0.01, 1e6, 1e-8)] == ["0", "1,024", "0.01", "1e+06", "1e-08"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-o", "r.json"), "--output is"),
        (("-o", "none/r.html"), "in a folder that is there"),
        (("--markdown", "a.onnx"), "has the name of an artifact, of inputs or of results"),
        (("--markdown", "."), "can't be written"),
        (("-o", "a.html", "--markdown", "a.html"), "two files would be written to 'a.html'"),
        (("--nothing",), "No such option"),
    ],
)
def test_bad_outputs_are_refused_and_nothing_is_written(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (path,) = write_all(tmp_path, {"a": bench()})
    refused(cli("report", path, *options), said)
    assert list(tree(tmp_path)) == ["a.json"]
