"""Random specs of every encoding with random parameters, masks, caches and stacks, and random inputs for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from helpers import KINDS, Array, positions_for

from posexport.errors import RequestError
from posexport.models import ENCODINGS, read_spec
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec

THETAS = (3.0, 100.0, 10_000.0, 5e5)
LAYOUTS = ("interleaved", "half")
PARAMETERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "learned": {"max_positions": (24, 300)},
    "sinusoidal": {"theta": THETAS, "order": ("sin-cos", "cos-sin"), "layout": LAYOUTS},
    "relative": {"table": ("sinusoidal", "learned"), "theta": THETAS, "max_distance": (1, 4, 90)},
    "t5": {"num_buckets": (2, 4, 12, 32, 36), "max_distance": (10, 33, 128, 1000)},
    "rope": {"theta": THETAS, "layout": LAYOUTS, "rotary_dim": (2, 4, 6, 8)},
    "rope2d": {
        **{"theta": THETAS, "theta_y": (30.0,), "layout": (*LAYOUTS, "half-head"), "order": ("xy", "yx")},
        **{"spacing": ("each", "alternate"), "factor": (1.5, 3.0)},
    },
    "rope3d": {
        **{"theta": THETAS, "theta_y": (30.0,), "theta_t": (70.0,), "layout": (*LAYOUTS, "half-head")},
        **{"order": ("xyt", "xty", "yxt", "ytx", "txy", "tyx"), "split": ([4, 6, 2], [2, 2, 8], [4, 4, 4], [4, 6, 6])},
    },
    "mrope": {
        **{"theta": THETAS, "layout": LAYOUTS, "rotary_dim": (8,), "mrope_interleaved": (True, False)},
        **{"mrope_section": ([1, 2, 1], [2, 2, 2], [4, 2, 2], [2, 1, 1])},
    },
    "rope-mixed": {"layout": LAYOUTS},
    "rope-dinov3": {"theta": (10.0, 100.0), "grid": ([40, 30], [2000, 2000])},
    "rope-vjepa2": {"theta": THETAS},
    "xpos": {"theta": THETAS, "layout": LAYOUTS, "scale_base": (60, 512), "gamma": (0.1, 0.4, 2.0)},
    "temperature": {"floor_scale": (1, 7, 100), "attn_scale": (0.1, 0.7)},
    "alibi2d": {"distance": ("euclidean", "manhattan")},
    "kerple": {"kernel": ("log", "power")},
    "sandwich": {"theta": THETAS, "dim": (2, 20, 128)},
    "fire": {"mlp_width": (1, 8), "init_L": (0.5, 6.0, 512.0)},
    "shaw": {**{"max_distance": (1, 3, 16), "max_distance_ahead": (0, 2, 30), "relative_values": (True, False)}},
    "deberta": {
        **{"max_relative_positions": (3, 20, 81, 700), "position_buckets": (4, 7, 20, 33)},
        **{"pos_att_type": ("c2p|p2c", "c2p", "p2c"), "pos_bias": (True, False)},
    },
    "cope": {"npos_max": (2, 5, 64)},
    "swin": {"window_size": (1, 3, 7)},
    "swinv2": {"window_size": (2, 3, 7), "pretrained_window_size": (2, 5)},
}
"""Candidates for each parameter, in addition to its default."""

SCALED: dict[str, dict[str, tuple[Any, ...]]] = {
    "linear": {"factor": (1.0, 3.5)},
    "ntk": {"factor": (1.0, 3.5)},
    "dynamic": {"factor": (2.0, 3.5), "original_max_position_embeddings": (5, 40, 3000)},
    "yarn": {
        **{"factor": (1.0, 8.0), "original_max_position_embeddings": (40, 3000), "beta_fast": (16.0,)},
        **{"beta_slow": (2.0,), "truncate": (False,), "attention_factor": (1.2,)},
    },
    "longrope": {
        **{"factor": (1.0, 8.0), "original_max_position_embeddings": (5, 40, 3000)},
        **{"attention_factor": (1.2,), "short_factor": (1,), "long_factor": (3,)},
    },
    "llama3": {
        **{"factor": (1.0, 8.0), "original_max_position_embeddings": (40, 3000)},
        **{"low_freq_factor": (1.0, 2.0), "high_freq_factor": (3.0, 6.0)},
    },
    "proportional": {"partial_rotary_factor": (0.3, 0.5, 1.0), "factor": (2.0,)},
}
NEEDED = {"factor", "original_max_position_embeddings", "short_factor", "long_factor", "partial_rotary_factor"}

FIELDS: dict[str, tuple[Any, ...]] = {
    "positions": ("data", "data", "consecutive"),
    "causal": (True, True, False),
    "window": (None, None, 1, 2, 5),
    "attention_chunk_size": (None, None, None, 1, 3, 4),
    "padding_mask": (True, False),
    "kv_cache": (None, None, "concat", "shared"),
    "prefix_tokens": (0, 0, 0, 1, 3),
    "cross": (False, True),
    "angles": ("parity", "parity", "exact"),
    "qk_norm": (False, False, True),
    "softcap": (None, None, 1.5, 30.0),
    "sinks": (False, False, True),
    "scale": (None, None, 0.2, 1.0),
    "bias": (False, True, ["q_proj", "v_proj"]),
    "block": ("attention", "attention", "transformer"),
    "vocab_size": (None, None, None, 11),
    "layers": (1, 1, 2, 3),
    "head_dim": (4, 8, 12, 16),
    "num_heads": (1, 2, 3, 4, 6),
}


def _encoding(draw: random.Random, name: str, head_dim: int, heads: int) -> dict[str, Any]:
    chosen = {key: draw.choice(values) for key, values in PARAMETERS.get(name, {}).items() if draw.random() < 0.5}
    if name in ("rope", "mrope") and draw.random() < 0.6:
        scaling = draw.choice([*SCALED])
        table = SCALED[scaling].items()
        chosen |= {key: draw.choice(values) for key, values in table if key in NEEDED or draw.random() < 0.4}
        chosen["scaling"] = scaling
        for key in ("short_factor", "long_factor"):
            if key in chosen:
                pairs = chosen.get("rotary_dim", head_dim) // 2
                chosen[key] = [round(chosen[key] * (1 + draw.random()), 3) for _ in range(pairs)]
    if name in ("alibi", "alibi2d") and draw.random() < 0.4:
        chosen["slopes"] = [round(0.01 + draw.random(), 3) for _ in range(heads)]
        if name == "alibi" and draw.random() < 0.5:
            chosen["slopes_ahead"] = [round(0.01 + draw.random(), 3) for _ in range(heads)]
    return {"name": name, **chosen}


def _data(draw: random.Random, name: str) -> dict[str, Any]:
    fields = {key: draw.choice(values) for key, values in FIELDS.items()}
    heads, head_dim = fields["num_heads"], fields["head_dim"]
    fields["num_kv_heads"] = draw.choice([each for each in (1, 2, 3, heads, heads) if heads % each == 0])
    fields["hidden_size"] = draw.choice((24, 36))
    fields["cross"] = fields["cross"] and ENCODINGS[name].in_cross
    if fields["cross"]:
        fields |= {"causal": False, "window": None, "attention_chunk_size": None, "kv_cache": None, "prefix_tokens": 0}
    if fields["qk_norm"]:
        fields |= {"qk_norm_type": draw.choice(("rms", "l2")), "norm_eps": draw.choice((1e-6, 0.05))}
    if fields["block"] == "transformer":
        fields |= {"norm": draw.choice(("pre", "post")), "norm_type": draw.choice(("layernorm", "rmsnorm"))}
        fields |= {"mlp": draw.choice(("gelu", "swiglu")), "intermediate_size": 20}
    fields["scale_embedding"] = fields["vocab_size"] is not None and draw.random() < 0.5
    encoding = _encoding(draw, name, head_dim, heads)
    if fields["layers"] > 1 and draw.random() < 0.5:
        others = [_encoding(draw, draw.choice([*ENCODINGS]), head_dim, heads) for _ in range(draw.randint(1, 2))]
        overrides = {"window": (2, 4), "attention_chunk_size": (2, 5), "qk_norm": (True, False)}
        fields["layer_pattern"] = [
            {"encoding": each, **{key: draw.choice(values) for key, values in overrides.items() if draw.random() < 0.2}}
            for each in (encoding, *others)
        ]
        fields["scale"] = fields["scale"] or 0.3
    return {"encoding": encoding, **fields}


def drawn_spec(seed: int) -> Spec:
    """A valid random spec; the encodings take turns with the seed."""
    draw = random.Random(f"spec {seed}")
    name = [*ENCODINGS][seed % len(ENCODINGS)]
    while True:
        data = _data(draw, name)
        try:
            return read_spec(data)
        except RequestError:  # The options do not fit together: drop some of them.
            for key in draw.sample([*FIELDS], 9):
                if key not in ("num_heads", "head_dim"):
                    data.pop(key, None)
            for dependent, owner in (
                ("qk_norm_type", "qk_norm"),
                ("scale_embedding", "vocab_size"),
                ("norm_eps", "qk_norm"),
            ):
                if not data.get(owner):
                    data.pop(dependent, None)
            if data.get("block") != "transformer":
                for key in ("norm", "norm_type", "mlp", "intermediate_size"):
                    data.pop(key, None)
            try:
                return read_spec(data)
            except RequestError:
                continue


def drawn_inputs(spec: Spec, seed: int, batch: int | None = None) -> dict[str, Array]:
    """Random inputs of the graph by name: lengths, positions, padding and caches; floats are float64."""
    random_ = np.random.default_rng(seed)
    batch = int(random_.integers(1, 5)) if batch is None else batch
    seq, past, slots = int(random_.integers(1, 19)), int(random_.integers(0, 12)), int(random_.integers(0, 4))
    encoder = int(random_.integers(1, 14))
    seq = min(seq, spec.position_limit() or seq) if spec.ordered else seq
    if spec.consecutive:
        seq = min(seq, spec.token_limit() or seq)
    sizes = {"batch": batch, "seq": seq, "past_seq": past, "max_seq": past + seq + slots, "encoder_seq": encoder}
    sizes["total_seq"] = past + seq
    made: dict[str, Array] = {}
    for name, (shape, _) in graph_inputs(spec).items():
        whole = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
        if name == "input_ids":
            made[name] = random_.integers(0, spec.vocab_size or 1, whole)
        elif name == "position_ids" and spec.consecutive:
            last = (spec.position_limit() or 2000) - seq
            made[name] = random_.integers(min(past, last), last + 1, whole)
        elif name == "position_ids":
            made[name] = positions_for(spec, batch, seq, KINDS[int(random_.integers(len(KINDS)))], seed)
        elif name == "attention_mask":
            made[name] = _mask(random_, *whole)
        elif name == "write_indices":
            made[name] = random_.integers(0, past + slots + 1, batch)
        else:
            made[name] = random_.standard_normal(whole)
    return made


def _mask(random_: np.random.Generator, batch: int, keys: int) -> Array:
    """Rows without padding, with padding on the left, on the right or on both sides, with gaps, or of only padding."""
    mask = np.ones((batch, keys), np.int64)
    for row in mask:
        kind = int(random_.integers(7))
        if kind in (1, 3):
            row[: int(random_.integers(keys + 1))] = 0
        if kind in (2, 3):
            row[keys - int(random_.integers(keys + 1)) :] = 0
        if kind >= 4:
            row[:] = random_.integers(0, 2, keys)
        if kind == 6 and random_.random() < 0.3:
            row[:] = 0
    return mask
