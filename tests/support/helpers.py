"""Small specs, positions and runs that several test files share. The cases are the encodings with their variants."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from click.testing import CliRunner, Result

from posexport.cli import main
from posexport.export import export
from posexport.export.layer_pattern import read_pattern
from posexport.models import ENCODINGS, read_spec
from posexport.models.block import build_block
from posexport.models.weights import TORCH_DTYPES, seeded_weights
from posexport.spec.spec import Spec

Array = np.ndarray[Any, Any]

LONG = {"factor": 4, "original_max_position_embeddings": 500}

CASES: dict[str, dict[str, Any]] = {
    "none": {"encoding": "none"},
    "learned": {"encoding": "learned"},
    "sinusoidal": {"encoding": "sinusoidal"},
    "sinusoidal-half": {"encoding": "sinusoidal", "layout": "half", "order": "cos-sin", "theta": 500.0},
    "relative": {"encoding": "relative"},
    "relative-table": {"encoding": "relative", "table": "learned", "max_distance": 9},
    "t5": {"encoding": "t5", "num_buckets": 16, "max_distance": 20},
    "t5-causal": {"encoding": "t5", "num_buckets": 8, "max_distance": 20, "causal": True},
    "rope": {"encoding": "rope"},
    "rope-half": {"encoding": "rope", "layout": "half", "theta": 500.0},
    "rope-partial": {"encoding": "rope", "rotary_dim": 4},
    "rope-half-partial": {"encoding": "rope", "layout": "half", "rotary_dim": 6},
    "rope2d": {"encoding": "rope2d"},
    "rope2d-half": {"encoding": "rope2d", "layout": "half"},
    "alibi": {"encoding": "alibi"},
    "alibi-6-heads": {"encoding": "alibi", "num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "causal": True},
    "rope-gqa-window": {"encoding": "rope", "num_kv_heads": 2, "causal": True, "window": 3, "bias": True},
    "alibi-mqa-window": {"encoding": "alibi", "num_kv_heads": 1, "window": 2, "bias": ["v_proj", "o_proj"]},
}
"""A short name for each encoding and its main variants, with arguments of `small_spec`."""

MORE_CASES: dict[str, dict[str, Any]] = {
    "rope-exact": {"encoding": "rope", "angles": "exact", "prefix_tokens": 2},
    "rope-linear": {"encoding": "rope", "scaling": "linear", "factor": 8},
    "rope-ntk": {"encoding": "rope", "scaling": "ntk", "factor": 8, "layout": "half"},
    "rope-dynamic": {"encoding": "rope", "scaling": "dynamic", **LONG},
    "rope-yarn": {"encoding": "rope", "scaling": "yarn", **LONG, "layout": "half", "head_dim": 24},
    "rope-yarn-mscale": {
        **{"encoding": "rope", "scaling": "yarn", **LONG, "mscale": 0.7, "mscale_all_dim": 1.0, "head_dim": 16},
        **{"truncate": False, "beta_fast": 16, "beta_slow": 2, "theta": 300.0},
    },
    "rope-longrope": {
        **{"encoding": "rope", "scaling": "longrope", **LONG, "layout": "half"},
        **{"short_factor": [1, 1.1, 1.5, 2], "long_factor": [1, 2, 5, 9]},
    },
    "rope-longrope-exact": {
        **{"encoding": "rope", "scaling": "longrope", **LONG, "angles": "exact", "attention_factor": 1.25},
        **{"short_factor": [1, 1.1, 1.5, 2], "long_factor": [1, 2, 5, 9]},
    },
    "rope-llama3": {"encoding": "rope", "scaling": "llama3", **LONG, "head_dim": 16, "theta": 300.0},
    "rope-proportional": {"encoding": "rope", "scaling": "proportional", "partial_rotary_factor": 0.5, "factor": 2},
    "rope-l2": {"encoding": "rope", "qk_norm": True, "qk_norm_type": "l2", "norm_eps": 0.05},
    "rope-chunks": {"encoding": "rope", "causal": True, "attention_chunk_size": 3},
    "rope2d-pixtral": {"encoding": "rope2d", "spacing": "alternate", "order": "yx", "layout": "half-head"},
    "rope2d-thetas": {"encoding": "rope2d", "order": "yx", "theta_y": 30.0, "factor": 1.5, "prefix_tokens": 1},
    "rope3d": {"encoding": "rope3d", "head_dim": 12},
    "rope3d-half": {"encoding": "rope3d", "layout": "half", "split": [4, 6, 4], "order": "xyt", "head_dim": 16},
    "rope3d-thetas": {"encoding": "rope3d", "theta_t": 50.0, "theta_y": 90.0, "layout": "half-head", "angles": "exact"},
    "mrope": {"encoding": "mrope", "mrope_section": [1, 2, 1]},
    "mrope-interleaved": {"encoding": "mrope", "mrope_interleaved": True, "mrope_section": [4, 2, 2], "head_dim": 16},
    "mrope-yarn": {"encoding": "mrope", "scaling": "yarn", **LONG, "angles": "exact", "num_kv_heads": 2},
    "rope-mixed": {"encoding": "rope-mixed"},
    "rope-mixed-half": {"encoding": "rope-mixed", "layout": "half", "prefix_tokens": 1},
    "rope-dinov3": {"encoding": "rope-dinov3", "prefix_tokens": 2},
    "rope-dinov3-grid": {"encoding": "rope-dinov3", "grid": [40, 30]},
    "rope-vjepa2": {"encoding": "rope-vjepa2", "head_dim": 14, "prefix_tokens": 1},
    "xpos": {"encoding": "xpos", "causal": True},
    "xpos-half": {"encoding": "xpos", "causal": True, "layout": "half", "gamma": 0.6, "scale_base": 300},
    "temperature": {"encoding": "temperature", "floor_scale": 4, "attn_scale": 0.5},
    "alibi-slopes": {"encoding": "alibi", "slopes": [1, 0.5, 0.1, 2], "slopes_ahead": [0.3, 0.2, 0.7, 0.6]},
    "alibi2d": {"encoding": "alibi2d"},
    "alibi2d-manhattan": {"encoding": "alibi2d", "distance": "manhattan", "slopes": [1, 0.5, 0.1, 2]},
    "kerple": {"encoding": "kerple"},
    "kerple-power": {"encoding": "kerple", "kernel": "power"},
    "sandwich": {"encoding": "sandwich"},
    "sandwich-sinks": {"encoding": "sandwich", "sinks": True, "angles": "exact"},
    "fire": {"encoding": "fire", "init_L": 6, "mlp_width": 8},
    "shaw": {"encoding": "shaw", "max_distance": 3},
    "shaw-keys": {
        **{"encoding": "shaw", "max_distance": 4, "max_distance_ahead": 0, "relative_values": False},
        **{"num_kv_heads": 2, "sinks": True},
    },
    "shaw-sinks": {"encoding": "shaw", "max_distance": 3, "num_kv_heads": 2, "sinks": True, "window": 4},
    "deberta": {"encoding": "deberta", "max_relative_positions": 6},
    "deberta-buckets": {
        "encoding": "deberta",
        "max_relative_positions": 40,
        "position_buckets": 8,
        "pos_bias": True,
        "bias": True,
    },
    "deberta-p2c": {"encoding": "deberta", "max_relative_positions": 6, "pos_att_type": "p2c"},
    "cope": {"encoding": "cope", "causal": True, "npos_max": 4},
    "cope-gqa": {"encoding": "cope", "causal": True, "npos_max": 8, "num_kv_heads": 2, "window": 5},
    "swin": {"encoding": "swin", "window_size": 4},
    "swinv2": {"encoding": "swinv2", "window_size": 4, "bias": ["q_proj", "v_proj", "o_proj"]},
    "swinv2-pretrained": {"encoding": "swinv2", "window_size": 5, "pretrained_window_size": 3},
    "pattern": {"encoding": "rope", "pattern": "rope:window=3:theta=50,rope:scaling=linear:factor=2,none", "layers": 4},
}
"""Further encodings and variants. Tests run them for fewer lengths and positions than those of CASES."""

KINDS = ("consecutive", "offset", "gaps", "shuffled", "uneven")
"""Positions: 0 1 2 ..., far from 0, with gaps, in random order, and different in each sequence of the batch."""


def small_spec(encoding: str, pattern: str | None = None, **over: Any) -> Spec:
    """A spec of hidden size 32 with 4 heads. `over` sets fields of the encoding and of the spec."""
    own = {field.name for field in attrs.fields(ENCODINGS[encoding])}
    parameters = {key: value for key, value in over.items() if key in own}
    fields = {"hidden_size": 32, "num_heads": 4, **{key: value for key, value in over.items() if key not in own}}
    if encoding == "learned":
        parameters = {"max_positions": 64, **parameters}
    own_encoding = {"name": encoding, **parameters}
    if pattern is not None:
        fields["layer_pattern"] = read_pattern(pattern, own_encoding)
        own_encoding = fields["layer_pattern"][0]["encoding"]
    return read_spec({"encoding": own_encoding, **fields})


def by_turns(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test. Every second one runs only in the slow sweep."""
    return [pytest.param(*each, marks=[] if at % 2 == 0 else pytest.mark.slow) for at, each in enumerate(cases)]


def case(name: str, **over: Any) -> Spec:
    """The spec of one of CASES or MORE_CASES."""
    return small_spec(**{**(CASES.get(name) or MORE_CASES[name]), **over})


def positions_for(spec: Spec, batch: int, seq: int, kind: str = "consecutive", seed: int = 0) -> Array:
    """int64 positions [batch, seq] or [batch, seq, axes] of one of KINDS, within the encoding's own limit."""
    random = np.random.default_rng(seed)
    limit = spec.position_limit() or 2000
    shape = (batch, seq, max(spec.position_axes, 1))
    steps = np.arange(seq)[None, :, None]
    makers: dict[str, Callable[[], Array]] = {
        "consecutive": lambda: np.broadcast_to(steps, shape),
        "offset": lambda: np.broadcast_to(steps + (limit - seq) // 2, shape),
        "gaps": lambda: np.sort(random.choice(limit, shape, replace=int(np.prod(shape)) > limit), axis=1),
        "shuffled": lambda: np.broadcast_to(random.permutation(seq)[None, :, None], shape),
        "uneven": lambda: random.integers(0, limit, shape),
    }
    made = np.array(makers[kind](), np.int64) % limit
    made = np.sort(made, 1) if spec.ordered else made
    return made[..., 0] if spec.position_axes < 2 else made


def inputs_for(spec: Spec, batch: int, seq: int, kind: str = "consecutive", seed: int = 0) -> dict[str, Array]:
    """Inputs of the graph by name: unit normal `hidden_states` in the spec's dtype (or random `input_ids`)."""
    random = np.random.default_rng(seed)
    if spec.vocab_size is not None:
        inputs: dict[str, Array] = {"input_ids": random.integers(0, spec.vocab_size, (batch, seq))}
    else:
        dtype = {"fp32": np.float32, "fp16": np.float16}[spec.dtype]
        inputs = {"hidden_states": random.standard_normal((batch, seq, spec.hidden_size)).astype(dtype)}
    if spec.position_axes:
        inputs["position_ids"] = positions_for(spec, batch, seq, kind, seed)
    return inputs


@functools.cache
def weights_for(spec: Spec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Seeded weights in the spec's dtype, made once per spec."""
    return seeded_weights(spec, seed)


def as_float64(weights: dict[str, torch.Tensor]) -> dict[str, Array]:
    """Torch weights as numpy float64, for the oracles."""
    return {name: tensor.to(torch.float64).numpy() for name, tensor in weights.items()}


def run_block(spec: Spec, weights: dict[str, torch.Tensor], inputs: dict[str, Array], dtype: str = "fp64") -> Array:
    """The output of the torch block, run in a dtype, as a float64 array."""
    block = build_block(spec, weights, getattr(torch, TORCH_DTYPES[dtype]))
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    tensors = [t.to(getattr(torch, TORCH_DTYPES[dtype])) if t.is_floating_point() else t for t in tensors]
    out = block(*tensors)
    made: Array = (out[0] if isinstance(out, tuple) else out).to(torch.float64).numpy()
    return made


@functools.cache
def exported(spec: Spec, form: str = "decomposed", opset: int | None = None, **fixed: int) -> ir.Model:
    """An exported model with the seeded weights, made once per process."""
    return export(spec, weights_for(spec), form=form, opset=opset, **fixed)


def open_ort(model: ir.Model | onnx.ModelProto | Path) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """Open a model (or the file at a path) on ONNX Runtime's CPU provider. Returns a function from inputs to all
    outputs by name."""
    source: str | bytes
    if isinstance(model, Path):
        source = str(model)
    else:
        source = (model if isinstance(model, onnx.ModelProto) else ir.to_proto(model)).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def run_ort(model: ir.Model | onnx.ModelProto | Path, inputs: dict[str, Array]) -> dict[str, Array]:
    """Open a model and run it once."""
    return open_ort(model)(inputs)


def cli(*arguments: str | Path) -> Result:
    """Run `posexport` with these arguments in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result: Result, *said: str) -> str:
    """Check that a run was refused: exit code 2, one sentence on stderr that contains `said`, and nothing on stdout."""
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    sentence, end = result.stderr[:-1], result.stderr[-1:]
    assert end == "\n"
    assert "\n" not in sentence
    assert sentence.startswith("Error: ")
    assert sentence.endswith((".", "?"))
    for part in said:
        assert part in sentence, sentence
    return sentence


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, including hidden ones, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


CHILD_PATH = os.pathsep.join(str(folder) for folder in sorted(Path(__file__).parents[1].iterdir()) if folder.is_dir())
"""The PYTHONPATH with which a child process finds the helpers and engines of the tests."""
