"""Input that `export` refuses: exit code 2, one sentence that says what is allowed, and no files left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, refused, small_spec, tree, weights_for
from safetensors.torch import save_file

SMALL = ("--hidden-size", "32", "--num-heads", "4")
ROPE_OF_32 = ("--encoding", "rope", "--hidden-size", "32")
ROPE_OF_4 = ("--encoding", "rope", "--num-heads", "4")
ROPE = ("--encoding", "rope", *SMALL)
INF = float("inf")

REQUESTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no encoding": (SMALL, ("no encoding was given", "rope2d")),
    "encoding": (("--encoding", "ropee"), ("unknown encoding 'ropee'", "did you mean 'rope'?", "alibi")),
    "encoding of nothing near": (("--encoding", "zzz"), ("unknown encoding 'zzz': allowed: none, learned",)),
    "form": ((*ROPE, "--form", "functoin"), ("unknown form", "did you mean 'function'?", "decomposed")),
    "opset too low": ((*ROPE, "--opset", "17"), ("opset is 17", "18 to 25")),
    "opset too high": ((*ROPE, "--opset", "99"), ("opset is 99", "18 to 25")),
    "opset no number": ((*ROPE, "--opset", "x"), ("opset is 'x'", "a whole number")),
    "parameter": ((*ROPE, "--set", "teta=3"), ("unknown parameter of rope 'teta'", "did you mean 'theta'?", "layout")),
    "parameter of another": ((*ROPE, "--set", "num_buckets=8"), ("unknown parameter of rope", "theta, layout")),
    "name as parameter": ((*ROPE, "--set", "name=alibi"), ("unknown parameter of rope 'name'",)),
    "no value": ((*ROPE, "--set", "theta"), ("parameter 'theta' is not KEY=VALUE",)),
    "layout": ((*ROPE, "--set", "layout=halves"), ("unknown layout", "did you mean 'half'?")),
    "odd rotary dim": ((*ROPE, "--set", "rotary_dim=5"), ("rotary_dim is 5 with head_dim 8", "even")),
    "rotary dim above head": ((*ROPE, "--set", "rotary_dim=10"), ("rotary_dim is 10", "at most head_dim")),
    "odd head": ((*ROPE, "--head-dim", "7"), ("rotary_dim is 7 with head_dim 7", "even")),
    "rope2d by 4": (("--encoding", "rope2d", *SMALL, "--head-dim", "6"), ("head_dim is 6", "divisible by 4")),
    "odd hidden": (("--encoding", "sinusoidal", "--hidden-size", "9", "--num-heads", "3"), ("hidden_size 9 is odd",)),
    "odd hidden, relative": (
        ("--encoding", "relative", "--hidden-size", "9", "--num-heads", "3"),
        ("hidden_size 9 is odd",),
    ),
    "heads": ((*ROPE_OF_32, "--num-heads", "5"), ("hidden_size 32 is not divisible by num_heads 5", "head_dim")),
    "kv heads": ((*ROPE, "--num-kv-heads", "3"), ("num_heads 4 is not divisible by num_kv_heads 3",)),
    "zero heads": ((*ROPE_OF_32, "--num-heads", "0"), ("--num-heads is '0'", "a whole number from 1")),
    "huge": ((*ROPE_OF_4, "--hidden-size", "99999999999"), ("--hidden-size is '99999999999'", "2147483647")),
    "more weights than memory": ((*ROPE_OF_4, "--hidden-size", "2147483640"), ("GB of memory are free",)),
    "layers without end": ((*ROPE, "--layers", "2000000000"), ("layers is '2000000000'", "from 1 to 1000")),
    "distances without end": (
        ("--encoding", "t5", *SMALL, "--set", "max_distance=2000000000"),
        ("max_distance is '2000000000'", "from 1 to 1048576"),
    ),
    "fraction": ((*ROPE, "--layers", "1.5"), ("layers is '1.5'", "a whole number")),
    "theta 0": ((*ROPE, "--set", "theta=0"), ("theta is '0'", "a number from 1e-30 to 1e+30")),
    "theta below 0": ((*ROPE, "--set", "theta=-1"), ("theta is '-1'", "a number from 1e-30 to 1e+30")),
    "theta nan": ((*ROPE, "--set", "theta=nan"), ("theta is 'nan'", "a number from 1e-30 to 1e+30")),
    "theta inf": ((*ROPE, "--set", "theta=inf"), ("theta is 'inf'", "a number from 1e-30 to 1e+30")),
    "theta beyond fp32": ((*ROPE, "--set", "theta=1e-50"), ("theta is '1e-50'", "a number from 1e-30 to 1e+30")),
    "softcap beyond fp32": ((*ROPE, "--softcap", "1e39"), ("softcap is '1e39'", "a number from 1e-30 to 1e+30")),
    "a sequence larger than memory": (
        (*ROPE, "--batch", "2000000000", "--seq", "2000000000"),
        ("does not fit in memory", "leave them dynamic"),
    ),
    "theta text": ((*ROPE, "--set", "theta=big"), ("theta is 'big'", "a number from 1e-30 to 1e+30")),
    "theta 2d": (("--encoding", "rope2d", *SMALL, "--set", "theta=-2"), ("theta is '-2'",)),
    "scale": ((*ROPE, "--scale", "0"), ("scale is '0'", "a number from 1e-30 to 1e+30")),
    "window 0": ((*ROPE, "--window", "0"), ("window is '0'", "a whole number from 1")),
    "window below 0": ((*ROPE, "--window", "-4"), ("window is '-4'", "a whole number from 1")),
    "buckets": (("--encoding", "t5", *SMALL, "--set", "num_buckets=6"), ("num_buckets is 6", "divisible by 4")),
    "odd buckets, causal": (
        ("--encoding", "t5", *SMALL, "--causal", "--set", "num_buckets=7"),
        ("num_buckets is 7", "divisible by 2 when causal"),
    ),
    "distance below buckets": (
        ("--encoding", "t5", *SMALL, "--set", "max_distance=8"),
        ("max_distance is 8", "above 8"),
    ),
    "distance of sinusoids": (
        ("--encoding", "relative", *SMALL, "--set", "max_distance=9"),
        ("max_distance needs table=learned",),
    ),
    "theta of a table": (
        ("--encoding", "relative", *SMALL, "--set", "table=learned", "--set", "theta=9"),
        ("theta needs table=sinusoidal",),
    ),
    "norm of attention": ((*ROPE, "--norm", "pre"), ("norm is 'pre' but block is 'attention'",)),
    "mlp of attention": ((*ROPE, "--mlp", "gelu"), ("mlp is 'gelu' but block is 'attention'",)),
    "width of attention": ((*ROPE, "--intermediate-size", "9"), ("intermediate_size is 9 but block is",)),
    "scale without embedding": ((*ROPE, "--scale-embedding"), ("scale_embedding needs a token embedding",)),
    "dtype": ((*ROPE, "--dtype", "fp8"), ("unknown dtype 'fp8'", "bf16")),
    "block": ((*ROPE, "--block", "transformers"), ("unknown block", "did you mean 'transformer'?")),
    "seed": ((*ROPE, "--seed", "-1"), ("seed is '-1'", "from 0")),
    "batch": ((*ROPE, "--batch", "0"), ("batch is '0'", "from 1")),
    "unknown option": ((*ROPE, "--hiden-size", "3"), ("--hiden-size", "--hidden-size")),
    "an option twice": ((*ROPE, "--form", "function", "--form", "native"), ("--form was given 2 times: give it once",)),
    "both of a pair": ((*ROPE, "--causal", "--no-causal"), ("--causal/--no-causal was given 2 times",)),
    "option without its value": ((*ROPE, "--opset"), ("--opset",)),
    "config not there": ((*ROPE, "--config", "none.toml"), ("config 'none.toml' can't be read",)),
    "weights not there": ((*ROPE, "--weights", "none.safetensors"), ("none.safetensors", "can't be read")),
    "weights and seed": ((*ROPE, "--weights", "w.safetensors", "--seed", "1"), ("both weights and seed",)),
    "no onnx": ((*ROPE, "-o", "block.pb"), ("must end in .onnx", "block.onnx")),
    "no folder": ((*ROPE, "-o", "nowhere/block.onnx"), ("output folder 'nowhere' is not there",)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", REQUESTS)
def test_export_refuses(name: str, folder: Path) -> None:
    arguments, said = REQUESTS[name]
    refused(cli("export", *arguments), *said)
    assert tree(folder) == {}


def test_output_is_a_folder(folder: Path) -> None:
    (folder / "block.onnx").mkdir()
    refused(cli("export", *ROPE, "-o", "block.onnx"), "output 'block.onnx' is a folder")
    assert tree(folder) == {}


def test_manifest_is_a_folder(folder: Path) -> None:
    (folder / "block.onnx.json").mkdir()
    refused(cli("export", *ROPE, "-o", "block.onnx"), "output 'block.onnx.json' is a folder")
    assert tree(folder) == {}


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The weights of the small t5 block with some replaced, or left out if None."""
    weights: dict[str, Any] = {**weights_for(small_spec("t5")), **{k.replace("__", "."): v for k, v in tensors.items()}}
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


TABLE = "encoding.relative_attention_bias.weight"
WEIGHTS: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], tuple[str, ...]]] = {
    "missing": (lambda: changed(k_proj__weight=None), ("lack 'k_proj.weight' [32, 32]",)),
    "of the encoding missing": (
        lambda: changed(encoding__relative_attention_bias__weight=None),
        (f"lack '{TABLE}' [32, 4]",),
    ),
    "extra": (lambda: changed(p_proj__weight=torch.zeros(2)), ("hold 'p_proj.weight'", "no place")),
    "layers of a deeper block": (
        lambda: {f"layers.0.{name}": tensor for name, tensor in changed().items()},
        ("lack 'q_proj.weight'",),
    ),
    "shape": (lambda: changed(q_proj__weight=torch.zeros(32, 16)), ("'q_proj.weight' has shape [32, 16]", "[32, 32]")),
    "bias of a wrong shape": (lambda: changed(q_proj__bias=torch.zeros(31)), ("'q_proj.bias' has shape [31]", "[32]")),
    "nan": (lambda: changed(v_proj__weight=torch.full((32, 32), torch.nan)), ("'v_proj.weight' holds NaN or Inf",)),
    "inf": (lambda: changed(o_proj__bias=torch.full((32,), INF)), ("'o_proj.bias' holds NaN or Inf",)),
    "integers": (lambda: changed(q_proj__weight=torch.ones(32, 32, dtype=torch.int64)), ("floating-point",)),
    "eight bits": (
        lambda: changed(q_proj__weight=torch.ones(32, 32).to(torch.float8_e4m3fn)),
        ("'q_proj.weight'", "float8_e4m3fn"),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_refused(name: str, folder: Path) -> None:
    make, said = WEIGHTS[name]
    save_file(make(), "w.safetensors")
    before = tree(folder)
    refused(cli("export", "--encoding", "t5", *SMALL, "--weights", "w.safetensors"), "w.safetensors", *said)
    assert tree(folder) == before


def test_weights_that_overflow_the_dtype(folder: Path) -> None:
    save_file(changed(q_proj__weight=torch.full((32, 32), 1e5)), "w.safetensors")
    arguments = ("export", "--encoding", "t5", *SMALL, "--weights", "w.safetensors", "--dtype", "fp16")
    refused(cli(*arguments), "'q_proj.weight' overflows in fp16", "bf16 or fp32")


def test_biases_asked_for_that_the_file_lacks(folder: Path) -> None:
    save_file(changed(), "w.safetensors")
    refused(cli("export", "--encoding", "t5", *SMALL, "--weights", "w.safetensors", "--bias"), "bias was given")


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{not json at all}"])
def test_unreadable_weights(folder: Path, content: bytes) -> None:
    (folder / "w.safetensors").write_bytes(content)
    refused(cli("export", *ROPE, "--weights", "w.safetensors"), "w.safetensors", "can't be read")


def test_truncated_weights(folder: Path) -> None:
    save_file(changed(), "w.safetensors")
    whole = (folder / "w.safetensors").read_bytes()
    for length in (4, 100, len(whole) - 1):
        (folder / "w.safetensors").write_bytes(whole[:length])
        refused(cli("export", *ROPE, "--weights", "w.safetensors"), "w.safetensors", "can't be read")


def test_weights_are_a_folder(folder: Path) -> None:
    (folder / "w.safetensors").mkdir()
    refused(cli("export", *ROPE, "--weights", "w.safetensors"), "w.safetensors", "can't be read")


CONFIGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown key": ("encoding = 'rope'\nhiden_size = 3", ("unknown key", "hiden_size", "did you mean 'hidden_size'?")),
    "unknown parameter": ("encoding = 'rope'\n[set]\nbase = 3", ("unknown parameter of rope 'base'",)),
    "not TOML": ("encoding = rope", ("is not TOML", "line 1")),
    "set is no table": ("encoding = 'rope'\nset = 3", ("set must be a table",)),
    "text for a number": ("encoding = 'rope'\nhidden-size = 'big'", ("hidden_size is 'big'",)),
    "list for a number": ("encoding = 'rope'\nhidden-size = [3]", ("hidden_size is [3]",)),
    "yes for a number": ("encoding = 'rope'\nlayers = true", ("layers is True", "a whole number")),
    "number for yes": ("encoding = 'rope'\ncausal = 1", ("causal is 1", "true or false")),
    "number for a name": ("encoding = 'rope'\ndtype = 16", ("unknown dtype '16'",)),
    "list for a name": ("encoding = ['rope']", ("unknown encoding",)),
    "list for a form": ("encoding = 'rope'\nform = ['function']", ("form",)),
    "number for weights": ("encoding = 'rope'\nweights = 5", ("weights",)),
    "number for the output": ("encoding = 'rope'\noutput = 5", ("output",)),
    "theta nan": ("encoding = 'rope'\n[set]\ntheta = nan", ("theta is nan",)),
    "bias of nothing": ("encoding = 'rope'\nbias = ['p_proj']", ("unknown projection in bias 'p_proj'", "q_proj")),
    "bias is a number": ("encoding = 'rope'\nbias = 3", ("bias is 3", "true, false or a list")),
    "bias of an absent MLP": ("encoding = 'rope'\nbias = ['mlp.fc1']", ("unknown projection in bias 'mlp.fc1'",)),
    "json": ("encoding = 'rope'\njson = true", ("unknown key", "json")),
    "config in config": ("encoding = 'rope'\nconfig = 'x.toml'", ("unknown key", "config")),
    "nested beyond reason": ("encoding = " + "[" * 5000, ("is not TOML",)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_refused(name: str, folder: Path) -> None:
    text, said = CONFIGS[name]
    (folder / "block.toml").write_text(text)
    refused(cli("export", "--config", "block.toml"), *said)
    assert list(tree(folder)) == ["block.toml"]


def test_config_of_bytes_that_are_no_text(folder: Path) -> None:
    (folder / "block.toml").write_bytes(b"\xff\xfe\x00")
    refused(cli("export", "--config", "block.toml"), "block.toml", "is not TOML")


@pytest.mark.parametrize("command", ["exprt", "lst", "inspct"])
def test_unknown_command(command: str) -> None:
    refused(cli(command), command)
