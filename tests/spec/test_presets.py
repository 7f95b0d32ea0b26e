"""Presets: the contents of every file, whether export keeps their structure, and `--preset` on the command line.

The structure of a preset is tested with fewer heads and a narrower model, with windows short enough to have an effect.
The slow sweep tests each preset at its true sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from helpers import Array, cli, exported, inputs_for, open_ort, refused, run_block, weights_for

from posexport.artifact.onnx_artifact import read_onnx
from posexport.errors import RequestError
from posexport.export.block_options import preset_options, spec_of
from posexport.models import read_spec
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt.api import can_build
from posexport.spec import presets
from posexport.spec.presets import preset_names, read_preset
from posexport.spec.spec import Spec
from posexport.verify import verify

pytestmark = pytest.mark.few_inputs

NAMES = preset_names()
FAST = ("gemma-3-4b", "llama-4-scout", "phi-3-mini-128k")
BOUND = 1e-4
"""The largest error in fp32, relative to the largest output. A planted fault must be a hundred times larger."""

MOST = {
    "window": 5,
    "attention_chunk_size": 6,
    "prefix_tokens": 3,
    "floor_scale": 4,
    "original_max_position_embeddings": 1000,
}
"""Upper limits in a shrunk preset for values that would have no effect on a few tokens."""


def true_spec(name: str) -> Spec:
    options = preset_options(name)
    return spec_of(options, options.pop("set", {}))


def smaller(data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data in which no value exceeds its limit in MOST, at any depth."""
    made = {key: smaller(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    return made | {key: min(made[key], most) for key, most in MOST.items() if made.get(key)}


def shrunk(name: str) -> Spec:
    """A preset with heads of the same width, but at most two key heads with at most three query heads each, and one
    layer of each kind."""
    data = smaller(true_spec(name).to_dict())
    kv_heads = min(data["num_kv_heads"], 2)
    heads = kv_heads * min(data["num_heads"] // data["num_kv_heads"], 3)
    hidden = data["hidden_size"] * heads // data["num_heads"]
    layers = [smaller(layer) for layer in data["layer_pattern"]]
    kinds = [layer for index, layer in enumerate(layers) if layer not in layers[:index]]
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "hidden_size": hidden}
    return read_spec({**data, **sizes, "layer_pattern": kinds, "layers": len(kinds) or 1})


def inputs(spec: Spec) -> list[dict[str, Array]]:
    """One batch with positions from zero, and one with arbitrary positions."""
    return [inputs_for(spec, 2, 7), inputs_for(spec, 1, 5, "uneven", seed=1)]


def error(got: Array, truth: Array) -> float:
    return float(np.abs(got - truth).max() / np.abs(truth).max())


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_a_block_and_says_which(name: str) -> None:
    preset, spec = read_preset(name), true_spec(name)
    assert preset.source.startswith(("https://huggingface.co/", "https://github.com/"))
    assert preset.summary[:1].isupper() or preset.summary.startswith(("gpt-oss", "wav2vec"))
    assert "\n" not in preset.summary and not preset.summary.endswith(".")
    assert (spec.layers, spec.dtype, spec.block, spec.kv_cache) == (1, "fp32", "attention", None)
    assert spec == read_spec(json.loads(spec.to_json()))


def test_true_numbers() -> None:
    """Values of some presets that are easy to get wrong."""
    llama4, oss, gemma3 = (true_spec(name) for name in ("llama-4-scout", "gpt-oss-20b", "gemma-3-4b"))
    assert [llama4.layer(index).encoding.name for index in range(5)] == ["rope", "rope", "rope", "temperature", "rope"]
    assert [llama4.layer(index).attention_chunk_size for index in (0, 3)] == [8192, None]
    assert [llama4.layer(index).qk_norm_type for index in (0, 3)] == ["l2", None]
    assert [oss.layer(index).window for index in range(3)] == [128, None, 128]
    assert oss.bias == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert [gemma3.layer(index).window for index in range(7)] == [*[1024] * 5, None, 1024]
    assert [gemma3.layer(index).to_dict()["encoding"]["theta"] for index in (0, 5)] == [10_000.0, 1_000_000.0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["decomposed", "function"])
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_shrunk_preset_is_the_torch_block(name: str, form: str) -> None:
    spec = shrunk(name)
    run = open_ort(exported(spec, form))
    for each in inputs(spec):
        truth = run_block(spec, weights_for(spec), each)
        assert error(run(each)["output"], truth) < BOUND


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "fault"), [("gpt-oss-20b", {"window": 6}), ("gpt-oss-20b", {"truncate": True})])
def test_another_structure_is_noticed(name: str, fault: dict[str, Any]) -> None:
    spec = shrunk(name)
    run = open_ort(exported(spec))
    data = spec.to_dict()
    for layer in data["layer_pattern"]:
        for part in (layer, layer["encoding"]):
            part |= {key: value for key, value in fault.items() if part.get(key) is not None}
    wrong = read_spec({**data, "encoding": data["layer_pattern"][0]["encoding"]})
    assert wrong != spec
    worst = max(error(run(each)["output"], run_block(wrong, weights_for(spec), each)) for each in inputs(spec))
    assert worst > 100 * BOUND


@pytest.mark.slow
def test_export_by_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli(
        "export", "--preset", "sam2-hiera", "--dtype", "fp16", "--set", "theta=100", "--no-bias", "--batch", "1"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    found = read_onnx(tmp_path / "sam2-hiera.onnx").spec
    wanted = true_spec("sam2-hiera")
    assert found == attrs.evolve(wanted, dtype="fp16", bias=False, encoding=attrs.evolve(wanted.encoding, theta=100.0))
    report = verify([tmp_path], runtimes={name: RUNTIMES[name] for name in ("torch", "ort-cpu")})
    assert [verdict.state for verdict in report.verdicts] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "llama-3.1-9b"), "unknown preset 'llama-3.1-9b': did you mean 'llama-3.1-8b'?"),
        (("--preset", "../py"), "unknown preset"),
        (("--preset", "t5-base", "--encoding", "rope"), "both preset and encoding were given"),
        (("--preset", "t5-base", "--config", "x.toml"), "both preset and config were given"),
        (("--preset", "t5-base", "--set", "theta=1"), "unknown parameter of t5 'theta'"),
        (("--preset", "t5-base", "--num-heads", "0"), "--num-heads is '0'"),
        (("--preset", "gemma-2-9b", "--window", "512"), "layers of layer_pattern have a window of their own"),
        (("--preset", "gemma-3-4b", "--set", "theta=1"), "layers of layer_pattern have a theta of their own"),
    ],
)
def test_a_wrong_request_is_refused(arguments: tuple[str, ...], said: str) -> None:
    refused(cli("export", *arguments), said)


@pytest.mark.slow
def test_a_pattern_of_ones_own_takes_the_place_of_a_presets(tmp_path: Path) -> None:
    own = ("--layer-pattern", "rope*2,none", "--window", "7", "--hidden-size", "32", "--num-heads", "2")
    more = ("--num-kv-heads", "1", "--head-dim", "16", "--layers", "3", "-o", tmp_path / "own.onnx")
    assert cli("export", "--preset", "gemma-2-9b", *own, *more).exit_code == 0
    found = read_onnx(tmp_path / "own.onnx").spec
    assert [(found.layer(index).encoding.name, found.layer(index).window) for index in range(3)] == [
        *[("rope", 7)] * 2,
        ("none", 7),
    ]
    assert found.softcap == 50


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_true_sizes(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.onnx"
    try:
        assert cli("export", "--preset", name, "--dtype", "fp16", "-o", path).exit_code == 0
        report = verify([path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]})
        assert [verdict.state for verdict in report.verdicts] == ["passed"], report.verdicts
        if can_build("tensorrt-rtx") is None:
            assert cli("compile", path, "--runtime", "tensorrt-rtx").exit_code == 0
    finally:
        for file in tmp_path.iterdir():  # up to a gigabyte
            file.unlink()


FILE = "summary = 'A model'\nsource = 'https://example.org'\nencoding = 'alibi'\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE + "hidden = 3", "unknown key in preset 'mine' 'hidden'"),
        (FILE + "form = 'native'", "unknown key in preset 'mine' 'form'"),
        (FILE + "num_heads = 2\nnum-heads = 2", "preset 'mine' gives num_heads twice"),
        (FILE.replace("summary", "title"), "preset 'mine' lacks its summary or its source"),
        (FILE.replace("'https://example.org'", "3"), "preset 'mine' lacks its summary or its source"),
    ],
)
def test_a_file_that_is_no_preset_is_refused(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    (tmp_path / "mine.txt").write_text("")
    monkeypatch.setattr(presets, "FOLDER", tmp_path)
    assert preset_names() == ["mine"]
    refused(cli("export", "--preset", "mine"), said)
    refused(cli("list", "--presets"), said)


def test_list_shows_all_presets() -> None:
    result = cli("list", "--presets")
    assert (result.exit_code, result.stderr) == (0, "")
    for name in NAMES:
        for part in (name, read_preset(name).summary, read_preset(name).source):
            assert part in result.stdout
    found = json.loads(cli("list", "--presets", "--json").stdout)["presets"]
    assert list(found) == NAMES
    assert found["gpt-oss-20b"]["options"]["set"]["truncate"] is False
    with pytest.raises(RequestError, match="unknown preset"):
        read_preset("gpt-oss-20b.toml")
