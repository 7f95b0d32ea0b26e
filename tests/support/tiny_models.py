"""Small random checkpoints that transformers writes. Its own models are the oracles for the exported files."""

from __future__ import annotations

import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import torch

transformers: Any = pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path += [str(SCRIPTS / name) for name in ("suite", "whole")]

from building import build  # noqa: E402
from table import ARCHITECTURES  # noqa: E402
from whole_rows import ROWS  # noqa: E402

Array = npt.NDArray[Any]

TWO_LAYERS = ("llama", "gpt2", "bart")
"""Architectures with equal layers. Two layers show the same as four, and are exported in half the time."""


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def checkpoint(name: str, dtype: str = "float32", **layers: int) -> Path:
    """The folder of a random checkpoint. The architectures are those of `scripts/whole_models`, which have four layers.
    `layers` are options that change this."""
    folder, row = Path(_root().name) / "-".join((name, dtype, *map(str, layers.values()))), ROWS[name]
    if name in TWO_LAYERS:
        row = attrs.evolve(row, options=ARCHITECTURES[name].options)
    model = build(attrs.evolve(row, options={**row.options, **layers}))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@cache
def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model with its eager implementation of attention."""
    import json

    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    options = {"dtype": dtype, "attn_implementation": "eager"}
    return getattr(transformers, kind).from_pretrained(folder, **options).eval().requires_grad_(False)


def session(path: Path) -> onnxruntime.InferenceSession:
    """The file on ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def error(made: Array, wanted: Array, real: Array | None = None) -> float:
    """The largest difference relative to the largest value, over the tokens that are `real`."""
    assert made.shape == wanted.shape
    difference = np.abs(made.astype(np.float64) - wanted)
    return float(difference.max() if real is None else difference[real.astype(bool)].max()) / float(
        np.abs(wanted).max()
    )


def _sizes(shape: list[int | str], tokens: int) -> list[int]:
    """The sizes of a cache. States have no axis of tokens."""
    return [size if isinstance(size, int) else tokens for size in shape]


PADDING, LENGTH = (0, 2, 4), 14
CHUNKS = (9, 1, 3, 1)
"""A prompt with an empty cache, a token, a chunk and a token."""


def padded_batch(seed: int = 0) -> dict[str, Array]:
    """Rows of tokens with padding on the left, and the positions that transformers counts for them."""
    ids = np.random.default_rng(seed).integers(3, 100, (len(PADDING), LENGTH))
    mask = np.ones_like(ids)
    for row, padding in enumerate(PADDING):
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}


def decoder_error(path: Path, folder: Path, output: str = "logits", room: int = 20) -> float:
    """The error of a decoder's file compared with transformers, chunk by chunk with its own caches. Shared caches have
    `room` slots."""
    run = session(path)
    inputs = {value.name: value for value in run.get_inputs()}
    batch, model = padded_batch(), oracle(folder)
    tensors = {name: torch.from_numpy(value) for name, value in batch.items() if name in inputs}
    made = model(**tensors, use_cache=False, output_hidden_states=True)
    wanted = (made.logits if output == "logits" else made.hidden_states[-1]).numpy()
    shared = any("max_sequence_length" in value.shape for value in inputs.values())
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    caches = {
        name: np.zeros((len(PADDING), *_sizes(value.shape[1:], room if shared else 0)), kinds[value.type])
        for name, value in inputs.items()
        if name.startswith("past_key_values.")
    }
    start, worst = 0, 0.0
    for chunk in CHUNKS:
        end = start + chunk
        first = start if caches else 0
        given = {name: value[:, first:end] for name, value in batch.items() if name in inputs}
        given["attention_mask"] = batch["attention_mask"][:, :end]
        given |= {name: np.array([start], np.int64) for name in inputs if name not in given and name not in caches}
        results = dict(
            zip((value.name for value in run.get_outputs()), run.run(None, {**given, **caches}), strict=True)
        )
        caches = {name: results[name.replace("past_key_values", "present")] for name in caches}
        real = batch["attention_mask"][:, start:end]
        worst = max(worst, error(results[output][:, -chunk:], wanted[:, start:end], real))
        start = end
    return worst
