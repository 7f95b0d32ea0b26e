"""`posexport rewrite`: what it prints and writes, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from helpers import cli, exported, small_spec
from onnx import helper

from posexport.artifact.onnx_artifact import write_onnx
from posexport.graphs.attention.candidates import CONTROL_FLOW
from posexport.graphs.attention.unweighted import FEATURES_UNKNOWN
from posexport.processes import CRASHED, MEMORY, failure
from posexport.rewrite import files, process, rewriter, site
from posexport.rewrite.evidence import Evidence
from posexport.rewrite.result import ALREADY, NOT_CHOSEN
from posexport.rewrite.whole import DIFFERS, NOT_TESTED, WholeEvidence
from posexport.verify import rewritten
from posexport.verify.result import FAILED, Report

pytestmark = [pytest.mark.few_bands, pytest.mark.all_inputs]


@pytest.fixture(autouse=True)
def _one_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    helpers.only_one_runtime(monkeypatch, tmp_path)


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A file with a decoder of one layer and a cache."""
    return helpers.saved(tmp_path)


def test_the_table_and_the_facts(decoder: Path) -> None:
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [re.sub(" {2,}", " | ", line.strip()) for line in helpers.numbers_hidden(result.stdout).splitlines()]
    assert lines == [
        "Attention of in.onnx, to the form native",
        "",
        "attention | recognised | state | error | cases | reason",
        "node_attention_0 | 4 heads over 2, size 8, causal, padding, grown cache, rope half theta=10000 | "
        "rewritten | # | 24",
        "",
        "out.onnx is written",
        "attention | 1 of 1 rewritten",
        "whole graph | tested in float64: error #, 24 sets of inputs",
        "ort-cpu | passed: error #, limit #, 38 sets of inputs",
        "manifest | out.onnx.json",
    ]
    assert helpers.names_of(decoder.parent) == ["in.onnx", "out.onnx", "out.onnx.json"]


def test_json_has_all_of_it(decoder: Path) -> None:
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "contrib", "--target", "ort", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert list(data) == [
        *("kind", "file", "output", "form", "target", "opset", "seed", "angles", "changed", "attentions"),
        *("whole", "verdicts", "refusal"),
    ]
    assert (data["kind"], data["output"], data["form"], data["target"]) == ("rewrite", "out.onnx", "contrib", "ort")
    assert (data["opset"], data["seed"], data["changed"], data["refusal"]) == (18, 0, True, None)
    (one,) = data["attentions"]
    for key in ("name", "layer", "num_heads", "num_kv_heads", "head_dim", "scale", "mask", "encoding", "cache"):
        assert one[key] is not None, key
    assert (one["operator"], one["state"], one["reason"]) == ("Softmax", "rewritten", None)
    assert one["encoding"] == {"name": "rope", "layout": "half", "theta": 10000.0}
    assert 0 <= one["error"] <= 1e-9 and one["cases"] == 24
    assert data["whole"]["cases"] == 24 and data["whole"]["error"] <= 1e-7
    states = {verdict["runtime"]: verdict["state"] for verdict in data["verdicts"]}
    assert states == {"ort-cpu": "passed", **dict.fromkeys(("tensorrt", "tensorrt-rtx", "tensorrt-import"), "not run")}
    manifest = json.loads(Path("out.onnx.json").read_text())
    assert manifest["rewrite"]["attentions"] == data["attentions"]
    assert manifest["rewrite"]["whole"] == data["whole"]


def test_without_attention(tmp_path: Path) -> None:
    helpers.saved(tmp_path, small_graphs.no_attention())
    result = cli("rewrite", "in.onnx", "-o", "out.onnx")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "out.onnx is written, a copy of in.onnx: no attention was found in it",
        "  attention  no attention found",
        "  manifest   out.onnx.json",
    ]
    assert Path("out.onnx").read_bytes() == Path("in.onnx").read_bytes()
    refused = cli("rewrite", "in.onnx", "-o", "other.onnx", "--require-all")
    assert refused.exit_code == 1
    assert refused.stderr == "Error: other.onnx is not written, no attention was found.\n"
    assert not Path("other.onnx").exists()


@pytest.mark.slow
def test_require_all_with_one_left(tmp_path: Path) -> None:
    helpers.saved(tmp_path, small_graphs.decoder(layers=2))
    given = ("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--only", "node_attention_0")
    refused = cli(*given, "--require-all")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "Error: out.onnx is not written, 1 of 2 attentions are left as they were, node_attention_1: --only names "
        "others.\n"
    )
    assert helpers.names_of(tmp_path) == ["in.onnx"]
    written = cli(*given)
    assert written.exit_code == 0
    assert "1 of 2 rewritten" in written.stdout


@pytest.mark.slow
def test_require_all_of_what_is_in_the_form(decoder: Path) -> None:
    assert cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native").exit_code == 0
    result = cli("rewrite", "out.onnx", "-o", "twice.onnx", "--form", "native", "--require-all")
    assert result.exit_code == 0, result.output
    assert Path("twice.onnx").read_bytes() == Path("out.onnx").read_bytes()
    assert "it is in the form native already" in result.stdout


def _wrong_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a wrong replacement that the tests in float64 do not find."""
    helpers.in_process(monkeypatch)
    monkeypatch.setattr(site, "split_scale", lambda factors, q: (2.0 * float(np.prod(factors)), []))
    monkeypatch.setattr(rewriter, "evidence_of", lambda *_, **__: {"node_attention_0": Evidence(cases=1)})
    monkeypatch.setattr(files, "whole_evidence", lambda *_: WholeEvidence(cases=1))


@pytest.mark.slow
def test_a_runtime_that_fails_keeps_the_file_from_being_written(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong_everywhere(monkeypatch)
    Path("out.onnx").write_bytes(b"before")
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--json")
    assert result.exit_code == 1
    assert "Error: out.onnx is not written, the new file fails on ort-cpu: " in result.stderr
    data = json.loads(result.stdout)
    assert data["output"] is None and data["refusal"]["code"] == "over-limit"
    (verdict,) = data["verdicts"]
    assert (verdict["runtime"], verdict["state"], verdict["artifact"]) == ("ort-cpu", "failed", "out.onnx")
    assert ".tmp" not in result.output
    assert Path("out.onnx").read_bytes() == b"before"
    assert helpers.names_of(decoder.parent) == ["in.onnx", "out.onnx"]


@pytest.mark.slow
def test_where_the_original_fails_too_the_file_is_written(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = rewritten.verify

    def failing(paths: Any, **options: Any) -> Report:
        report = verify(paths, **options)
        verdicts = tuple(attrs.evolve(one, state=FAILED, reason="it is broken") for one in report.verdicts)
        return attrs.evolve(report, verdicts=verdicts)

    monkeypatch.setattr(rewritten, "verify", failing)
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native")
    assert result.exit_code == 0, result.output
    assert "not run: the original fails on it too: it is broken" in result.stdout


@pytest.mark.slow
def test_operators_that_nobody_knows(decoder: Path) -> None:
    """The operator comes after the attention: its inputs are compared, and no runtime can run it."""
    model = onnx.load(decoder)
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(helper.make_node("Magic", ["before"], ["logits"], domain="somebody"))
    model.opset_import.append(helper.make_opsetid("somebody", 1))
    del model.graph.output[1:]
    decoder.write_bytes(model.SerializeToString())
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native")
    assert result.exit_code == 0, result.output
    assert "1 of 1 rewritten" in result.stdout
    assert re.search(r"whole graph +tested in float64: error", result.stdout)
    assert re.search(r"ort-cpu +not run: .*Magic", result.stdout)


def test_a_file_is_signed(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    secret = serialization.PrivateFormat.PKCS8
    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(serialization.Encoding.PEM, secret, serialization.NoEncryption())
    helpers.saved(tmp_path, small_graphs.no_attention())
    Path("key.pem").write_bytes(data)
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--sign", "key.pem")
    assert result.exit_code == 0, result.output
    assert "signed by" in result.stdout
    assert Path("out.onnx.json.sig").is_file()


@pytest.mark.slow
def test_an_artifact_of_posexport_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "rope.onnx"
    write_onnx(exported(small_spec("rope", layout="half", causal=True)), path)
    result = cli("rewrite", str(path), "-o", "native.onnx", "--form", "native")
    assert result.exit_code == 0, result.output
    assert "1 of 1 rewritten" in result.stdout
    checked = cli("verify", "native.onnx", "--runtime", "ort-cpu", "--json")
    assert checked.exit_code == 0, checked.output
    (verdict,) = json.loads(checked.stdout)["verdicts"]
    assert (verdict["state"], verdict["weights"]["code"]) == ("passed", "as-manifest")
    shown = json.loads(cli("inspect", "native.onnx", "--json").stdout)
    assert (shown["form"], shown["manifest"]) == ("native", "matches the file")
    shared = cli("rewrite", str(path), "-o", "other.onnx", "--form", "native", "--kv-cache", "shared")
    assert shared.exit_code == 2
    assert "is an artifact of posexport, whose spec says how its cache is" in shared.stderr


def _renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    for value in model.graph.input:
        value.name = new if value.name == old else value.name
    return model


def _without_shape(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.input[0].type.tensor_type.ClearField("shape")
    return model


BAD: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "opset": (lambda: small_graphs.no_attention(10), (), r"is of opset 10, and 11 is the lowest that is rewritten"),
    "role": (
        lambda: _renamed(small_graphs.decoder(), "position_ids", "where"),
        (),
        r"'in\.onnx': what the input 'where' \['batch', 'seq'\] \(int64\) is for can't be guessed: say it with --input "
        r"where=ROLE",
    ),
    "rank": (lambda: _without_shape(small_graphs.decoder()), (), "the input 'input_ids' has no shape"),
    "unknown-role": (
        small_graphs.decoder,
        ("--input", "input_ids=words"),
        "unknown role 'words' of the input 'input_ids'",
    ),
    "no-role": (small_graphs.decoder, ("--input", "input_ids"), "--input 'input_ids' is not NAME=ROLE"),
    "two-roles": (
        small_graphs.decoder,
        ("--input", "a=features", "--input", "a=past"),
        "gives 'a' two roles, 'features' and 'past'",
    ),
    "no-input": (
        small_graphs.decoder,
        ("--input", "words=token_ids"),
        "--input gives a role to 'words', which is no input",
    ),
    "form": (small_graphs.decoder, ("--form", "nativ"), "unknown form 'nativ': did you mean 'native'"),
    "form-opset": (small_graphs.decoder, ("--form", "native", "--opset", "18"), "native is written in opsets 23 to 24"),
    "opset-number": (small_graphs.decoder, ("--opset", "new"), "--opset is 'new'"),
    "lower-opset": (lambda: small_graphs.decoder(opset=20), ("--opset", "18"), "the file is of opset 20, so give 20"),
    "only": (small_graphs.decoder, ("--only", "layer_0"), "--only: unknown attention 'layer_0'"),
    "kv-cache": (small_graphs.decoder, ("--kv-cache", "grown"), "--kv-cache is 'grown': it must be shared"),
    "no-cache": (
        lambda: small_graphs.decoder(cache=False),
        ("--kv-cache", "shared"),
        "--kv-cache shared makes buffers of caches, and the graph has none that grows",
    ),
    "angles": (small_graphs.decoder, ("--angles", "fast"), "--angles is 'fast'"),
    "output": (small_graphs.decoder, ("-o", "out.bin"), "must end in .onnx"),
    "itself": (small_graphs.decoder, ("-o", "in.onnx"), "'in.onnx' is a file that this command reads"),
    "key": (small_graphs.decoder, ("--sign", "in.onnx"), "in.onnx"),
}
"""Refused requests: the graph, the options, and a pattern of the message."""


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_sentence(name: str, tmp_path: Path) -> None:
    make, options, pattern = BAD[name]
    helpers.saved(tmp_path, make())
    before = helpers.names_of(tmp_path)
    output = () if "-o" in options else ("-o", "out.onnx")
    result = cli("rewrite", "in.onnx", *output, *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1, result.stderr
    assert re.search(pattern, result.stderr), result.stderr
    assert helpers.names_of(tmp_path) == before


def _bytes(data: bytes) -> Any:
    return lambda path: path.write_bytes(data)


SPECIAL: dict[str, tuple[Any, str]] = {
    "missing": (lambda path: None, "'in.onnx' is not there: give an ONNX file"),
    "folder": (Path.mkdir, "'in.onnx' is no regular file"),
    "pipe": (os.mkfifo, "'in.onnx' is no regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "'in.onnx' is no regular file"),
    "empty": (_bytes(b""), "is empty: export it again"),
    "text": (_bytes(b"hello"), "is not an ONNX file"),
    "circle": (lambda path: path.symlink_to(path), "circle"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_onnx_file_is_refused(kind: str, tmp_path: Path) -> None:
    make, text = SPECIAL[kind]
    make(tmp_path / "in.onnx")
    result = cli("rewrite", "in.onnx", "-o", "out.onnx")
    assert result.exit_code == 2, result.output
    assert text in result.stderr and result.stderr.count("\n") == 1
    assert "out.onnx" not in helpers.names_of(tmp_path)


def test_a_file_of_more_than_two_gigabytes(decoder: Path) -> None:
    os.truncate(decoder, 2**31 + 10)
    result = cli("rewrite", "in.onnx", "-o", "out.onnx")
    assert result.exit_code == 2
    assert "it is larger than 2,048 MiB, the most that is read" in result.stderr


def test_a_file_that_is_cut_short(decoder: Path) -> None:
    data = decoder.read_bytes()
    for size in range(0, len(data), len(data) // 12):
        decoder.write_bytes(data[:size])
        assert cli("rewrite", "in.onnx", "-o", "out.onnx").exit_code == 2
    assert helpers.names_of(decoder.parent) == ["in.onnx"]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (
            failure(CRASHED, "crashed: the process was killed by SIGSEGV"),
            "it failed while starting (crashed: the process",
        ),
        (failure(MEMORY, "MemoryError: 9 GB"), "there is not enough memory (MemoryError: 9 GB): free some"),
    ],
)
def test_a_crash_of_the_child_is_one_sentence(
    reply: dict[str, Any], text: str, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crashing(process.Worker):
        def ask(self, *_: Any) -> dict[str, Any]:
            return reply

    monkeypatch.setattr(process, "Worker", Crashing)
    result = cli("rewrite", "in.onnx", "-o", "out.onnx")
    assert result.exit_code == 2
    assert text in result.stderr and result.stderr.count("\n") == 1
    assert helpers.names_of(decoder.parent) == ["in.onnx"]


def test_every_reason_is_on_the_page() -> None:
    root = Path(rewriter.__file__).parents[1]
    sources = [
        root / "graphs" / "attention" / name
        for name in (
            "recognise.py",
            "candidates.py",
            "unweighted.py",
            "scores.py",
            "heads.py",
            "key_axis.py",
            "products.py",
            "weights.py",
            "operands.py",
            "softmaxes.py",
            "written_out.py",
            "named_operators.py",
        )
    ]
    text = "".join(path.read_text() for path in (*sources, *(root / "rewrite").glob("*.py")))
    codes = set(re.findall(r"(?:Declined|Reason)\(\s*\"([a-z-]+)\"", text))
    codes |= {ALREADY, CONTROL_FLOW, DIFFERS, FEATURES_UNKNOWN, NOT_CHOSEN, NOT_TESTED}
    page = (root.parent / "docs" / "reference" / "rewrite.md").read_text(encoding="utf-8")
    table = page.split("## Why an attention is kept")[1]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == codes
