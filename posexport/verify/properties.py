"""What must be true for an encoding whatever the weights are, tried on an artifact in a runtime, without a reference.

Each property in PROPERTIES has a few runs of the artifact, on inputs that differ in one respect, and a rule for their
outputs. `Encoding.properties` says which properties an encoding has. Layers of a pattern have those that all of them
have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import NUMPY_DTYPES
from posexport.spec.arrays import Array
from posexport.spec.contract import Bounds, graph_inputs, within
from posexport.spec.spec import Spec
from posexport.verify.positions import FAR

TOLERANCES = {"fp32": 2e-4, "fp16": 2e-2, "bf16": 1e-1}
"""The part of the largest output by which two runs of one graph may differ: they sum in another order, and rotate by
other angles. A property that does not hold is off by much more."""

TOKENS, PREFIX, OFFSETS = 24, 15, (1, 64, 1000)


@attrs.frozen(kw_only=True)
class Probe:
    """Random tokens for one artifact, and how inputs are made from some of them. `seq` is the number of tokens."""

    spec: Spec
    seq: int
    batch: int
    room: int | None
    features: Array

    def positions(self, start: int = 0) -> Array:
        """Consecutive positions [seq, axes]; on a grid if there are several axes."""
        steps, axes = np.arange(self.seq), max(self.spec.position_axes, 1)
        limit = self.spec.position_limit()
        if axes == 1:
            return (steps + start)[:, None]
        width = 5 if limit is None else max(2, min(5, limit // 2))
        columns = [steps % width, steps // width % width, steps // width**2][:axes]
        return np.stack(columns, -1) + start

    def still(self) -> Array:
        """Positions [seq, axes] that are the same for all tokens; consecutive from 0 on if the spec requires that."""
        return self.positions() if self.spec.consecutive else self.positions() * 0

    def inputs(self, positions: Array, order: Sequence[int] | None = None) -> Arrays:
        """The graph's inputs with the tokens in `order` (default: unchanged), with `positions` [tokens, axes]."""
        chosen = list(range(self.seq)) if order is None else list(order)
        arrays: Arrays = {}
        for name, (shape, dtype) in graph_inputs(self.spec).items():
            if name in ("hidden_states", "input_ids"):
                arrays[name] = np.repeat(self.features[None, chosen], self.batch, 0)
            elif name == "position_ids":
                ids = positions if self.spec.position_axes > 1 else positions[:, 0]
                ids = ids[:1] if self.spec.consecutive else ids
                arrays[name] = np.repeat(ids[None].astype(np.int64), self.batch, 0)
            else:
                sizes = {"batch": self.batch, "past_seq": 0, "max_seq": self.room, "encoder_seq": 9}
                sizes |= {"seq": len(chosen), "total_seq": len(chosen)}
                dims = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in shape)
                fill = np.ones if name == "attention_mask" else np.zeros
                arrays[name] = fill(dims, NUMPY_DTYPES[dtype])
        return arrays


def make_probe(spec: Spec, bounds: Bounds, seed: int) -> Probe | str:
    """Tokens within `bounds`; or why there can't be any."""
    if spec.cross:
        return "its keys are an encoder's, which have no positions"
    if bounds.get("past_seq", (0, None))[0] > 0:
        return "its cache can't be empty"
    seq = within(TOKENS, bounds["seq"])
    limit = spec.position_limit()
    if limit is not None and spec.position_axes == 1:
        seq = min(seq, max(1, limit // 2))
    elif spec.consecutive:  # the cells of a window
        seq = within(seq, (1, spec.token_limit()))
    room = None
    if "max_seq" in bounds:
        room = within(seq + 3, bounds["max_seq"])
        seq = min(seq, room)
    if not bounds["seq"][0] <= seq:
        return f"it takes {bounds['seq'][0]} tokens or more, and positions or caches hold fewer"
    rng = np.random.default_rng(seed)
    if spec.vocab_size is not None:
        features = rng.integers(0, spec.vocab_size, seq)
    else:
        features = rng.standard_normal((seq, spec.hidden_size)).astype(NUMPY_DTYPES[spec.dtype])
    return Probe(spec=spec, seq=seq, batch=within(1, bounds["batch"]), room=room, features=features)


def _output(out: Arrays) -> Array:
    """The output of the first row, [tokens, hidden_size], in float64."""
    return np.asarray(out["output"][0], np.float64)


def _off(one: Array, other: Array) -> float:
    """The largest difference, as a part of the largest value; infinite if one is not finite."""
    difference = float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-30))
    return difference if np.isfinite(difference) else float("inf")


def _few(probe: Probe) -> str | None:
    return None if probe.seq >= 4 else f"its sequences are of {probe.seq} tokens, it takes 4"


@attrs.frozen
class Property:
    """One property: a summary, its runs, and its rule: the largest error of their outputs, 0 for none.

    `concerns` says whether a block can have it; `untried` says why it can't be tried on a probe (None if it can).
    `gaps` says that its runs need positions with gaps, `moves` that they need other starts.
    """

    summary: str
    runs: Callable[[Probe], list[Arrays]]
    rule: Callable[[Probe, Sequence[Arrays]], float]
    concerns: Callable[[Spec], bool] = lambda spec: True
    untried: Callable[[Probe], str | None] = _few
    gaps: bool = False
    moves: bool = False

    def why_untried(self, probe: Probe) -> str | None:
        """Why it can't be tried on a probe, or None."""
        if probe.spec.consecutive and probe.spec.position_axes and self.gaps:
            return "it takes positions with gaps, and this file promises consecutive ones"
        if probe.spec.consecutive and self.moves and not probe.spec.takes_start:
            return "it moves positions, and this file takes none: they are consecutive"
        return self.untried(probe)


def _norm_rule(probe: Probe, outs: Sequence[Arrays]) -> float:
    key = next(name for name in outs[0] if name.startswith("present_key"))  # later layers have other inputs
    return _off(*(np.linalg.norm(out[key][0, :, : probe.seq].astype(np.float64), axis=-1) for out in outs))


def _shifts(probe: Probe) -> list[int]:
    limit = probe.spec.position_limit()
    most = FAR if limit is None else limit - 1 - int(probe.positions().max())
    return [offset for offset in OFFSETS if offset <= most]


def _reach(probe: Probe) -> int:
    """How far back the last layer's outputs can see."""
    return sum((probe.spec.layer(index).window or 1) - 1 for index in range(probe.spec.layers))


def _bucket_distances(probe: Probe) -> list[int]:
    most = probe.spec.encoding.saturation_distance() or 0
    near = range(min(most, 40) + 1)
    far = np.unique(np.geomspace(1, 2 * most + 2, 40).astype(int))
    return sorted({*near, *(int(distance) for distance in far)})


def _bucket_runs(probe: Probe) -> list[Arrays]:
    """Two tokens at growing distances; then in the other direction, unless the block is causal."""
    runs = []
    for sign in (1,) if probe.spec.causal else (1, -1):
        for distance in _bucket_distances(probe):
            places = np.zeros((2, 1), int)
            places[1 if sign > 0 else 0] = distance
            runs.append(probe.inputs(places, (0, 1)))
    return runs


def _bucket_rule(probe: Probe, outs: Sequence[Arrays]) -> float:
    """Buckets are monotone in the distance. If one comes back after another, the error is as large as that step."""
    worst, count, tight = 0.0, len(_bucket_distances(probe)), TOLERANCES[probe.spec.dtype] / 20
    for first in range(0, len(outs), count):
        seen: list[Array] = []
        for out in outs[first : first + count]:
            value = _output(out)[1]
            if seen and _off(value, seen[-1]) <= tight:
                continue
            if any(_off(value, other) <= tight for other in seen[:-1]):
                worst = max(worst, _off(seen[-1], value))
            seen.append(value)
    return worst


def _bucket_untried(probe: Probe) -> str | None:
    alone = probe.spec.window == 1 or probe.spec.attention_chunk_size == 1
    if probe.seq < 2 or probe.spec.layers > 1 or alone or probe.spec.dtype != "fp32":
        return "it takes one layer of fp32 and two tokens that see each other"
    return None


def _order_free(spec: Spec) -> bool:
    """Whether nothing depends on the place in the sequence."""
    kinds = spec.distinct_layers()
    return not spec.prefix_tokens and not any(k.causal or k.window or k.attention_chunk_size for k in kinds)


def _windowed(spec: Spec) -> bool:
    """Whether only windows depend on the place in the sequence: chunks and first tokens move if a token is removed."""
    kinds = spec.distinct_layers()
    return not spec.prefix_tokens and all(kind.window and not kind.attention_chunk_size for kind in kinds)


def _translate_untried(probe: Probe) -> str | None:
    if probe.spec.consecutive and probe.spec.position_axes > 1:
        return "its tokens are the cells of a grid in order, and without one token, the others are in other cells"
    return _few(probe) if _reach(probe) + 2 <= probe.seq else f"{probe.seq} tokens don't reach beyond its windows"


def _order(probe: Probe) -> list[int]:
    return [int(place) for place in np.random.default_rng(1).permutation(probe.seq)]


def _prefix(probe: Probe) -> range:
    return range(min(PREFIX, probe.seq - 1))


def _finite_runs(probe: Probe) -> list[Arrays]:
    row = probe.inputs(probe.positions() + FAR - 2 * TOKENS)
    far = np.linspace(0, FAR - 1, probe.seq).astype(int)
    return [row] if probe.spec.consecutive else [row, probe.inputs(far[:, None] + probe.positions() * 0)]


def _finite_rule(probe: Probe, outs: Sequence[Arrays]) -> float:
    finite = all(np.isfinite(array.astype(np.float64)).all() for out in outs for array in out.values())
    return 0.0 if finite else float("inf")


def _chosen_runs(probe: Probe, places: Sequence[int]) -> list[Arrays]:
    """One run with all tokens, and one with those at some places, with their positions."""
    return [probe.inputs(probe.positions()), probe.inputs(probe.positions()[list(places)], places)]


PROPERTIES: Mapping[str, Property] = {
    "norms": Property(
        "turning a key keeps its length",  # whatever its position
        runs=lambda probe: [probe.inputs(probe.positions(37)), probe.inputs(probe.still())],
        rule=_norm_rule,
        untried=lambda probe: None if probe.spec.kv_cache else "it gives no keys: export it with --kv-cache",
        moves=True,
    ),
    "shift": Property(
        "moving all positions changes nothing",  # by any offset: scores depend only on relative positions
        runs=lambda probe: [probe.inputs(probe.positions(offset)) for offset in (0, *_shifts(probe))],
        rule=lambda probe, outs: max(_off(_output(out), _output(outs[0])) for out in outs[1:]),
        concerns=lambda spec: not spec.prefix_tokens,
        untried=lambda probe: None if _shifts(probe) else "its table of positions is too short to shift positions",
        moves=True,
    ),
    "translate": Property(
        "tokens beyond a window change nothing",
        runs=lambda probe: _chosen_runs(probe, range(1, probe.seq)),
        rule=lambda probe, outs: _off(_output(outs[1])[_reach(probe) :], _output(outs[0])[1 + _reach(probe) :]),
        concerns=_windowed,
        untried=_translate_untried,
    ),
    "buckets": Property(
        "distances in a bucket are neighbours", _bucket_runs, _bucket_rule, untried=_bucket_untried, gaps=True
    ),
    "permutation": Property(
        "tokens that are swapped together with their positions give swapped outputs",
        runs=lambda probe: _chosen_runs(probe, _order(probe)),
        rule=lambda probe, outs: _off(_output(outs[1]), _output(outs[0])[_order(probe)]),
        concerns=_order_free,
        gaps=True,
    ),
    "prefix": Property(
        "a longer context does not change earlier outputs",
        runs=lambda probe: _chosen_runs(probe, _prefix(probe)),
        rule=lambda probe, outs: _off(_output(outs[1]), _output(outs[0])[_prefix(probe)]),
        concerns=lambda spec: spec.causal,
    ),
    "finite": Property(
        "far positions give finite outputs",  # far beyond any trained length
        _finite_runs,
        _finite_rule,
        concerns=lambda spec: spec.position_axes > 0 and spec.position_limit() is None,
        moves=True,
    ),
}
"""Every property by name."""


def promised(spec: Spec) -> list[str]:
    """The properties that every layer of a spec has, in the order of the table. Windows belong to the block."""
    held = [{*kind.encoding.properties(kind), "translate"} for kind in spec.distinct_layers()]
    return [name for name, row in PROPERTIES.items() if row.concerns(spec) and all(name in names for names in held)]
