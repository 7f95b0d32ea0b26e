"""`posexport plot FILE.onnx`: an encoding recognised in a file is drawn like the encoding of that name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import onnx
import pytest
from helpers import cli, exported, refused, small_spec
from small_graphs import HEADS, SIZE, decoder, no_attention

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import Reason, RequestError
from posexport.graphs.inspection import Inspection, inspected
from posexport.report.plots import file_rows
from posexport.report.plots.file_rows import rows_of_file
from posexport.spec.spec import Spec


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognise files in this process instead of a child process."""
    monkeypatch.setattr(file_rows, "inspect_graph", lambda graph, roles, progress: inspected(graph, roles))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a file in which inspection finds the given attentions."""

    def made(*attentions: dict[str, Any], reason: Reason | None = None) -> Path:
        inspection = Inspection(roles={}, attentions=attentions, reason=reason)
        monkeypatch.setattr(file_rows, "inspect_graph", lambda graph, roles, progress: inspection)
        onnx.save(no_attention(), tmp_path / "any.onnx")
        return tmp_path / "any.onnx"

    return made


def attention(name: str = "one", **changes: Any) -> dict[str, Any]:
    """A record of inspect with the fields that a plot reads."""
    data = {"num_heads": 4, "head_dim": 16, "scale": 0.25, "prefix_tokens": 0, "reason": None}
    data |= {"mask": {"kind": "causal", "window": None, "chunk": None, "padding": []}}
    data |= {"name": name, "encoding": {"name": "none"}, "bias": None, "input_encoding": None}
    return {**data, **changes}


def rows(path: Path) -> list[tuple[Spec, str]]:
    return [(row.spec, row.parameters) for row in rows_of_file(path, {}).rows]


def test_a_decoder_is_drawn_as_the_encoding_that_it_was_written_with(tmp_path: Path, quick: None) -> None:
    onnx.save(decoder(layers=2), tmp_path / "decoder.onnx")
    options = ("--json", "--what", "decay", "--seq", 40)
    by_file = cli("plot", tmp_path / "decoder.onnx", "-o", tmp_path / "a.png", *options)
    sizes = ("--num-heads", HEADS, "--hidden-size", HEADS * SIZE, "--causal")
    by_name = cli("plot", "rope:layout=half:theta=10000", *sizes, "-o", tmp_path / "b.png", *options)
    assert by_file.exit_code == by_name.exit_code == 0, by_file.output + by_name.output
    (one,), (other,) = (json.loads(result.stdout)["rows"] for result in (by_file, by_name))
    assert [panel["lines"] for panel in one] == [panel["lines"] for panel in other]
    assert "half theta=10000 in decoder.onnx" in one[0]["note"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_artifact_is_drawn_by_its_spec(tmp_path: Path) -> None:
    spec = small_spec("alibi", causal=True)
    write_onnx(exported(spec), tmp_path / "own.onnx")
    assert rows(tmp_path / "own.onnx") == [(spec, "own.onnx")]
    with pytest.raises(RequestError, match="is posexport's own, so the roles of its inputs are known"):
        rows_of_file(tmp_path / "own.onnx", {"x": "features"})


MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"kind": "none"}, {"causal": False}),
    "causal": ({"kind": "causal"}, {"causal": True}),
    "window": ({"kind": "window", "window": 5}, {"causal": True, "window": 5}),
    "local": ({"kind": "local", "window": 5}, {"causal": False, "window": 5}),
    "chunk": ({"kind": "chunk", "chunk": 8}, {"causal": True, "attention_chunk_size": 8}),
    "other": ({"kind": "other"}, {"causal": False}),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_scales_and_sizes_are_those_of_the_attention(kind: str, found: Callable[..., Path]) -> None:
    mask, fields = MASKS[kind]
    ((spec, text),) = rows(found(attention(mask=mask, scale=0.5, prefix_tokens=3, encoding=ROPE)))
    assert text == "half theta=10000 in any.onnx"
    assert {name: getattr(spec, name) for name in fields} == fields
    assert (spec.num_heads, spec.head_dim, spec.hidden_size, spec.scale, spec.prefix_tokens) == (4, 16, 64, 0.5, 3)
    assert spec.encoding.name == "rope"


ROPE = {"name": "rope", "layout": "half", "theta": 10000.0}
LONG = {"name": "rope", "layout": "half", "theta": 1e6, "scaling": "linear", "factor": 8.0}
TABLE = {"name": "rope", "layout": "half", "frequencies": [1.0, 0.3]}
UNKNOWN = {"name": "unknown", "reason": {"code": "c", "text": "it depends on more than the distance"}}


def test_each_encoding_is_drawn_once(found: Callable[..., Path]) -> None:
    alibi = {"name": "alibi"}
    path = found(
        attention("a", encoding=ROPE),
        attention("b", encoding=LONG),
        attention("c", encoding=ROPE),
        attention("d", encoding=ROPE, bias=alibi, prefix_tokens=2),
        attention("e", encoding=alibi, bias=alibi),
    )
    assert [text for _, text in rows(path)] == [
        "half theta=10000 in any.onnx",
        "half theta=1000000 linear factor=8 in any.onnx",
        "half theta=10000 in any.onnx",  # with two tokens that are not rotated
        "in any.onnx",
    ]


def test_what_can_not_be_drawn_is_named_with_the_reason(found: Callable[..., Path]) -> None:
    reason = {"code": "c", "text": "its scores are of three axes"}
    nothing: dict[str, Any] = {"encoding": None, "mask": None, "reason": reason}
    path = found(
        attention("a", encoding=ROPE),
        attention("table", encoding=TABLE),
        attention("odd", encoding=UNKNOWN),
        attention("plain"),
        attention("lost", **nothing),
    )
    made = rows_of_file(path, {})
    assert len(made.rows) == 1
    assert made.left == {
        "table": "its frequencies are no function of a theta, so they have no name",
        "odd": "it depends on more than the distance",
        "plain": "positions have no part in it",
        "lost": "its scores are of three axes",
    }
    shown = cli("plot", path, "-o", path.with_suffix(".png"), "--what", "wavelength")
    assert "not drawn: odd (it depends on more than the distance)" in shown.stdout


@pytest.mark.parametrize(
    ("attentions", "reason", "said"),
    [
        ((), None, "no attention was found: name an encoding instead"),
        ((), Reason("killed", "the process was killed by SIGKILL"), "the process was killed by SIGKILL"),
        ((attention("odd", encoding=UNKNOWN),), None, "(odd: it depends on more than the distance)"),
    ],
    ids=["no attention", "not looked for", "unknown"],
)
def test_a_file_of_which_nothing_can_be_drawn_is_refused(
    attentions: Any, reason: Reason | None, said: str, found: Callable[..., Path]
) -> None:
    path = found(*attentions, reason=reason)
    refused(cli("plot", path, "-o", path.with_suffix(".png")), said)
    assert not path.with_suffix(".png").exists()


WRONG = {
    ("{file}", "--set", "theta=5"): "--set was given with the file",
    ("{file}", "--causal"): "--causal was given with the file",
    ("rope", "--input", "x=features"): "--input was given without a file",
    ("{file}", "-o", "plot.gif"): "must end in .png or .svg",
    ("gone.onnx",): "can't read 'gone.onnx'",
}


@pytest.mark.parametrize("options", WRONG)
def test_wrong_requests_are_refused_before_a_file_is_read(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(graph: GraphFile, roles: Any, progress: Any) -> Inspection:
        raise AssertionError("inspected")

    monkeypatch.setattr(file_rows, "inspect_graph", never)
    monkeypatch.chdir(tmp_path)
    onnx.save(no_attention(), "any.onnx")
    refused(cli("plot", *(text.format(file="any.onnx") for text in options)), WRONG[options])


def test_a_file_stands_beside_encodings_by_name(found: Callable[..., Path], tmp_path: Path) -> None:
    path = found(attention(encoding=ROPE))
    result = cli("plot", path, "alibi:causal=true", "--what", "decay", "-o", tmp_path / "p.svg", "--json")
    assert result.exit_code == 0, result.output
    (panels,) = json.loads(result.stdout)["rows"]  # panels of one kind share a row
    assert [panel["title"] for panel in panels] == ["rope", "alibi"]


def test_rows_are_specs_that_a_plot_by_name_would_have(found: Callable[..., Path]) -> None:
    """A change in one field of a record changes the row."""
    ((spec, _),) = rows(found(attention(encoding=ROPE)))
    ((other, _),) = rows(found(attention(encoding={**ROPE, "theta": 500.0})))
    assert other == attrs.evolve(spec, encoding=attrs.evolve(spec.encoding, theta=500.0))
    assert other != spec
