"""Small specs, positions and runs that several test files share. The cases are the encodings with their variants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from click.testing import CliRunner, Result

from posexport.cli import main
from posexport.export import export
from posexport.models import ENCODINGS, read_spec
from posexport.models.block import build_block
from posexport.models.weights import TORCH_DTYPES, seeded_weights
from posexport.spec import Spec

Array = np.ndarray[Any, Any]

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
"""A short name for each encoding with the variants that matter: arguments of `small_spec`."""

KINDS = ("consecutive", "offset", "gaps", "shuffled", "uneven")
"""Positions: 0 1 2 ..., far from 0, with gaps, in no order, and different in each sequence of the batch."""


def small_spec(encoding: str, **over: Any) -> Spec:
    """A spec of hidden size 32 with 4 heads; `over` sets fields of the encoding and of the spec alike."""
    own = {field.name for field in attrs.fields(ENCODINGS[encoding])}
    parameters = {key: value for key, value in over.items() if key in own}
    fields = {"hidden_size": 32, "num_heads": 4, **{key: value for key, value in over.items() if key not in own}}
    if encoding == "learned":
        parameters = {"max_positions": 64, **parameters}
    return read_spec({"encoding": {"name": encoding, **parameters}, **fields})


def case(name: str, **over: Any) -> Spec:
    """The spec of one of CASES."""
    return small_spec(**{**CASES[name], **over})


def positions_for(spec: Spec, batch: int, seq: int, kind: str = "consecutive", seed: int = 0) -> Array:
    """int64 positions [batch, seq] or [batch, seq, axes] of one of KINDS, within the encoding's own limit."""
    random = np.random.default_rng(seed)
    limit = spec.encoding.position_limit() or 2000
    shape = (batch, seq, max(spec.encoding.axes, 1))
    steps = np.arange(seq)[None, :, None]
    makers: dict[str, Callable[[], Array]] = {
        "consecutive": lambda: np.broadcast_to(steps, shape),
        "offset": lambda: np.broadcast_to(steps + (limit - seq) // 2, shape),
        "gaps": lambda: np.sort(random.choice(limit, shape, replace=seq > limit), axis=1),
        "shuffled": lambda: np.broadcast_to(random.permutation(seq)[None, :, None], shape),
        "uneven": lambda: random.integers(0, limit, shape),
    }
    made = np.array(makers[kind](), np.int64)
    return made[..., 0] if spec.encoding.axes < 2 else made


def inputs_for(spec: Spec, batch: int, seq: int, kind: str = "consecutive", seed: int = 0) -> dict[str, Array]:
    """Inputs of the graph by name: unit normal `hidden_states` in the spec's dtype (or random `input_ids`)."""
    random = np.random.default_rng(seed)
    if spec.vocab_size is not None:
        inputs: dict[str, Array] = {"input_ids": random.integers(0, spec.vocab_size, (batch, seq))}
    else:
        dtype = {"fp32": np.float32, "fp16": np.float16}[spec.dtype]
        inputs = {"hidden_states": random.standard_normal((batch, seq, spec.hidden_size)).astype(dtype)}
    if spec.encoding.axes:
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
    """The output of the torch block in a dtype, as a float64 array."""
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
    """Open a model (or the file at a path) on ONNX Runtime's CPU provider: inputs to every output, by name."""
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
    """Check that a run was refused: exit code 2, one sentence on stderr which holds `said`, nothing on stdout."""
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
    """Every file under a folder, hidden ones too, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
