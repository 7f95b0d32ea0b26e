"""`scripts/rewrite_results speed`: a whole decoder before and after rewriting, timed on ONNX Runtime's CPU.

The decoder is a Llama with random weights, as torch.onnx.export writes it with its caches. Each session opens every
file again. In each round every file runs once, in random order with pauses. A ratio is the median of the rounds'
ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from architecture import Architecture
from building import build
from exporters import EXPORTERS
from outputs import Array
from results import rounded
from table import ARCHITECTURES
from timing import THREADS, Contender, time_sessions
from tools import fuse_for_onnxruntime, optimize_for_ort
from wrappers import wrap

from posexport import temporary
from posexport.bench import rounds, statistics
from posexport.rewrite.draft import rewrite_file
from posexport.rewrite.request import RewriteOptions
from posexport.runtimes import ort

SIZES = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8000,
    "max_position_embeddings": 4096,
}
"""These sizes give 88 million parameters."""

SCENARIOS = {"prefill:512": (512, 0), "decode:512": (1, 512), "decode:2048": (1, 2048)}
"""The numbers of new and of cached tokens."""

SPARE = 64
"""The free places of a shared buffer after those that are written."""

ORIGINAL, SHARED = "original", "posexport contrib, shared"
REWRITTEN: Mapping[str, RewriteOptions] = {
    "posexport native": RewriteOptions(form="native", target="ort"),
    "posexport contrib": RewriteOptions(form="contrib", target="ort"),
    SHARED: RewriteOptions(form="contrib", target="ort", kv_cache="shared"),
}
PEERS = {"onnxscript": optimize_for_ort, "transformers": fuse_for_onnxruntime}

SESSIONS, ROUNDS, BURST = 3, 7, {"prefill:512": 1, "decode:512": 5, "decode:2048": 5}


def llama(layers: int, hidden: int) -> Architecture:
    """A Llama of this size. Heads have 64 features, and three queries share a key."""
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 192)}
    sizes = {**SIZES, **heads, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": hidden * 8 // 3}
    return attrs.evolve(ARCHITECTURES["llama"], options={**ARCHITECTURES["llama"].options, **sizes}, gain=1.0)


def measure(layers: int, hidden: int, quick: bool) -> dict[str, Any]:
    """The figures of all files in all scenarios: error, milliseconds, and ratio to the original."""
    load = rounds.MachineLoad()
    with temporary.folder() as folder:
        parameters, files = _write(folder, llama(layers, hidden))
        cells = [cell for name in SCENARIOS for cell in _scenario(name, files, quick)]
    sizes = {"layers": layers, "hidden": hidden, "parameters": parameters, "threads": THREADS}
    return dict(rounded({**sizes, "machine_load": load.share(), "cells": cells}))


def _write(folder: Path, row: Architecture) -> tuple[int, dict[str, Path]]:
    """Write the files. Returns the number of parameters, and the files by name."""
    files = {name: folder / f"{number}.onnx" for number, name in enumerate((ORIGINAL, *REWRITTEN, *PEERS))}
    wrapped = wrap(row, build(row))
    with torch.no_grad():
        EXPORTERS["dynamo18"](wrapped, wrapped.draw(2, 6, 3, 0), files[ORIGINAL])
    for name, options in REWRITTEN.items():
        rewrite_file(files[ORIGINAL], files[name], options)
    for name, fuse in PEERS.items():
        fuse(files[ORIGINAL], files[name])
    return sum(parameter.numel() for parameter in wrapped.module.parameters()), files


def _scenario(scenario: str, files: Mapping[str, Path], quick: bool) -> list[dict[str, Any]]:
    seq, past = SCENARIOS[scenario]
    contenders = {name: _contender(name, path, seq, past) for name, path in files.items()}
    expected = contenders[ORIGINAL].load().run(contenders[ORIGINAL].inputs)["logits"]
    errors = {name: _error(one, expected) for name, one in contenders.items()}
    sessions, count = (1, 2) if quick else (SESSIONS, ROUNDS)
    series = time_sessions(contenders, sessions, lambda _: count, BURST[scenario])
    flat = {name: [seconds for session in runs for seconds in session] for name, runs in series.items()}
    return [
        {
            "scenario": scenario,
            "file": name,
            "error": errors[name],
            "ms": statistics.summarize(flat[name]).median * 1e3,
            "ratio": attrs.asdict(statistics.ratio(flat[name], flat[ORIGINAL])),
            "rounds": len(flat[name]),
        }
        for name in files
    ]


def _contender(name: str, path: Path, seq: int, past: int) -> Contender:
    inputs, options = _inputs(path, seq, past, name == SHARED), {"threads": THREADS}
    if name != SHARED:
        return Contender(partial(ort.load, path, options), inputs)
    pairs = {key.replace("past_key_values", "present"): key for key in inputs if key.startswith("past")}
    return Contender(partial(ort.load, path, {**options, "shared": pairs}), inputs)


def _inputs(path: Path, seq: int, past: int, shared: bool) -> dict[str, Array]:
    """One row without padding. Shared caches are at the beginning of a longer buffer."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "input_ids": generator.integers(3, SIZES["vocab_size"], (1, seq)),
        "attention_mask": np.ones((1, past + seq), np.int64),
        "position_ids": np.arange(past, past + seq)[None],
    }
    session = ort.load(path, {"threads": THREADS})._session
    for value in session.get_inputs():
        if value.name.startswith("past"):
            _, heads, _, size = value.shape
            cache = generator.standard_normal((1, heads, past, size)).astype(np.float32)
            room = np.zeros((1, heads, (seq + SPARE) * shared, size), np.float32)
            arrays[value.name] = np.concatenate((cache, room), 2)
    return arrays


def _error(contender: Contender, expected: Array) -> float:
    """The largest difference from the original's logits, relative to their largest value."""
    logits = contender.load().run(contender.inputs)["logits"]
    return float(np.abs(logits - expected).max() / np.abs(expected).max())
