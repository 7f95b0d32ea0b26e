"""onnxruntime-genai's model builder against posexport: one layer of a Llama with the same weights.

The builder makes whole decoders from Hugging Face checkpoints, so the subject here is a whole layer, with an MLP of 32
features that costs next to nothing. Its graph ends with the model's last norm (of weight one), which posexport's layer
hasn't: that norm is taken of posexport's output before the two are compared. The builder's cache is one buffer that is
written in place; posexport's may be. Where the package isn't there the part is not run:

    pip install --no-deps onnxruntime-genai
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnxruntime
import torch
from peers_cells import FORMS, GROWN, HEADS, HIDDEN, PAST, PLACES, SHARED, THREADS

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import statistics
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort
from posexport.runtimes.base import Arrays, timed
from posexport.spec.spec import Spec

MISSING = "onnxruntime-genai is not installed: pip install --no-deps onnxruntime-genai"
EPS, INNER, WINDOW = 1e-6, 32, 256
SCENARIOS = {"prefill:128": (128, 0, 3), "prefill:1024": (1024, 0, 1), "decode:2048": (1, PAST, 5)}
"""New tokens, tokens in the cache, timed runs of a turn."""


def measure(quick: bool) -> dict[str, Any]:
    """Per scenario the seconds and the ratio of posexport's best form to the builder's file, or why there is none."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return {"state": "not run", "reason": MISSING}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = seeded_weights(_spec(GROWN, None), 0)
        theirs = _build(folder / "llama", weights, None)
        files = _files(folder, weights)
        rows = [_row(scenario, theirs, files, quick) for scenario in SCENARIOS]
        window = _window(_build(folder / "mistral", weights, WINDOW), weights, folder)
    return {"state": "measured", "rows": rows, "window": window}


def _spec(cache: str, window: int | None) -> Spec:
    layer = {"block": "transformer", "norm_type": "rmsnorm", "norm_eps": EPS, "mlp": "swiglu"}
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "intermediate_size": INNER}
    encoding = {"name": "rope", "layout": "half"}
    return read_spec({"encoding": encoding, "causal": True, "kv_cache": cache, "window": window, **layer, **sizes})


def _build(folder: Path, weights: dict[str, torch.Tensor], window: int | None) -> Path:
    """The builder's file for a checkpoint of one layer with posexport's weights."""
    import tokenizers
    import transformers

    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": INNER, "vocab_size": 32, "max_position_embeddings": 4096, "rms_norm_eps": EPS}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: Any
    if window is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=window, **sizes))
    own = model.state_dict()
    for name, tensor in weights.items():
        part = name if name.startswith(("mlp.", "input_layernorm", "post_attention")) else f"self_attn.{name}"
        own[f"model.layers.0.{part}"].copy_(tensor)
    model.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"t{index}": index for index in range(32)}, unk_token="t0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words)).save_pretrained(folder)
    found = importlib.util.find_spec("onnxruntime_genai")
    assert found is not None and found.submodule_search_locations is not None
    builder = Path(next(iter(found.submodule_search_locations)), "models/builder.py")
    command = [sys.executable, str(builder), "-i", str(folder), "-o", str(folder / "made"), "-p", "fp32", "-e", "cpu"]
    command += ["-c", str(folder / "cache"), "--extra_options"]
    command += ["exclude_embeds=true", "exclude_lm_head=true", "hf_token=false"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder / "made/model.onnx"


def _files(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, tuple[Spec, Path]]:
    found = {}
    for cache in (GROWN, SHARED):
        for form in dict.fromkeys(form for form, _ in FORMS):
            spec, path = _spec(cache, None), folder / f"{form}-{cache}.onnx"
            write_onnx(export(spec, weights, form=form, target="ort"), path)
            found[f"{form} --target ort{', shared buffers' if cache == SHARED else ''}"] = (spec, path)
    return found


def _row(scenario: str, theirs: Path, files: dict[str, tuple[Spec, Path]], quick: bool) -> dict[str, Any]:
    seq, past, burst = SCENARIOS[scenario]
    rounds = 3 if quick else 9
    sizes = Sizes(seq=seq, past_seq=past, max_seq=PLACES)
    shared = seeded_inputs(_spec(SHARED, None), sizes, 0)
    grown = {name: array[:, :, :past] if name.startswith("past_") else array for name, array in shared.items()}
    grown = {name: np.ascontiguousarray(array) for name, array in grown.items() if name != "write_indices"}
    want = _builders(theirs, shared, past)[1]()
    runners: dict[str, tuple[Callable[[], Any], Arrays]] = {}
    for name, (spec, path) in files.items():
        inputs = shared if spec.kv_cache == SHARED else grown
        error = _error(ort.load(path, {}).run(inputs)["output"], want)
        assert error < 1e-3, f"{scenario}, {name}: differs from onnxruntime-genai's by {error}"
        runners[name] = (lambda path=path: ort.load(path, {"threads": THREADS}), inputs)  # type: ignore[misc]

    def turns(names: list[str]) -> dict[str, Callable[[], float]]:
        calls = {name: runners[name][0]().prepare(runners[name][1]) for name in names}
        calls["builder"] = _builders(theirs, shared, past)[0]
        return {name: _turn(call, burst) for name, call in calls.items()}

    race = rounds.interleave(turns(list(runners)), 3 if quick else 5, seed=99)
    best = min(runners, key=lambda name: statistics.ratio(race[name], race["builder"]).median)
    series: dict[str, list[float]] = {best: [], "builder": []}
    for session in range(2):
        for name, seconds in rounds.interleave(turns([best]), rounds, seed=session).items():
            series[name] += seconds
    ratio = statistics.ratio(series[best], series["builder"], 0.99)
    seconds = {name: statistics.quantile(values, 0.5) for name, values in series.items()}
    return {"scenario": scenario, "best": best, "seconds": seconds, "ratio": attrs.asdict(ratio)}


def _turn(call: Callable[[], float], burst: int) -> Callable[[], float]:
    def turn() -> float:
        call()
        return statistics.quantile([call() for _ in range(burst)], 0.5)

    return turn


def _builders(path: Path, inputs: Arrays, past: int) -> tuple[Callable[[], float], Callable[[], np.ndarray[Any, Any]]]:
    """(a timed run, a run for its output) of the builder's file over one buffer that is written in place."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    hidden = inputs["hidden_states"]
    binding = session.io_binding()
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    held = {"inputs_embeds": value(hidden), "hidden_states": value(np.zeros_like(hidden))}
    held["attention_mask"] = value(np.ones((1, past + hidden.shape[1]), np.int64))
    for part in ("key", "value"):
        held[part] = value(inputs[f"past_{part}"].copy())
        binding.bind_ortvalue_input(f"past_key_values.0.{part}", held[part])
        binding.bind_ortvalue_output(f"present.0.{part}", held[part])
    for name in ("inputs_embeds", "attention_mask"):
        binding.bind_ortvalue_input(name, held[name])
    binding.bind_ortvalue_output("hidden_states", held["hidden_states"])
    run = timed(lambda: session.run_with_iobinding(binding))

    def output() -> np.ndarray[Any, Any]:
        run()
        made: np.ndarray[Any, Any] = held["hidden_states"].numpy()
        return made.copy()

    return run, output


def _error(output: np.ndarray[Any, Any], normed: np.ndarray[Any, Any]) -> float:
    """Their difference behind the last norm."""
    return float(np.abs(output / np.sqrt((output**2).mean(-1, keepdims=True) + EPS) - normed).max())


def _window(theirs: Path, weights: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """How far the builder's file for a sliding window is from that function, and from the one without a window."""
    inputs = seeded_inputs(_spec(SHARED, None), Sizes(seq=2 * WINDOW, past_seq=0, max_seq=PLACES), 0)
    found, made = {}, _builders(theirs, inputs, 0)[1]()
    for name, window in (("windowed", WINDOW), ("without", None)):
        path = folder / f"{name}.onnx"
        write_onnx(export(_spec(SHARED, window), weights, form="decomposed", target="ort"), path)
        found[name] = _error(ort.load(path, {}).run(inputs)["output"], made)
    return {"window": WINDOW, "tokens": 2 * WINDOW, **found}
