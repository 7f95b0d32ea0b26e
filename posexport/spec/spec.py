"""The spec: a frozen, validated description of one block. It is pure data with JSON in and out, and imports no engine.

Sizes have the names of Hugging Face's configs. `posexport.models.read_spec` reads a spec from plain data, because it
needs the table of encodings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import attrs

from posexport.errors import RequestError, check_known, shown
from posexport.spec import fields
from posexport.spec.encoding import Encoding

LARGEST_FINITE = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.3e38}
"""The largest finite number of each dtype of a block, rounded down."""

MOST_LAYERS = 1000
"""The maximum number of layers of a spec, and of its pattern."""

DTYPES = tuple(LARGEST_FINITE)
CACHES = ("concat", "shared")
ANGLES = ("parity", "exact")
POSITIONS = ("data", "consecutive")
QK_NORMS = ("rms", "l2")


ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = {"gelu": ("mlp.fc1", "mlp.fc2"), "swiglu": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}


def _read_bias(value: Any) -> tuple[str, ...] | bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError
    return tuple(value)


def _read_cache(value: Any) -> str | None:
    """Read a type of cache. true means `concat`, false means none."""
    if value is False:
        return None
    if value is True:
        return CACHES[0]
    check_known("kv_cache", value, CACHES)
    return str(value)


@attrs.frozen(kw_only=True)
class Layer:
    """One type of layer in a pattern: its encoding, and the fields that it overrides. None keeps the block's value."""

    encoding: Encoding
    window: int | None = fields.integer(None, "a query sees keys with |i - j| < window")
    attention_chunk_size: int | None = fields.integer(None, "a query sees keys of its own chunk")
    qk_norm: bool | None = fields.flag(None, "RMS norm of each head's query and key")

    def overrides(self) -> dict[str, Any]:
        """Return the fields that differ from the block's, by name."""
        values = {name: getattr(self, name) for name in LAYER_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"encoding": encoding_dict(self.encoding), **self.overrides()}


LAYER_FIELDS = ("window", "attention_chunk_size", "qk_norm")
"""The fields in which layers of one block may differ, besides their encoding."""


def encoding_dict(encoding: Encoding) -> dict[str, Any]:
    """Return an encoding as plain data, with its `name` first."""
    return {"name": encoding.name, **attrs.asdict(encoding)}


def _read_pattern(value: Any) -> tuple[Layer, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(layer, Layer) for layer in value):
        raise RequestError(f"layer_pattern is {shown(value)}: it must be a list of layers, each with an encoding.")
    return tuple(value)


@attrs.frozen(kw_only=True)
class Spec:
    """One attention block (or transformer block, or a stack of them) with one positional encoding.

    `bias` names the projections that have a bias. True means all of them, False none. The fields of a transformer block
    (`norm`, `norm_type`, `mlp`, `intermediate_size`, `norm_eps`) are None for `block='attention'`, which rejects them.
    The exception is `norm_eps`, which `qk_norm` uses too.
    """

    encoding: Encoding
    hidden_size: int = fields.integer(768, "width of the block's input and output")
    num_heads: int = fields.integer(12, "number of query heads")
    num_kv_heads: int = fields.integer(None, "number of key and value heads (default: num_heads)")
    head_dim: int = fields.integer(None, "width of a head (default: hidden_size / num_heads)")
    scale: float = fields.positive(None, "factor on the logits (default: 1/sqrt(head_dim), or the encoding's own)")
    causal: bool = fields.flag(False, "a query sees no later keys")
    window: int | None = fields.integer(None, "a query sees keys with |i - j| < window")
    attention_chunk_size: int | None = fields.integer(None, "a query sees keys of its own chunk of this many tokens")
    kv_cache: str | None = fields.parsed(
        "input past keys and values; concat: new ones are appended; shared: new ones are written into buffers",
        " or ".join(CACHES),
        _read_cache,
    )
    angles: str = fields.choice(
        "parity", ANGLES, "parity: angles as PyTorch models compute them; exact: exact up to position 2^24"
    )
    positions: str = fields.choice(
        "data",
        POSITIONS,
        "data: position_ids of every token; consecutive: positions count up by one, and only the first one is an input",
    )
    prefix_tokens: int = fields.integer(
        0, "number of tokens without a position at the start (class, registers)", at_least=0
    )
    padding_mask: bool = fields.flag(
        False, "add the input attention_mask; the attention of a query that sees no key is zero"
    )
    cross: bool = fields.flag(False, "keys and values come from encoder_hidden_states")
    qk_norm: bool = fields.flag(False, "RMS norm of each head's query and key")
    qk_norm_type: str | None = fields.choice(
        None, QK_NORMS, "rms: with weights, before rotation; l2: without, after it (default: rms)"
    )
    softcap: float | None = fields.positive(None, "cap logits: softcap * tanh(logits / softcap)")
    sinks: bool = fields.flag(False, "a trained logit per head in the softmax, without a value (attention sink)")
    bias: tuple[str, ...] = fields.parsed(
        "every projection has a bias (with --weights: those that have one in the file)",
        "true, false or a list of projections such as ['q_proj']",
        _read_bias,
        default=False,
    )
    block: str = fields.choice("attention", ("attention", "transformer"), "contents of a layer")
    norm: str | None = fields.choice(None, ("pre", "post"), "norms before or after attention and MLP (default: pre)")
    norm_type: str | None = fields.choice(None, ("layernorm", "rmsnorm"), "kind of norm (default: layernorm)")
    norm_eps: float | None = fields.positive(None, "epsilon of the norms (default: 1e-6)")
    mlp: str | None = fields.choice(None, tuple(MLP_PROJECTIONS), "kind of MLP (default: gelu)")
    intermediate_size: int | None = fields.integer(None, "width of the MLP (default: 4 * hidden_size)")
    layers: int = fields.integer(1, "number of layers", at_most=MOST_LAYERS)
    layer_pattern: tuple[Layer, ...] = fields.parsed(
        "repeating pattern of layers: encodings separated by commas, each with optional ':key=value'",
        "text",
        _read_pattern,
        default=(),
    )
    vocab_size: int | None = fields.integer(None, "add a token embedding of this size: the input is input_ids")
    scale_embedding: bool = fields.flag(False, "multiply the token embedding by sqrt(hidden_size)")
    dtype: str = fields.choice("fp32", DTYPES, "dtype of weights, inputs and outputs")

    def __attrs_post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen; this only replaces None with its default
        if self.num_kv_heads is None:
            put(self, "num_kv_heads", self.num_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                raise RequestError(
                    f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}: "
                    "change one of them or give head_dim."
                )
            put(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise RequestError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads}: "
                "each key head serves the same number of query heads."
            )
        given_scale = self.scale is not None
        if self.scale is None:
            put(self, "scale", self.encoding.default_scale(self.head_dim))
        if self.scale > (largest := LARGEST_FINITE[self.dtype]):
            raise RequestError(f"scale is {self.scale}: the largest number in {self.dtype} is {largest}.")
        any_normed = self.qk_norm or any(layer.qk_norm for layer in self.layer_pattern)
        if self.qk_norm_type is not None and not any_normed:
            raise RequestError(f"qk_norm_type is {self.qk_norm_type!r} without qk_norm: give qk_norm too, or drop it.")
        if self.qk_norm and self.qk_norm_type is None:
            put(self, "qk_norm_type", QK_NORMS[0])
        if self.qk_norm and self.norm_eps is None:
            put(self, "norm_eps", 1e-6)
        only_transformer = {"norm": "pre", "norm_type": "layernorm", "norm_eps": 1e-6, "mlp": "gelu"}
        only_transformer["intermediate_size"] = 4 * self.hidden_size
        for name, value in only_transformer.items():
            of_qk_norm = name == "norm_eps" and any_normed
            if self.block == "attention" and getattr(self, name) is not None and not of_qk_norm:
                raise RequestError(
                    f"{name} is {getattr(self, name)!r} but block is 'attention', which has none: "
                    "use block 'transformer' or drop it."
                )
            if self.block == "transformer" and getattr(self, name) is None:
                put(self, name, value)
        if self.scale_embedding and self.vocab_size is None:
            raise RequestError("scale_embedding needs a token embedding: give vocab_size too, or drop it.")
        if isinstance(self.bias, bool):
            put(self, "bias", self.projections() if self.bias else ())
        for name in self.bias:
            check_known("projection in bias", name, self.projections())
        of_layers = self._pattern_problems(given_scale) if self.layer_pattern else self._layer_problems()
        if (problem := next(chain(self._problems(), of_layers), None)) is not None:
            raise RequestError(problem)
        for index in range(len(self.layer_pattern)):
            self.layer(index)  # checks each layer as a block of its own

    def _pattern_problems(self, given_scale: bool) -> Iterator[str]:
        """Yield why the layers cannot be in one block."""
        scales = {layer.encoding.name: layer.encoding.default_scale(self.head_dim) for layer in self.layer_pattern}
        if not given_scale and len(set(scales.values())) > 1:
            listed = ", ".join(f"{name} {scale:.4g}" for name, scale in scales.items())
            yield f"layer_pattern mixes encodings with different scales ({listed}), but layers share one: give scale."
        if self.encoding != self.layer_pattern[0].encoding:
            yield "encoding differs from that of the first layer of layer_pattern: give the same one, or none."
        for layer in self.layer_pattern:
            if layer.encoding.at_input:
                yield (
                    f"layer_pattern has {layer.encoding.name}, which acts once before the first layer: only encodings "
                    "that act in layers can differ."
                )
        if len({layer.encoding.axes for layer in self.layer_pattern} - {0}) > 1:
            yield (
                "layer_pattern mixes encodings over one axis with those over several: position_ids are the same for "
                "all layers."
            )

    def layer(self, index: int) -> Spec:
        """Return one layer as a block of its own."""
        if not self.layer_pattern:
            return self if self.layers == 1 else attrs.evolve(self, layers=1)
        layer = self.layer_pattern[index % len(self.layer_pattern)]
        changes = layer.overrides()
        if not changes.get("qk_norm", self.qk_norm):
            changes["qk_norm_type"] = None
            changes["norm_eps"] = self.norm_eps if self.block == "transformer" else None
        angles = self.angles if layer.encoding.has_angles() else "parity"
        prefix = self.prefix_tokens if layer.encoding.takes_prefix else 0
        return attrs.evolve(
            self, encoding=layer.encoding, layers=1, layer_pattern=(), angles=angles, prefix_tokens=prefix, **changes
        )

    def distinct_layers(self) -> list[Spec]:
        """Return every type of layer once, as a block of its own, in order."""
        return [self.layer(index) for index in range(min(len(self.layer_pattern), self.layers) or 1)]

    def position_limit(self) -> int | None:
        """Return the number of positions for which every layer is defined on all axes. None if there is no limit."""
        limits = self.position_limits()
        return None if limits is None else min(limits)

    def position_limits(self) -> tuple[int, ...] | None:
        """Return the limit of positions for each axis (a grid may be wider than high). None if there is no limit."""
        limits = [layer.encoding.position_limits() for layer in self.distinct_layers()]
        known = [sizes for sizes in limits if sizes is not None]
        return tuple(min(sizes) for sizes in zip(*known, strict=True)) if known else None

    def token_limit(self) -> int | None:
        """Return the largest number of tokens with distinct positions within the limit, plus the tokens without a
        position before them. None if there is no limit."""
        limits = self.position_limits()
        return None if limits is None else math.prod(limits) + self.prefix_tokens

    def saturation_distance(self) -> int:
        """Return the distance from which on every layer treats all pairs of tokens alike, or 0."""
        return max(
            max(layer.window or 0, layer.attention_chunk_size or 0, layer.encoding.saturation_distance() or 0)
            for layer in self.distinct_layers()
        )

    def position_edges(self) -> tuple[int, ...]:
        """Return the positions from which on some layer's encoding is computed in another way."""
        return tuple(sorted({edge for layer in self.distinct_layers() for edge in layer.encoding.position_edges()}))

    @property
    def negative_positions(self) -> bool:
        """Whether positions may be negative in every layer."""
        layers = self.distinct_layers()
        return self.position_limit() is None and all(layer.encoding.negative_positions for layer in layers)

    @property
    def ordered(self) -> bool:
        """Whether positions must not decrease along the sequence."""
        return any(layer.encoding.ordered for layer in self.distinct_layers())

    def attention_attributes(self) -> dict[str, Any]:
        """Return the attributes that `custom_ops.attend` takes, by name."""
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window or 0,
            "chunk": self.attention_chunk_size or 0,
            "softcap": self.softcap or 0.0,
        }

    def _problems(self) -> Iterator[str]:
        """Yield options that contradict each other, or that no layer's encoding uses."""
        for option, why in (
            ("kv_cache", "an encoder's keys don't grow"),
            ("causal", "keys are not the queries' past"),
            ("window", "keys are not the queries' neighbours"),
            ("attention_chunk_size", "keys are not the queries' neighbours"),
        ):
            if self.cross and getattr(self, option):
                yield f"cross and {option} were both given: with cross, {why}, so drop one of them."
        layers = [layer.encoding for layer in self.layer_pattern] or [self.encoding]
        names = ", ".join(dict.fromkeys(layer.name for layer in layers))
        if self.angles != "parity" and not any(layer.has_angles() for layer in layers):
            yield f"angles is {self.angles!r} with {names}, which has no angles of positions: drop it."
        if self.consecutive and (problem := self._problem_of_order()):
            yield f"positions is 'consecutive' {problem}"
        if self.prefix_tokens and not any(layer.takes_prefix for layer in layers):
            yield (
                f"prefix_tokens is {self.prefix_tokens} with {names}: only rotary encodings can leave the first tokens "
                "unrotated, so drop it."
            )
        if self.prefix_tokens and self.kv_cache:
            yield (
                "prefix_tokens and kv_cache were both given: prefix tokens belong to a whole image, which has no "
                "cache, so drop one of them."
            )

    def _layer_problems(self) -> Iterator[str]:
        """Yield why the encoding of a block without a pattern cannot have the block's options."""
        name = self.encoding.name
        if self.cross and not self.encoding.in_cross:
            yield (
                f"cross was given with {name}, which relates positions of queries to positions of keys: an encoder's "
                "keys have none here, so use learned, sinusoidal, t5 (whose cross-attention has no bias) or none."
            )
        if self.kv_cache and self.encoding.no_cache_reason:
            yield f"kv_cache was given with {name}: {self.encoding.no_cache_reason}, so drop it."
        yield from self.encoding.problems(self)

    @property
    def position_axes(self) -> int:
        """The number of integers in position_ids that make one position. 0 if the block takes no positions."""
        if self.cross and not self.encoding.at_input:
            return 0
        return max([layer.encoding.axes for layer in self.layer_pattern] or [self.encoding.axes])

    @property
    def consecutive(self) -> bool:
        """Whether the spec promises that the positions of all tokens of a row are consecutive."""
        return self.positions == "consecutive"

    @property
    def can_be_consecutive(self) -> bool:
        """Whether it has positions, and its files may promise that they are consecutive."""
        return self.position_axes > 0 and self._problem_of_order() is None

    def _problem_of_order(self) -> str | None:
        """Return why positions cannot be consecutive, or None."""
        layers = [layer.encoding for layer in self.layer_pattern] or [self.encoding]
        grid = next((layer for layer in layers if not layer.can_be_consecutive()), None)
        if grid is not None:
            return (
                f"with {grid.name}, whose tokens stand on a grid of {grid.axes} axes and of any size: only positions "
                "on one axis, or in a window of swin or swinv2, can be consecutive, so drop it."
            )
        windows = {sizes for layer in layers if layer.axes > 1 and (sizes := layer.position_limits())}
        if len(windows) > 1:
            sides = " and ".join(str(sizes[0]) for sizes in sorted(windows))
            return (
                f"with windows of the sides {sides} in layer_pattern: a token would stand in another cell in each "
                "layer, so give all layers the same window_size, or drop it."
            )
        return None

    @property
    def takes_start(self) -> bool:
        """Whether outputs depend on where consecutive positions begin: an encoding uses positions and not only their
        differences, or cached keys are rotated by their positions."""
        return self.position_axes > 0 and not all(
            layer.encoding.by_difference(layer) and not (layer.kv_cache and layer.encoding.hook == "rotate")
            for layer in self.distinct_layers()
        )

    def projections(self) -> tuple[str, ...]:
        """Return the names of the linear projections of one layer."""
        return ATTENTION_PROJECTIONS + (MLP_PROJECTIONS[self.mlp] if self.mlp else ())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data. `positions` is included only if it is "consecutive". `encoding` begins with its `name`."""
        data = {f.name: getattr(self, f.name) for f in attrs.fields(Spec)}
        data["encoding"] = encoding_dict(self.encoding)
        data["bias"] = list(self.bias)
        data["layer_pattern"] = [layer.to_dict() for layer in self.layer_pattern]
        if not self.consecutive:  # older files have no such key
            del data["positions"]
        return data

    def to_json(self) -> str:
        """Return one line of JSON. Equal specs give equal text."""
        return json.dumps(self.to_dict(), separators=(",", ":"))
