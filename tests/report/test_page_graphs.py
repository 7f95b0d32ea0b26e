"""ONNX files without a spec on the page: inputs, attention, and the results about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import cli
from manifest_data import plan_manifest, write_manifest_data
from small_graphs import decoder, no_attention

from posexport.artifact.graph_file import GraphFile, read_graph
from posexport.errors import Reason
from posexport.files import write_json
from posexport.graphs.inspection import Inspection, inspected
from posexport.jsondata import unstructure
from posexport.report.page import graphs
from posexport.report.page.blocks import Block, Chain, Section, Table
from posexport.report.page.graphs import graph_blocks
from posexport.report.page.page import make_page
from posexport.rewrite.draft import rewrite_file
from posexport.rewrite.request import RewriteOptions
from posexport.verify.result import Report, Verdict

pytestmark = pytest.mark.few_inputs

IN_THIS_PROCESS: Callable[[GraphFile], Inspection] = lambda graph: inspected(graph, {})  # noqa: E731


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "inspect_graph", IN_THIS_PROCESS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a decoder of two equal layers, the same in another form, and a graph without attention."""
    folder = tmp_path_factory.mktemp("graphs")
    onnx.save(decoder(layers=2), folder / "decoder.onnx")
    onnx.save(no_attention(), folder / "plain.onnx")
    rewrite_file(folder / "decoder.onnx", folder / "contrib.onnx", RewriteOptions(form="contrib", target="ort"))
    return folder


def texts(table: Table) -> list[list[str]]:
    return [[cell.text if hasattr(cell, "text") else str(cell) for cell in row] for row in table.rows]


def section(path: Path, *more: Path) -> Section:
    return next(each for each in make_page([path, *more]).sections if each.id == "graphs")


def tables(blocks: list[Block], caption: str) -> Table:
    return next(block for block in blocks if isinstance(block, Table) and block.caption == caption)


@pytest.mark.slow
def test_a_graph_has_its_inputs_with_their_roles_and_its_attention(files: Path, quick: None) -> None:
    blocks = list(section(files / "decoder.onnx").blocks)
    (chain,) = (block for block in blocks if isinstance(block, Chain))
    assert chain.title == "decoder.onnx: a graph without a spec, opset 18"
    assert ("★", "Softmax") in chain.steps
    inputs = texts(tables(blocks, "decoder.onnx: inputs"))
    assert inputs[0] == ["input_ids", "['batch', 'seq']", "int64", "token_ids"]
    assert inputs[3] == ["past_key_values.0.key", "['batch', 2, 'past', 8]", "fp32", "past"]
    assert len(inputs) == 7
    attention = tables(blocks, "decoder.onnx: attention")
    assert attention.columns == ("attention", "heads", "mask", "encoding", "cache", "operator")
    assert texts(attention) == [
        [
            "node_attention_0 and 1 like it",
            "4 heads over 2, size 8",
            "causal, padding from attention_mask",
            "rope half theta=10000",
            "grown: past_key_values.0.key, past_key_values.0.value",
            "Softmax",
        ]
    ]


def test_a_rewritten_graph_says_what_it_was_made_from(files: Path, quick: None) -> None:
    blocks = list(graph_blocks(read_graph(files / "contrib.onnx"), "contrib.onnx"))
    attention = tables(blocks, "contrib.onnx: attention")
    assert attention.note == "Its attention was rewritten from decoder.onnx."
    assert texts(attention)[0][-1] == "com.microsoft.MultiHeadAttention"


def test_a_manifest_of_other_bytes_says_nothing(files: Path, quick: None, tmp_path: Path) -> None:
    for name in ("contrib.onnx", "contrib.onnx.json"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    (tmp_path / "contrib.onnx").write_bytes((files / "plain.onnx").read_bytes())
    blocks = list(graph_blocks(read_graph(tmp_path / "contrib.onnx"), "contrib.onnx"))
    assert tables(blocks, "contrib.onnx: attention").note == ""


@pytest.mark.parametrize("reason", [None, Reason("killed", "the process was killed by SIGKILL")])
def test_a_graph_without_attention_says_so_or_why_it_is_not_known(
    files: Path, reason: Reason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "inspect_graph", lambda graph: Inspection(roles={"x": None}, reason=reason))
    blocks = list(graph_blocks(read_graph(files / "plain.onnx"), "plain.onnx"))
    said = "no attention found" if reason is None else "not looked for: the process was killed by SIGKILL"
    assert texts(tables(blocks, "plain.onnx: attention")) == [[said]]
    assert texts(tables(blocks, "plain.onnx: inputs")) == [["x", "['batch', 32]", "fp32", "can't be guessed"]]


def test_what_was_not_recognised_has_its_reason(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = IN_THIS_PROCESS(read_graph(files / "decoder.onnx"))
    odd: dict[str, Any] = dict.fromkeys(known.attentions[0])
    odd |= {"name": "odd", "layer": 2, "reason": {"code": "c", "text": "its scores are of three axes"}}
    found = Inspection(roles=known.roles, attentions=(known.attentions[0], odd))
    monkeypatch.setattr(graphs, "inspect_graph", lambda graph: found)
    table = tables(list(graph_blocks(read_graph(files / "decoder.onnx"), "d")), "d: attention")
    assert texts(table)[1][0] == "odd"
    assert texts(table)[1][-1] == "its scores are of three axes"


def test_the_page_joins_files_with_their_verdicts_and_timings(files: Path, tmp_path: Path) -> None:
    """The results come from real commands, as users run them."""
    verdicts = cli("verify", files / "plain.onnx", "--runtime", "ort-cpu", "--json")
    assert verdicts.exit_code == 0, verdicts.output
    (tmp_path / "verify.json").write_text(verdicts.stdout)
    timed = cli(
        "bench", files / "plain.onnx", "--runtime", "ort-cpu", "--rounds", 2, "--processes", 1, "--shape", "batch=3",
        "--save", tmp_path / "bench.json",
    )  # fmt: skip
    assert timed.exit_code == 0, timed.output
    page = cli("report", files / "plain.onnx", tmp_path, "-o", tmp_path / "r.html", "--markdown", tmp_path / "r.md")
    assert page.exit_code == 0, page.output
    text = (tmp_path / "r.md").read_text()
    assert "Verified: ✓ ort-cpu. Timed:" in text and "(ort-cpu, batch 3)" in text
    assert "no attention found" in text
    assert "plain.onnx, batch 3 (3 rows)" in text


def test_a_verdict_on_other_bytes_is_none_of_the_file(files: Path, quick: None, tmp_path: Path) -> None:
    verdict = Verdict(artifact="plain.onnx", runtime="ort-cpu", state="passed", sha256="0" * 64)
    write_json(tmp_path / "verify.json", unstructure(Report(verdicts=(verdict,), unreadable=(), seed=0)))
    chain = next(block for block in section(files / "plain.onnx", tmp_path).blocks if isinstance(block, Chain))
    assert "Verified: ⚠ stale: verify.json is of other bytes" in chain.note


def test_a_plan_of_a_graph_has_a_title_without_a_spec(tmp_path: Path) -> None:
    plan = tmp_path / "theirs.plan"
    plan.write_bytes(b"code")
    data = plan_manifest(plan, plan)
    write_manifest_data(plan, {name: value for name, value in data.items() if name not in ("spec", "form")})
    kernels = next(each for each in make_page([plan]).sections if each.id == "kernels")
    assert [table.caption for table in kernels.blocks if isinstance(table, Table)] == [
        "theirs.plan: a graph without a spec, opset 18"
    ]
