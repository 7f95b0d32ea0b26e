"""Calls the hooks of one encoding as a block does, and returns tables, biases, logits and wavelengths as numbers.

Queries and keys are ones, and the input is zeros if the encoding acts there: so the result shows only the encoding.
Trained weights are random ones from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from posexport.custom_ops.heads import Heads
from posexport.custom_ops.visibility import visible
from posexport.errors import RequestError, RuntimeMissingError
from posexport.models.attention import EncodingState
from posexport.models.axes import AXES
from posexport.models.scaling import SCALINGS, parameters
from posexport.models.weights import seeded_weights
from posexport.runtimes import Runtime
from posexport.spec.arrays import Array
from posexport.spec.encoding import AttentionContext, Encoding
from posexport.spec.positions import grid_positions
from posexport.spec.spec import ANGLES, Spec
from posexport.verify import angles
from posexport.verify.positions import FAR

MOST = 16_384
"""The most tokens of one panel."""

MOST_NUMBERS = 2**28
"""The most numbers in memory at a time for one panel: a gigabyte in fp32."""


def check_size(numbers: int) -> None:
    """RequestError if a panel would take more than MOST_NUMBERS."""
    if numbers > MOST_NUMBERS:
        raise RequestError(
            f"the picture takes {numbers:.1e} numbers at a time, at most {MOST_NUMBERS:.1e} are held: give fewer "
            "tokens (seq), heads or features."
        )


@attrs.frozen(kw_only=True)
class ProbeTarget:
    """One encoding to draw.

    `given` are its parameters as text. `seq` is the number of tokens (of a grid, along each side; None for a default),
    and `seed` the seed of its weights. Errors are measured on `runtimes`; `advance` is called for each.
    """

    spec: Spec
    given: str = ""
    seq: int | None = None
    seed: int = 0
    runtimes: Mapping[str, Runtime] = attrs.field(factory=dict)
    advance: Callable[[str], object] = lambda _: None

    @property
    def encoding(self) -> Encoding:
        """The spec's encoding."""
        return self.spec.encoding

    def side(self, *by_axes: int) -> int:
        """`seq`, or the default for one, two or three axes within the encoding's limit; RequestError if `seq` is too
        large."""
        axes, limit = max(self.encoding.axes, 1), self.encoding.position_limit()
        if self.seq is None:
            suits = by_axes[axes - 1]
            return suits if limit is None else min(suits, limit)
        if limit is not None and self.seq > limit:
            raise RequestError(f"seq is {self.seq}: {self.encoding.name} has {limit} positions, so give at most that.")
        if self.seq**axes > MOST:
            raise RequestError(f"seq is {self.seq} along {axes} axes: at most {MOST} tokens are drawn, so give fewer.")
        return self.seq


def cells(side: int, axes: int) -> Array:
    """int64 positions: [side] for at most one axis, else those of a grid [side^axes, axes], with x fastest."""
    if axes < 2:
        return np.arange(side)
    positions: Array = grid_positions(side, side, None if axes == 2 else side)[0]
    return positions


def seen(spec: Spec, tokens: int, rows: slice = slice(None)) -> Tensor:
    """bool [rows, tokens]: which keys the queries `rows` of a sequence without padding see."""
    heads = Heads(
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        scale=spec.scale,
        causal=spec.causal,
        window=spec.window or 0,
        chunk=spec.attention_chunk_size or 0,
    )
    mask = visible(heads, tokens, tokens, None)
    return (torch.ones(tokens, tokens, dtype=torch.bool) if mask is None else mask)[rows]


class Probe:
    """The hooks of one encoding at positions [T] or [T, axes]; everything in fp32, as in an artifact."""

    def __init__(self, target: ProbeTarget, positions: Array) -> None:
        self.spec, self.encoding, self.tokens = target.spec, target.encoding, len(positions)
        check_size(self.tokens * max(self.spec.hidden_size, self.spec.num_heads * self.spec.head_dim))
        self._state = EncodingState(self.spec, torch.float32)
        weights = seeded_weights(self.spec, target.seed) if self.encoding.weights(self.spec) else {}
        inner = {
            name.removeprefix("encoding."): value for name, value in weights.items() if name.startswith("encoding.")
        }
        self._state.load_state_dict(inner, strict=True, assign=True)
        self._state.requires_grad_(False)
        self._places = torch.from_numpy(positions)[None]

    def embedding(self) -> Tensor:
        """What is added to the input, [T, hidden_size]."""
        return self.encoding.embed(self._state, torch.zeros(1, self.tokens, self.spec.hidden_size), self._places)[0]

    def rotated(self) -> tuple[Tensor, Tensor]:
        """A query and a key of ones, [T, num_heads, head_dim] each, as they enter the product."""
        ones = torch.ones(1, self.tokens, self.spec.num_heads * self.spec.head_dim)
        q, k = self.encoding.rotate(self._state, ones, ones, self._places)
        return q[0].unflatten(-1, (self.spec.num_heads, -1)), k[0].unflatten(-1, (self.spec.num_heads, -1))

    def logits(self, rows: slice = slice(None)) -> tuple[Array, Array]:
        """Logits [heads, rows, T] of the queries `rows`, and the part of them that is added to the product.

        Unseen keys are NaN. If the encoding acts at the input, one head stands for the mean of all heads.
        """
        if self.encoding.hook == "embed":
            table = self.embedding()
            content = (table[rows] @ table.T * (self.spec.scale / self.spec.num_heads))[None]
            added = torch.zeros_like(content)
        else:
            check_size(self.spec.num_heads * self.tokens * len(range(self.tokens)[rows]))
            content, added = self._product(rows)
        hidden = ~seen(self.spec, self.tokens, rows)
        return (content + added).masked_fill(hidden, math.nan).numpy(), added.masked_fill(hidden, math.nan).numpy()

    def _product(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The scaled product of queries and keys, and what bias and score add to it, [heads, rows, T] each."""
        q, k = (t.flatten(1)[None] for t in self.rotated())
        known = self.encoding.axes > 0
        places, keys = (self._places[:, rows], self._places) if known else (None, None)
        context = AttentionContext(k=k, q_positions=places, k_positions=keys, mask=None, sinks=None, write_indices=None)
        bias = self.encoding.bias(self._state, *context.positions()) if known else None
        q, mixed = self.encoding.score(self._state, q[:, rows], context)
        split = (t[0].unflatten(-1, (self.spec.num_heads, -1)) for t in (q, k))
        content = torch.einsum("ihd,jhd->hij", *split) * self.spec.scale
        return content, sum((term[0] for term in (bias, mixed) if term is not None), torch.zeros_like(content))


def decay(target: ProbeTarget) -> tuple[Array, Array]:
    """The distances [T] of keys before one query, and their logits minus the logit at distance 0, [heads, axes or 1,
    T]."""
    axes, side = target.encoding.axes, target.side(512, 25, 13)
    at = side - 1 if axes < 2 and target.spec.causal else side // 2
    steps = side ** np.arange(max(axes, 1))  # the distance of neighbours along each axis, in cells
    query = int(at * steps.sum())
    logits = Probe(target, cells(side, axes)).logits(slice(query, query + 1))[0][:, 0]
    along = query + (np.arange(side) - at) * steps[:, None]
    return at - np.arange(side), (logits - logits[:, [query]])[:, along]


def gain(target: ProbeTarget) -> tuple[Array, dict[str, Array]]:
    """Positions [T], and the factors by which a query and a key are multiplied there."""
    limit = target.encoding.position_limit()
    places = np.array(angles.spaced(FAR - 1)) if limit is None else np.linspace(0, limit - 1, 65, dtype=np.int64)
    rotated = zip(("query", "key"), Probe(target, places).rotated(), strict=True)
    return places, {name: (t[:, 0].norm(dim=-1) / target.spec.head_dim**0.5).numpy() for name, t in rotated}


def wavelengths(spec: Spec) -> dict[str, tuple[Array, Array]]:
    """By name, the pairs that rotate and their wavelengths in positions: along each axis, before and after scaling.

    Raises RequestError for frequencies above a radian.
    """
    rope = cast(Any, spec.encoding)
    if rope.theta < 1.0:
        raise RequestError(
            f"theta is {rope.theta:g}: wavelengths of less than two positions can't be told apart, so give a theta of "
            "1 or more."
        )
    cases: dict[str, tuple[Spec, int]] = {"": (spec, 2)}
    if (scaling := getattr(rope, "scaling", None)) is not None:
        plain = attrs.evolve(rope, **dict.fromkeys(("scaling", *parameters())))
        cases = {"before scaling": (attrs.evolve(spec, encoding=plain), 2), f"{scaling}": (spec, 2)}
        if SCALINGS[scaling].by_length:
            trained = rope.original_max_position_embeddings
            longer = round(trained * rope.factor)
            cases[f"{scaling}, up to {trained} tokens"] = cases.pop(scaling)
            cases[f"{scaling}, {longer} tokens"] = (spec, longer)
    lines = {}
    for name, (case, length) in cases.items():
        for axis, values in _wavelengths(case, length).items():
            turning = np.flatnonzero(np.isfinite(values))
            lines[", ".join(filter(None, (axis and f"by {axis}", name)))] = turning, values[turning]
    return lines


def _wavelengths(spec: Spec, length: int = 2) -> dict[str, Array]:
    """2 pi divided by the angle of one step along each axis, for every pair; infinite if the pair doesn't rotate.

    The angle is that of the encoding's own cosine and sine, in float64, at the length of a sequence.
    """
    axes = spec.encoding.axes
    module = angles.Angles(spec, torch.float64)
    lengths = {}
    for axis in range(axes):
        places = torch.zeros(1, 2, axes, dtype=torch.int64)
        places[0, 0, axis], places[0, 1] = 1, length - 1
        cos, sin = (t[0, 0].numpy() for t in module(places if axes > 1 else places[..., 0]))
        with np.errstate(divide="ignore"):
            lengths[AXES[axis] if axes > 1 else ""] = 2 * math.pi / np.arctan2(sin, cos)
    return lengths


def angle_errors(target: ProbeTarget) -> tuple[list[int], list[angles.Measured], dict[str, angles.Measured]]:
    """Positions, the measurements there for the angles of parity and exact angles, and the runtimes without an answer.

    Raises RuntimeMissingError if none of them could be measured.
    """
    specs = [target.spec]
    if target.spec.angles == ANGLES[0]:
        with suppress(RequestError):  # frequencies that depend on the length have no exact angles
            specs.append(attrs.evolve(target.spec, angles="exact"))
    places = angles.spaced(angles.POSITIONS[-1])
    results = list(angles.measure(specs, target.runtimes, tuple(places), target.advance))
    absent = {result.runtime: result for result in results if result.reason is not None}
    if not any(result.errors for result in results):
        why = "; ".join(f"{name}: {result.reason}" for name, result in absent.items())
        raise RuntimeMissingError(f"no error could be measured ({why}): name a runtime that is here.")
    return places, [result for result in results if result.errors], absent


_KINDS = ("table", "bias", "mask", "decay", "gain", "wavelength", "error")


def _refusal(what: str, spec: Spec) -> str | None:
    """Why a spec has nothing of a kind to draw, as a clause after the encoding's name, or None."""
    encoding = spec.encoding
    match what:
        case "table" if encoding.hook not in ("embed", "rotate"):
            return "which adds nothing to the input and rotates nothing"
        case "bias" if encoding.hook not in ("bias", "score"):
            return "which adds nothing to the logits"
        case "gain" if encoding.name not in ("temperature", "xpos"):
            return "which multiplies queries and keys by no factor of their position"
        case "wavelength" if not encoding.angular:
            return "which has no angles linear in the position"
        case "wavelength" | "error":
            return angles.why_none(spec)
    return None


def look_of(spec: Spec) -> str:
    """The kind of picture that shows best what an encoding does."""
    if spec.encoding.name == "temperature":  # its table would show nothing within the first 8191 positions
        return "gain"
    return _kinds_of(spec)[0]


def _kinds_of(spec: Spec) -> list[str]:
    return [what for what in _KINDS if _refusal(what, spec) is None]


def check(target: ProbeTarget, what: str) -> None:
    """RequestError if an encoding has no picture of that kind, or if `seq` has no meaning in it."""
    if (why := _refusal(what, target.spec)) is not None:
        allowed = ", ".join(_kinds_of(target.spec))
        raise RequestError(f"what is {what!r} with {target.encoding.name}, {why}: give one of {allowed}.")
    if what in ("gain", "wavelength", "error"):  # the number of tokens can't be chosen
        check_size(2 * len(angles.spaced(FAR)) * max(target.spec.hidden_size, target.spec.head_dim))
        if target.seq is not None:
            raise RequestError(f"seq is {target.seq} with what {what!r}, which shows no number of tokens: drop it.")
