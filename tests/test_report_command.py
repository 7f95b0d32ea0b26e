"""`posexport report` as its users call it, and what its boxes say of small results."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused, small_spec, tree
from page_helpers import DOCS, Reader, bench, everything, gate, html_of, shape, tune, write_all
from test_matrix_files import small
from verify_helpers import write

from posexport.page.artifacts import longest
from posexport.page.blocks import Chain, Table, brief, cells, seconds, times, trimmed
from posexport.page.make import make_page
from posexport.page.scale import label, scale


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
    assert "<h1>Nightly</h1>" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert (tmp_path / "r.md").read_text(encoding="utf-8").startswith("## Nightly\n")
    assert len(tree(tmp_path)) == len(paths) + 2


def test_the_fastest_is_told_with_its_ratios_and_never_the_floor(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(), "b": bench("contrib", (shape("prefill:128", 128, 0.008),))}, "fastest")
    (point,) = found["points"]
    assert point["label"] == "rope, hidden 64, prefill:128 (128 tokens at once)"
    assert (point["head"], point["figure"]) == ("ort-cpu · native", "6.00 ms")
    assert point["text"] == "0.60× of torch eager (0.57 to 0.63); 1.20× of the floor (1.14 to 1.26)"


def test_what_is_as_fast_within_the_interval_is_said(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(), "b": bench("contrib", (shape("prefill:128", 128, 0.0062),))}, "fastest")
    assert found["points"][0]["text"].endswith("as fast within the interval: ort-cpu · contrib")


def test_a_peer_that_wins_is_said_to_win(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(shapes=(shape(None, 128, 0.02),))}, "fastest")
    assert found["points"][0]["head"] == "torch eager"
    assert found["points"][0]["label"] == "rope, hidden 64, batch 1, seq 128 (128 tokens at once)"


def test_a_busy_machine_is_told_beside_its_times(tmp_path: Path) -> None:
    assert len(box(tmp_path, {"a": bench(busy=0.2)}, "fastest")["points"]) == 1
    point = box(tmp_path, {"a": bench(busy=0.21)}, "fastest")["points"][-1]
    assert (point["label"], point["head"]) == ("Take care", "a.json")


@pytest.mark.parametrize(
    ("state", "change", "where", "said"),
    [
        ("slower", 1.12, "wrong", "12.0% slower (+9.0% to +15.0%) than before, allowed is 5%"),
        ("can't tell", None, "fastest", "whether it got slower than before can't be told: too few processes"),
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
    assert ("a.onnx", "ort-cpu", "it is wrong; Add 'n'") in said
    assert ("unreadable", "b.onnx", "'b.onnx' is not an ONNX file.") in said
    assert ("rope function fp16 prefill", "ort-cpu", "off <by> a | lot\n and more") in said
    assert ("", "rope", "it has none (matrix)") in said  # refused, in the closed part
    assert found["verdict"] == "3 failed; 8 checks ran."


def test_nothing_wrong_is_said_only_of_what_ran(tmp_path: Path) -> None:
    assert box(tmp_path, {"a": bench()}, "wrong")["verdict"] == (
        "Nothing was checked here, so nothing is known to be wrong."
    )
    verify = everything()["verify"]
    verify["verdicts"], verify["unreadable"] = verify["verdicts"][:1], []
    assert box(tmp_path, {"v": verify}, "wrong")["verdict"] == "Nothing: all 1 check that ran passed."


def test_what_was_not_run_is_counted_by_reason(tmp_path: Path) -> None:
    found = box(tmp_path, {"a": bench(), "v": everything()["verify"]}, "not-run")
    assert found["verdict"].startswith("2 results missing")
    (point,) = found["points"]
    assert point["head"] == "ort-cuda and tensorrt"
    assert point["text"] == "no GPU: there is no NVIDIA driver (bench and verify)"


def test_tune_tells_the_winner_and_why_the_others_stopped(tmp_path: Path) -> None:
    point = box(tmp_path, {"t": tune()}, "fastest")["points"][0]
    assert (point["head"], point["figure"]) == ("native/fp32/23", "6.00 ms")
    text = Reader(html_of(tmp_path, {"t": tune()})).text()
    for said in ("★ won", "raced", "dropped", "1.9x of native", "– refused", "the form has no cache", "timed runs 45"):
        assert said in text, said


def test_artifacts_show_their_chain_form_by_form(tmp_path: Path) -> None:
    for form in ("function", "native"):
        write(tmp_path, f"rope-{form}", small_spec("rope"), form)
    made = make_page([tmp_path])
    chains = [block for section in made.sections for block in section.blocks if isinstance(block, Chain)]
    assert [[step.text for step in chain.steps if step.mark] for chain in chains] == [
        ["posexport.RotaryPosition", "posexport.PositionalAttention"],
        ["RotaryEmbedding", "Attention"],
    ]
    table = next(block for section in made.sections for block in section.blocks if isinstance(block, Table))
    counts = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert counts["Attention ★"] == ["–", "1"]
    assert counts["Softmax ★"] == ["+1", "–"]


KERNELS = {
    "file": "a.plan", "sha256": "0", "form": "decomposed", "spec": {"encoding": {"name": "rope"}, "dtype": "fp16"},
    "runtime": {"name": "tensorrt-rtx", "version": "1.7"}, "sizes": {"plan": 2_000_000},
    "kernels": {
        "count": 2, "fused_attention": True, "attention_kernels": 1, "attention_layers": 1, "host_steps": 3,
        "rows": [
            {"name": "_gemm_mha_v2_myl0_4", "type": "kgen", "nodes": ["Softmax_1"]},
            {"name": "node_mha_linear", "type": "gemm", "nodes": []},
        ],
    },
}  # fmt: skip


def test_the_fused_attention_of_a_plan_is_marked(tmp_path: Path) -> None:
    (tmp_path / "a.plan").write_bytes(b"x")
    (tmp_path / "a.plan.json").write_text(json.dumps(KERNELS))
    (section,) = make_page([tmp_path]).sections
    (table,) = section.blocks
    assert isinstance(table, Table)
    assert [row[3].text for row in table.rows] == ["★ fused attention", ""]
    assert table.note.startswith("2 kernels, 3 host steps; attention fused; tensorrt-rtx 1.7; plan 2.00 MB")
    assert "does not match the file" in table.note


class Node:
    def __init__(self, op_type: str, given: list[str], gives: list[str]) -> None:
        self.op_type, self.input, self.output, self.domain = op_type, given, gives, ""


def test_the_chain_is_the_longest_path_from_input_to_output() -> None:
    nodes = [
        Node("Const", [], ["c"]), Node("A", ["x", "c"], ["a"]), Node("B", ["a"], ["b"]), Node("C", ["x", "b"], ["y"]),
        Node("Aside", ["y"], ["z"]),
    ]  # fmt: skip
    assert longest(nodes, "x", "y") == ("A", "B", "C")
    assert longest(nodes, "nowhere", "y") == ()


def test_columns_that_say_nothing_are_left_out() -> None:
    rows = (cells("a", "–", "1", ""), cells("b", "–", "–", ""))
    found = trimmed(Table(caption="t", columns=("name", "none", "some", "empty"), rows=rows, right=(1, 2)))
    assert (found.columns, found.right, found.rows[1]) == (("name", "some"), (1,), cells("b", "–"))


def test_numbers_are_written_for_people() -> None:
    assert [seconds(value) for value in (2.5, 0.012, 4.5e-6, 3e-9)] == ["2.50 s", "12.0 ms", "4.50 µs", "3.00 ns"]
    assert [brief(value) for value in (1.0, 1e-3, 1e-5)] == ["1 s", "1 ms", "10 µs"]
    assert [times(value) for value in (0.6, 12.3, 456)] == ["0.60×", "12.3×", "456×"]
    assert [label(value) for value in (0, 1024, 0.01, 1e6, 1e-8)] == ["0", "1,024", "0.01", "1e6", "1e-8"]


def test_scales_hold_their_values_and_have_ticks() -> None:
    for kind in ("linear", "log", 1e-8):
        made = scale([1e-6, 1e-3, 0.5], kind)
        assert 0 <= made.place(1e-6) < made.place(1e-3) <= made.place(0.5) <= 1
        assert 2 <= len(made.ticks()) <= 9, kind
        assert all(-1e-6 <= made.place(tick) <= 1 + 1e-6 for tick in made.ticks())
    assert scale([0.0, 1e-4], 1e-8).place(0.0) == 0
    for odd in ([], [0.0], [5.0, 5.0]):
        assert scale(odd, "log").place(5.0) >= 0
        assert scale(odd, "linear").ticks()


@pytest.mark.slow
def test_the_commands_of_the_docs_run_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```bash\n(.+?)```", (DOCS / "report.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block
    for line in block[1].splitlines():
        command, _, target = line.removeprefix("posexport ").partition(" > ")
        result = cli(*shlex.split(command))
        assert result.exit_code == 0, (line, result.output)
        if target:
            Path(target).write_text(result.stdout, encoding="utf-8")
    assert {"report.html", "summary.md"} <= set(tree(tmp_path))
    assert "Shape of the graphs" in Path("report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-o", "r.json"), "--output is"),
        (("-o", "none/r.html"), "in a folder that is there"),
        (("--markdown", "a.onnx"), "has the name of an artifact or of results"),
        (("--markdown", "."), "can't be written"),
        (("-o", "a.html", "--markdown", "a.html"), "can't hold both the page and the Markdown"),
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
