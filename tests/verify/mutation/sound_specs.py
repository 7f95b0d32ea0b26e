"""Sound files, which must pass verify.

Their specs are drawn over every encoding, mask, cache, stack, form, dtype, opset and kind of positions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import posexport.custom_ops
import posexport.models
from mutation.artifacts import make_spec
from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.export import export
from posexport.export.support import unsupported_reason
from posexport.files import write_json
from posexport.models import ENCODINGS
from posexport.models.weights import seeded_weights
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.result import FAILED, PASSED

Random = np.random.Generator
Parameters = dict[str, Any]


@attrs.frozen
class Drawn:
    """A drawn spec, and the form, target and opset of its file."""

    spec: Spec
    form: str
    target: str
    opset: int | None


def _one(random: Random, *values: Any) -> Any:
    return values[int(random.integers(len(values)))]


def _number(random: Random, low: float, high: float) -> int:
    """An integer whose logarithm is drawn uniformly."""
    return round(float(np.exp(random.uniform(np.log(low), np.log(high)))))


def _some(random: Random, share: float, values: Parameters) -> Parameters:
    """A random part of these values: each is kept with probability `share`."""
    return {name: value for name, value in values.items() if random.random() < share}


def _floats(random: Random, count: int, low: float, high: float) -> list[float]:
    return [round(float(value), 2) for value in random.uniform(low, high, count)]


def _scaling(random: Random) -> Parameters:
    kind = _one(random, "linear", "ntk", "dynamic", "yarn", "yarn", "longrope", "longrope", "llama3", "proportional")
    made: Parameters = {"scaling": kind, "factor": round(float(random.uniform(1.1, 16)), 2)}
    if kind in ("dynamic", "yarn", "longrope", "llama3"):
        made["original_max_position_embeddings"] = _number(random, 64, 4096)
    if kind in ("yarn", "longrope"):
        made |= _some(random, 0.3, {"attention_factor": round(float(random.uniform(0.8, 1.5)), 2)})
    if kind == "yarn":
        made |= _some(random, 0.3, {"beta_fast": 24.0, "beta_slow": 2.0, "truncate": False})
        made |= _one(random, {}, {"mscale": 0.707, "mscale_all_dim": 1.0}, {"mscale": 1.2})
    if kind == "longrope":
        pairs = int(_one(random, 4, 4, 8, 16, 32, 64))  # specs whose pairs don't fit the heads are drawn again
        made |= {"short_factor": _floats(random, pairs, 1, 2), "long_factor": _floats(random, pairs, 1, 16)}
    if kind == "llama3":
        made |= {"low_freq_factor": 1.0, "high_freq_factor": float(_one(random, 2, 4))}
    if kind == "proportional":
        made["partial_rotary_factor"] = _one(random, 0.25, 0.5, 0.75, 1.0)
    return made


def _theta(random: Random) -> float:
    return float(_one(random, 100, 500, 10_000, 500_000, 1_000_000))


PARAMETERS: dict[str, Callable[[Random], Parameters]] = {
    "none": lambda random: {},
    "learned": lambda random: {"max_positions": _number(random, 8, 4096)},
    "sinusoidal": lambda random: {
        "theta": _theta(random),
        "layout": _one(random, "interleaved", "half"),
        "order": _one(random, "sin-cos", "cos-sin"),
    },
    "relative": lambda random: _one(
        random, {"theta": _theta(random)}, {"table": "learned", "max_distance": _number(random, 4, 900)}
    ),
    "t5": lambda random: {"num_buckets": int(_one(random, 8, 16, 32, 64)), "max_distance": _number(random, 70, 1024)},
    "rope": lambda random: {
        "theta": _theta(random),
        "layout": _one(random, "interleaved", "half"),
        **_one(random, {}, {}, {}, {"rotary_dim": int(_one(random, 4, 6))}, *[_scaling(random)] * 4),
    },
    "rope2d": lambda random: {
        "theta": _theta(random),
        "layout": _one(random, "interleaved", "half", "half-head"),
        "order": _one(random, "xy", "yx"),
        "spacing": _one(random, "each", "alternate"),
        **_some(random, 0.3, {"theta_y": _theta(random), "factor": 1.75}),
    },
    "alibi": lambda random: _some(
        random, 0.4, {"slopes": _floats(random, 4, 0.01, 2), "slopes_ahead": _floats(random, 4, 0.01, 2)}
    ),
    "xpos": lambda random: {
        "layout": _one(random, "interleaved", "half"),
        "scale_base": _number(random, 64, 1024),
        **_some(random, 0.3, {"gamma": 0.6, "theta": _theta(random)}),
    },
    "mrope": lambda random: {
        **_one(
            random,
            {},
            {"mrope_section": [1, 2, 1]},
            {"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
            {"rotary_dim": 6, "mrope_section": [1, 1, 1]},
            {"head_dim": 64, "mrope_section": [8, 12, 12], "layout": "half"},
            {"head_dim": 128, "mrope_interleaved": True, "mrope_section": [24, 20, 20], "layout": "half"},
        ),
        **_one(random, {}, _scaling(random)),
        **_some(random, 0.3, {"layout": "interleaved", "theta": _theta(random)}),
    },
    "rope3d": lambda random: {
        "head_dim": int(_one(random, 12, 24)),
        "theta": _theta(random),
        "layout": _one(random, "interleaved", "half", "half-head"),
        "order": _one(random, "xyt", "xty", "yxt", "ytx", "txy", "tyx"),
        **_some(random, 0.3, {"theta_t": _theta(random), "theta_y": _theta(random), "split": [4, 2, 6]}),
    },
    "rope-mixed": lambda random: {"layout": _one(random, "interleaved", "half")},
    "rope-dinov3": lambda random: _some(
        random, 0.5, {"grid": [int(random.integers(2, 40)), int(random.integers(2, 40))], "theta": _theta(random)}
    ),
    "rope-vjepa2": lambda random: {"head_dim": int(_one(random, 8, 14, 24)), "theta": _theta(random)},
    "alibi2d": lambda random: {
        "distance": _one(random, "euclidean", "manhattan"),
        **_some(random, 0.4, {"slopes": _floats(random, 4, 0.01, 2)}),
    },
    "kerple": lambda random: {"kernel": _one(random, "log", "power")},
    "sandwich": lambda random: {"dim": int(_one(random, 32, 128)), "theta": _theta(random)},
    "fire": lambda random: {"init_L": float(_number(random, 4, 600)), "mlp_width": int(_one(random, 8, 32))},
    "shaw": lambda random: {
        "max_distance": _number(random, 2, 300),
        "relative_values": bool(random.integers(2)),
        **_some(random, 0.3, {"max_distance_ahead": _number(random, 2, 300)}),
    },
    "deberta": lambda random: {
        "max_relative_positions": _number(random, 40, 512),
        "pos_att_type": _one(random, "c2p|p2c", "c2p", "p2c"),
        "pos_bias": bool(random.integers(2)),
        **_one(random, {}, {"position_buckets": int(_one(random, 8, 16, 32))}),
    },
    "cope": lambda random: {"npos_max": _number(random, 2, 128)},
    "swin": lambda random: {"window_size": int(random.integers(1, 13))},
    "swinv2": lambda random: _one(
        random,
        {"window_size": int(random.integers(2, 13))},
        {"window_size": int(random.integers(4, 13)), "pretrained_window_size": 4},
    ),
    "temperature": lambda random: {"floor_scale": _number(random, 1, 9000), "attn_scale": _one(random, 0.1, 0.3)},
}
"""Functions that draw the parameters of each encoding."""


PATTERNS = ("{encoding}:window=37,{encoding}", "{encoding},none", "{encoding}:attention_chunk_size=50,{encoding}")
"""Patterns of stacks whose layers differ."""


def _fields(random: Random) -> Parameters:
    """Fields of a spec, most of them left out."""

    def rarely(share: float, values: Parameters) -> Parameters:
        return values if random.random() < share else {}

    layers, cross = int(_one(random, 1, 2, 3)), random.random() < 0.1
    heads = int(_one(random, 4, 4, 4, 4, 4, 1, 2, 8))
    sees_own = {
        "causal": bool(random.integers(2)),
        "kv_cache": _one(random, None, None, "concat", "concat", "shared"),
        **rarely(0.2, {"window": _number(random, 1, 1500)}),
        **rarely(0.15, {"attention_chunk_size": _number(random, 1, 1500)}),
        **rarely(0.15, {"vocab_size": int(random.integers(1, 200)), "scale_embedding": bool(random.integers(2))}),
    }
    return {
        **({"cross": True} if cross else sees_own),
        "dtype": _one(random, "fp32", "fp32", "fp16"),
        "padding_mask": bool(random.integers(2)),
        "num_heads": heads,
        "num_kv_heads": max(1, heads // int(_one(random, 1, 1, 2, 4))),
        "bias": bool(random.random() < 0.3),
        **rarely(0.4, {"head_dim": int(_one(random, 16, 32, 64, 128))}),
        **rarely(0.15, {"angles": "exact"}),
        **rarely(0.25, {"positions": "consecutive"}),
        **rarely(0.15, {"qk_norm": True, "qk_norm_type": _one(random, "rms", "l2")}),
        **rarely(0.15, {"softcap": float(_one(random, 1.5, 20, 50))}),
        **rarely(0.15, {"sinks": True}),
        **rarely(0.1, {"prefix_tokens": int(random.integers(1, 6))}),
        **rarely(
            0.25,
            {
                "block": "transformer",
                "norm": _one(random, "pre", "post"),
                "norm_type": _one(random, "layernorm", "rmsnorm"),
                "mlp": _one(random, "gelu", "swiglu"),
                "intermediate_size": 48,
                "layers": layers,
                **rarely(0.2, {"norm_eps": 1e-3}),
            },
        ),
        **rarely(0.05, {"layers": layers}),
        **rarely(0.1, {"scale": _one(random, 0.1, 0.25, 1.0)}),
        **rarely(0.2, {"hidden_size": int(_one(random, 8, 16, 64, 128))}),
        **rarely(0.1, {"pattern": _one(random, *PATTERNS), "layers": 2}),
    }


def draw_spec(random: Random, encoding: str) -> Drawn:
    """Draw a spec with an encoding. A spec is drawn again if it is contradictory or if its form has no operator for
    it."""
    while True:
        arguments = {"encoding": encoding, **_fields(random), **PARAMETERS[encoding](random)}
        if "pattern" in arguments:
            arguments["pattern"] = arguments["pattern"].format(encoding=encoding)
        form, target = _one(random, "decomposed", "function", "native", "contrib"), _one(random, "portable", "ort")
        opset = int(_one(random, 18, 20, 22)) if form == "decomposed" and random.random() < 0.3 else None
        try:
            spec = make_spec(**arguments)
            if unsupported_reason(spec, form, target) is None:
                return Drawn(spec, form, target, opset)
        except RequestError:
            continue


def draw_specs(count: int, seed: int) -> list[Drawn]:
    """Draw `count` specs. The encodings take turns."""
    random = np.random.default_rng(zlib.crc32(f"sound specs {seed}".encode()))
    names = list(ENCODINGS)
    return [draw_spec(random, names[number % len(names)]) for number in range(count)]


@attrs.define
class Alarms:
    """For each runtime, how many sound files passed and how many it did not run. And the files that failed."""

    passed: dict[str, int] = attrs.field(factory=dict)
    not_run: dict[str, int] = attrs.field(factory=dict)
    failed: list[str] = attrs.field(factory=list)


def _group_alarms(drawn: Sequence[Drawn], start: int, runtimes: Sequence[str], kept: Path | None = None) -> Alarms:
    """The alarms of these specs. If the folder `kept` has the result of an earlier run with the same sources, it is
    read instead."""
    if kept is None:
        return _verified(drawn, start, runtimes)
    specs = [[one.spec.to_json(), one.form, one.target, one.opset] for one in drawn]
    key = json.dumps([_sources(), start, list(runtimes), specs])
    path = kept / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if path.exists():
        return Alarms(**json.loads(path.read_bytes()))
    made = _verified(drawn, start, runtimes)
    kept.mkdir(parents=True, exist_ok=True)
    write_json(path, attrs.asdict(made))
    return made


@functools.cache
def _sources() -> str:
    """A digest of posexport's code."""
    digest = hashlib.sha256()
    for part in (posexport, posexport.models, posexport.custom_ops):
        for file in sorted(Path(str(part.__file__)).parent.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _verified(drawn: Sequence[Drawn], start: int, runtimes: Sequence[str]) -> Alarms:
    """Export these specs and verify them. `start` is the seed of verify and the number of the first spec."""
    made = Alarms()
    with tempfile.TemporaryDirectory(prefix="posexport-sound-") as place:
        folder = Path(place)
        for number, one in enumerate(drawn, start):
            weights = seeded_weights(one.spec, number)
            model = export(one.spec, weights, form=one.form, target=one.target, opset=one.opset)
            write_onnx(model, folder / f"{number}.onnx")
        report = verify([folder], runtimes={name: RUNTIMES[name] for name in runtimes}, seed=start)
    for verdict in report.verdicts:
        one = drawn[int(Path(verdict.artifact).stem) - start]
        if verdict.state == FAILED:
            label = f"{verdict.runtime}, --seed {start}, {one.form} for {one.target}: {one.spec.to_json()}"
            made.failed.append(f"{label}: {verdict.reason}")
        else:
            counts = made.passed if verdict.state == PASSED else made.not_run
            counts[verdict.runtime] = counts.get(verdict.runtime, 0) + 1
    made.failed += [f"{Path(unreadable.artifact).name}: {unreadable.error}" for unreadable in report.unreadable]
    return made


def false_alarms(
    drawn: Sequence[Drawn],
    runtimes: Sequence[str] = ("ort-cpu",),
    *,
    group: int = 25,
    jobs: int = 1,
    kept: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Alarms:
    """Export these specs and verify them in groups. Each group has its own seed, and `jobs` processes run groups in
    parallel. The alarms of each group are kept in the folder `kept`; groups found there are not verified again."""
    made = Alarms()
    starts = list(range(0, len(drawn), group))
    groups = [drawn[start : start + group] for start in starts]
    with ExitStack() as stack:
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")))
            parts: Iterable[Alarms] = pool.map(partial(_group_alarms, runtimes=runtimes, kept=kept), groups, starts)
        else:
            parts = map(partial(_group_alarms, runtimes=runtimes, kept=kept), groups, starts)
        for start, part in zip(starts, parts, strict=True):
            for name, count in part.passed.items():
                made.passed[name] = made.passed.get(name, 0) + count
            for name, count in part.not_run.items():
                made.not_run[name] = made.not_run.get(name, 0) + count
            made.failed += part.failed
            progress("\n".join((*part.failed, f"{min(start + group, len(drawn))} of {len(drawn)} sound specs")))
    return made
