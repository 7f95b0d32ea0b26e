"""`posexport plot`: the drawn numbers are compared with the papers' formulas, with a planted fault for each. Also
pictures."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from helpers import cli, refused, small_spec, tree
from oracle_rotations import progression, sinusoid_table
from oracles import visible

import posexport
from posexport.models import ENCODINGS
from posexport.report.plots.kinds import KINDS, chosen_heads, panels
from posexport.report.plots.panels import WHAT, Chart, Image
from posexport.report.plots.picture import draw
from posexport.runtimes import RUNTIMES
from posexport.verify.probe import ProbeTarget


def drawn(what: str | None, encoding: str, seq: int | None = None, **over: Any) -> list[Any]:
    """The panels of one encoding."""
    return [panel for row in panels([ProbeTarget(spec=small_spec(encoding, **over), seq=seq)], what) for panel in row]


def close(found: Any, wanted: Any) -> None:
    """Check that numbers are close, with NaN in the same places."""
    np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-5, atol=1e-5)


def table_is_vaswanis() -> None:
    (image,) = drawn("table", "sinusoidal", seq=40)
    close(image.rows, sinusoid_table(np.arange(40), 32, 10_000.0, "sin-cos", "interleaved"))


def table_is_a_rotation() -> None:
    """Vectors of ones, rotated as complex numbers: Su et al. 2021, eq. 34."""
    (image,) = drawn("table", "rope", seq=40)
    turned = (1 + 1j) * np.exp(1j * np.arange(40)[:, None] * np.array(progression(8, 10_000.0)))
    close(image.rows, np.stack([turned.real, turned.imag], -1).reshape(40, 8))


def bias_is_presses() -> None:
    """-m |i - j|, m = 2^(-8h/n), on visible keys."""
    images = drawn("bias", "alibi", seq=20, causal=True, window=7)
    places, seen = np.arange(20), visible(20, causal=True, window=7)
    for head, image in enumerate(images, 1):
        close(image.rows, np.where(seen, -(2.0 ** (-2 * head)) * abs(places[:, None] - places), np.nan))


def bias_on_a_grid_is_a_distance() -> None:
    image = drawn("bias", "alibi2d", seq=9)[1]
    x, y = np.meshgrid(np.arange(9) - 4, np.arange(9) - 4)
    assert image.first == (-4, -4)
    close(image.rows, -(2.0**-4) * np.hypot(x, y))


def mask_is_what_is_seen() -> None:
    (image,) = drawn("mask", "rope", seq=30, causal=True, window=9, attention_chunk_size=12)
    close(image.rows, visible(30, causal=True, window=9, chunk=12))


def decay_is_a_sum_of_cosines() -> None:
    """For vectors of ones, q.k = 2 sum cos(d w_i), times 1/sqrt(head_dim), up to the window."""
    (chart,) = drawn("decay", "rope", seq=50, causal=True, window=30)
    (line,) = chart.lines
    distance = np.array(line.x)
    close(distance, np.arange(49, -1, -1))
    logits = 2 / math.sqrt(8) * np.cos(distance[:, None] * np.array(progression(8, 10_000.0))).sum(1)
    close(line.y, np.where(distance < 30, logits - logits[-1], np.nan))


def gain_is_llamas() -> None:
    """1 + s log(1 + floor((p + 1) / f)) on the query, 1 on the key."""
    (chart,) = drawn("gain", "temperature", floor_scale=100, attn_scale=0.5)
    query, key = chart.lines
    close(query.y, 1 + 0.5 * np.log1p((np.array(query.x) + 1) // 100))
    close(key.y, np.ones(len(key.x)))


def wavelengths_are_interpolated() -> None:
    """2 pi theta^(2i/d), times the factor with linear scaling (Chen et al. 2023, eq. 4)."""
    (chart,) = drawn("wavelength", "rope", scaling="linear", factor=4)
    before, after = chart.lines
    plain = 2 * math.pi / np.array(progression(8, 10_000.0))
    close(before.y, plain)
    close(after.y, 4 * plain)


def yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    """Peng et al. 2023, eq. 23: it depends on the number of rotations of a pair within the trained length."""
    given = {"scaling": "yarn", "factor": 8, "original_max_position_embeddings": 4096, "truncate": False}
    (chart,) = drawn("wavelength", "rope", hidden_size=256, **given)
    before, after = (np.array(line.y) for line in chart.lines)
    ratio, turns = after / before, 4096 / before
    close(ratio[turns >= 32], 1.0)
    close(ratio[turns <= 1], 8.0)
    between = ratio[(turns < 32) & (turns > 1)]
    assert len(between) > 8
    assert (np.diff(between) > 0).all()
    assert [mark.at for mark in chart.marks] == [4096]


def faster(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with results off by a hundredth."""

    def spoilt(*args: Any) -> Any:
        made = original(*args)
        return [1.01 * number for number in made] if isinstance(made, list) else 1.01 * made

    return spoilt


def all_linear(scalings: dict[str, Any]) -> dict[str, Any]:
    """Every scaling with the frequencies of the linear one."""

    def linear(theta: float, dim: int, dtype: Any, *, factor: float, **_: Any) -> Any:
        return scalings["linear"].frequencies(theta, dim, dtype, factor=factor)

    return {name: attrs.evolve(scaling, frequencies=linear) for name, scaling in scalings.items()}


def blind(*_: Any) -> None:
    """Every query sees every key."""


FAULTS: dict[Callable[[], None], tuple[str, Callable[[Any], Any]]] = {
    table_is_vaswanis: ("posexport.models.angles.inverse_frequencies", faster),
    table_is_a_rotation: ("posexport.models.scaling.inverse_frequencies", faster),
    bias_is_presses: ("posexport.models.biases.alibi_slopes", faster),
    bias_on_a_grid_is_a_distance: ("posexport.models.biases.alibi_slopes", faster),
    mask_is_what_is_seen: ("posexport.verify.probe.visible", lambda _: blind),
    decay_is_a_sum_of_cosines: ("posexport.models.scaling.inverse_frequencies", faster),
    gain_is_llamas: ("posexport.custom_ops.position_temperature", faster),
    wavelengths_are_interpolated: ("posexport.models.scaling.inverse_frequencies", faster),
    yarn_keeps_fast_pairs_and_slows_slow_ones: ("posexport.models.scaling.SCALINGS", all_linear),
}
"""For every check, the function of the encodings that is spoilt to make it fail."""


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_what_is_drawn(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("check", FAULTS, ids=lambda check: check.__name__)
def test_a_fault_in_an_encoding_shows(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    target, spoil = FAULTS[check]
    home, _, name = target.rpartition(".")
    monkeypatch.setattr(target, spoil(getattr(sys.modules[home], name)))
    with pytest.raises(AssertionError):
        check()


ONLY_CAUSAL = ("cope", "xpos")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_has_a_look_and_a_decay(encoding: str) -> None:
    look, decay = drawn(None, encoding, causal=encoding in ONLY_CAUSAL)
    assert isinstance(decay, Chart)
    for panel in (look, decay):
        assert panel.title == encoding
        assert ("random weights" in panel.note) == bool(ENCODINGS[encoding]().weights(small_spec("alibi")))
        numbers = [line.y for line in panel.lines] if isinstance(panel, Chart) else panel.rows
        assert np.isfinite(np.array(numbers)).any()
        json.dumps(panel.to_dict(), allow_nan=False)
    for line in decay.lines:
        assert line.y[line.x.index(0)] == 0


def test_heads_that_are_drawn_reach_from_the_first_to_the_last() -> None:
    assert [chosen_heads(count) for count in (1, 3, 4, 12)] == [[0], [0, 1, 2], [0, 1, 2, 3], [0, 4, 7, 11]]


def test_a_grid_is_asked_from_its_middle() -> None:
    """The column changes along x and the row along y. Their frequencies differ, so the curves differ."""
    (chart,) = drawn("decay", "rope2d", seq=9, theta_y=3.0)
    along_x, along_y = chart.lines
    assert along_x.x == along_y.x == tuple(range(4, -5, -1))
    half = [np.array(progression(4, theta)) for theta in (100.0, 3.0)]
    for line, frequencies in zip(chart.lines, half, strict=True):
        logits = 2 / math.sqrt(8) * np.cos(np.array(line.x)[:, None] * frequencies).sum(1)
        close(line.y, logits - logits[4])


SMALL = ("--hidden-size", "32", "--num-heads", "4")


def test_a_picture_is_drawn_and_told(tmp_path: Path) -> None:
    file = tmp_path / "compare.png"
    given = ("rope:scaling=linear:factor=2", "alibi:causal=true:window=5", *SMALL, "-o", file)
    result = cli("plot", *given)
    assert result.exit_code == 0, result.output
    first, *lines = result.stdout.splitlines()
    assert first == f"wrote {file}"
    assert [line.split(maxsplit=1)[0] for line in lines] == ["rope", "rope", "alibi", "alibi"]
    assert "scaling=linear factor=2, a query of ones, rotated" in lines[0]
    data = file.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height) == (1568, 1120)
    for chunk in (b"tIME", b"tEXt", b"iTXt"):
        assert chunk not in data
    assert cli("plot", *given[:-1], tmp_path / "again.png").exit_code == 0
    assert (tmp_path / "again.png").read_bytes() == data
    other = ("rope:scaling=linear:factor=3", *given[1:-1], tmp_path / "other.png")
    assert cli("plot", *other).exit_code == 0
    assert (tmp_path / "other.png").read_bytes() != data


@pytest.mark.slow
def test_an_svg_is_drawn_without_dates(tmp_path: Path) -> None:
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        assert cli("plot", "t5", "--what", "bias", *SMALL, "--seq", "16", "-o", file).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    root = xml.dom.minidom.parseString(files[0].read_bytes()).documentElement
    assert root is not None
    assert root.tagName == "svg"
    assert not root.getElementsByTagName("dc:date")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("value", ["", "abc", "9" * 20, "0"])
def test_no_variable_changes_an_svg(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib reads the variable as a date. It may be text, or a number that is too large."""
    rows = [drawn("decay", "rope", seq=8)]
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    usual = draw(rows, ".svg")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    assert draw(rows, ".svg") == usual
    assert os.environ["SOURCE_DATE_EPOCH"] == value


@pytest.mark.parametrize(
    ("variable", "says"),
    [("MPLBACKEND", "'bogus' is not a valid value"), ("MATPLOTLIBRC", "decode"), ("MPLCONFIGDIR", "decode")],
)
def test_settings_that_matplotlib_can_not_use_are_told_in_a_sentence(variable: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "stylelib").mkdir()
    for name in ("matplotlibrc", "stylelib/own.mplstyle"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    value = "bogus" if variable == "MPLBACKEND" else str(tmp_path)
    code = "from posexport.report.drawing import figure"
    environment = {**os.environ, variable: value}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    last = ended.stderr.splitlines()[-1]
    assert "RequestError: matplotlib, which draws, can't start (" in last, ended.stderr
    assert says in last and "check MPLBACKEND, MATPLOTLIBRC and MPLCONFIGDIR" in last


def test_matplotlib_warns_of_no_cache_and_its_logger_is_left_as_it_was(tmp_path: Path) -> None:
    code = "import logging, posexport.report.artists; print(logging.getLogger('matplotlib').level)"
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "MPLCONFIGDIR": str(tmp_path / "file/folder")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


def test_a_matrix_says_what_keeps_it_from_drawing_before_it_measures(tmp_path: Path) -> None:
    options = ["--encoding", "rope", "--form", "native", "--dtype", "fp32", "--mode", "prefill", "--runtime", "torch"]
    command = [sys.executable, "-m", "posexport", "matrix", *options, "-o", str(tmp_path / "m")]
    environment = {**os.environ, "MPLBACKEND": "bogus"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "matplotlib, which draws, can't start" in ended.stderr
    assert not (tmp_path / "m").exists()


def test_one_module_imports_matplotlib() -> None:
    """This module explains in a sentence why matplotlib can't start. In another module that would be a traceback."""
    folder = Path(posexport.__file__).parent
    importers = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"^\s*(from|import) matplotlib", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert importers == {"report/artists.py"}


def test_json_holds_the_numbers_that_are_drawn(tmp_path: Path) -> None:
    file = tmp_path / "mask.png"
    result = cli("plot", "alibi", "--what", "bias", "--causal", *SMALL, "--seq", "6", "-o", file, "--json")
    found = json.loads(result.stdout)
    assert found["file"] == str(file)
    assert file.exists()
    (row,) = found["rows"]
    (image, *_) = drawn("bias", "alibi", seq=6, causal=True)
    assert isinstance(image, Image)
    assert row[0] == json.loads(json.dumps(image.to_dict()))
    assert row[0]["rows"][0] == [0, None, None, None, None, None]


def test_errors_are_drawn_where_runtimes_are(tmp_path: Path) -> None:
    given = ("plot", "rope", "--what", "error", "--runtime", "torch", "-o", tmp_path / "error.png", "--json")
    ((chart,),) = json.loads(cli(*given).stdout)["rows"]
    assert [line["label"] for line in chart["lines"]] == ["parity, torch", "exact, torch"]
    parity, exact = (dict(zip(line["x"], line["y"], strict=True)) for line in chart["lines"])
    assert {0, 1, 255, 256, 2047, 65_535, 1_048_575} < parity.keys()
    assert max(exact.values()) < 2.5e-7 < 1e-3 < parity[1_048_575]
    assert [mark["at"] for mark in chart["marks"]] == [2.5e-7]


def test_a_runtime_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = attrs.evolve(RUNTIMES["ort-cpu"], package="no_such_package")
    monkeypatch.setitem(RUNTIMES, "ort-cpu", gone)
    given = ("plot", "rope", "--what", "error", *SMALL, "-o", tmp_path / "error.png")
    result = cli(*given, "--runtime", "torch", "--runtime", "ort-cpu")
    assert result.exit_code == 0
    assert "not run: ort-cpu (not installed: pip install 'onnxruntime')" in result.stdout
    before = tree(tmp_path)
    result = cli(*given, "--runtime", "ort-cpu")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no error could be measured (ort-cpu: not installed" in result.stderr
    assert tree(tmp_path) == before


def test_a_picture_that_breaks_off_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rope.png"
    file.write_bytes(b"old")

    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("posexport.files.os.fsync", full)
    refused(cli("plot", "none", *SMALL, "-o", file), "No space left on device")
    assert tree(tmp_path) == {"rope.png": b"old"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rpe"], "did you mean 'rope'?"),
        (["rope", "--what", "decya"], "unknown kind of picture 'decya': did you mean 'decay'?"),
        (["t5", "--what", "table"], "what is 'table' with t5, which adds nothing to the input and rotates nothing"),
        (["rope", "--what", "bias"], "which adds nothing to the logits: give one of table, mask, decay, wavelength"),
        (["rope", "--what", "gain"], "by no factor of their position"),
        (["alibi", "--what", "wavelength"], "which has no angles"),
        (["relative:table=learned", "--what", "error"], "whose learned table has no angles"),
        (["rope", "alibi", "--what", "error"], "what is 'error' with alibi, which has no angles of positions"),
        (["rope", "-o", "rope.pdf"], "must end in .png or .svg"),
        (["rope", "-o", "nowhere/rope.png"], "output folder 'nowhere' is not there"),
        (["rope:theta"], "'rope:theta' is no encoding: write NAME, or NAME:key=value:key=value"),
        (["rope:thta=2"], "unknown parameter of rope 'thta'"),
        (["rope:theta=x"], "theta is 'x'"),
        (["rope", "alibi", "--set", "theta=2"], "--set was given with several encodings"),
        (["rope", "--runtime", "torch"], "--runtime was given without --what error"),
        (["rope", "--what", "error", "--runtime", "tensort"], "unknown runtime 'tensort'"),
        (["rope", "--seq", "1"], "seq is '1': it must be a whole number from 2 to 1024"),
        (["rope", "--what", "wavelength", "--seq", "9"], "which shows no number of tokens"),
        (["rope3d", "--seq", "26"], "at most 16384 tokens are drawn"),
        (["learned:max_positions=16", "--seq", "20"], "learned has 16 positions, so give at most that"),
        (["rope:theta=0.5", "--what", "wavelength"], "theta is 0.5: wavelengths of less than two positions"),
        (["rope", "--head-dim", "100000000"], "the picture takes 1.5e+11 numbers at a time"),
        (["rope", "--what", "error", "--head-dim", "100000000"], "numbers at a time"),
        (["alibi", "--num-heads", "512", "--head-dim", "2", "--seq", "1024"], "numbers at a time"),
        (["sinusoidal"] * 51, "51 encodings were given: at most 50 are drawn together"),
        (["cope"], "cope was given without causal"),
        (["rope", "--dtype", "fp16"], "No such option"),
        ([], "ENCODING... is missing: give it, as "),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(cli("plot", *arguments), said)
    assert tree(tmp_path) == {}


def test_the_help_shows_every_kind() -> None:
    shown = cli("plot", "--help").stdout.splitlines()
    assert list(KINDS) == list(WHAT)
    assert shown[-len(WHAT) :] == [f"    {name:<11} {summary}" for name, summary in WHAT.items()]
