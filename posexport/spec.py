"""The spec: a frozen, validated description of one block. Pure data, JSON in and out; imports no engine.

Sizes carry Hugging Face's config names. `read_spec` in `posexport.models` reads one back from plain data, since only
that side knows the table of encodings.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from posexport import fields
from posexport.errors import RequestError, unknown
from posexport.layers import LAYER_FIELDS, EncodingParams, Layer, encoding_dict, read_pattern

LARGEST = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.3e38}
"""The largest finite number of each dtype of a block, the last two digits dropped."""

DTYPES = tuple(LARGEST)
FORMS = {
    "decomposed": "standard ONNX operators only, the most portable",
    "function": "model-local onnxscript functions of the domain 'posexport', which any runtime may inline",
    "native": "ONNX's own RotaryEmbedding and Attention, of opset 23 and 24",
    "contrib": "com.microsoft RotaryEmbedding, MultiHeadAttention and GroupQueryAttention, for ONNX Runtime",
}
CACHES = ("concat", "shared")
ANGLES = ("parity", "exact")
QK_NORMS = ("rms", "l2")
OPSETS = range(18, 26)
"""ONNX opsets a file can be written in: each is exported, checked and run by a test."""

PRESENT = "past_seq + seq"
"""The name of the length of a grown cache; `total_seq`, that of attention_mask, is the same number."""

Values = dict[str, tuple[tuple[str | int, ...], str]]
"""Name to (shape, dtype), a dimension by name where it may vary."""

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = {
    "gelu": ("mlp.fc1", "mlp.fc2"),
    "swiglu": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


def _read_bias(value: Any) -> tuple[str, ...] | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise RequestError(f"bias is {value!r}: it must be true, false or a list of projections such as ['q_proj'].")


def _read_cache(value: Any) -> str | None:
    """A kind of cache; true stands for the plain one, false for none."""
    if value is None or value is False:
        return None
    if value is True:
        return CACHES[0]
    if value not in CACHES:
        raise unknown("kv_cache", str(value), CACHES)
    return str(value)


@attrs.frozen(kw_only=True)
class Spec:
    """One attention block (or transformer block, or a stack of them) with one positional encoding.

    `bias` names the projections that have one; True stands for all of them, False for none.
    Fields that only a transformer block has (`norm`, `norm_type`, `mlp`, `intermediate_size`, `norm_eps`) are None
    for `block='attention'`, and refused there.
    """

    encoding: EncodingParams
    hidden_size: int = fields.integer(768, "width of the block's input and output")
    num_heads: int = fields.integer(12, "query heads")
    num_kv_heads: int = fields.integer(None, "key and value heads (default: num_heads)", optional=True)
    head_dim: int = fields.integer(None, "width of a head (default: hidden_size / num_heads)", optional=True)
    scale: float = fields.positive(
        None, "factor on the logits (default: 1/sqrt(head_dim), or the encoding's own)", optional=True
    )
    causal: bool = fields.flag(False, "a query sees no later key")
    window: int | None = fields.integer(None, "a query sees keys with |i - j| < window", optional=True)
    attention_chunk_size: int | None = fields.integer(
        None, "a query sees keys of its own run of so many tokens", optional=True
    )
    kv_cache: str | None = attrs.field(
        default=None,
        converter=_read_cache,
        metadata={
            "help": "take past keys and values: concat gives grown ones, shared writes into buffers",
            "allowed": " or ".join(CACHES),
        },
    )
    angles: str = fields.choice("parity", ANGLES, "angles as PyTorch models compute them, or exact to position 2^24")
    prefix_tokens: int = fields.integer(0, "first tokens that no position touches (class and registers)", at_least=0)
    padding_mask: bool = fields.flag(False, "take attention_mask; a query that sees no key attends to zeros")
    cross: bool = fields.flag(False, "keys and values come from encoder_hidden_states")
    qk_norm: bool = fields.flag(False, "RMS norm of each head's query and key")
    qk_norm_type: str | None = fields.choice(
        None, QK_NORMS, "rms: with weights, before they rotate; l2: without, after (default: rms)", optional=True
    )
    softcap: float | None = fields.positive(None, "cap logits: softcap * tanh(logits / softcap)", optional=True)
    sinks: bool = fields.flag(False, "a trained logit per head beside those of the keys, whose weight goes to nothing")
    bias: tuple[str, ...] = attrs.field(default=False, converter=_read_bias)
    block: str = fields.choice("attention", ("attention", "transformer"), "what a layer holds")
    norm: str | None = fields.choice(None, ("pre", "post"), "where the norms stand (default: pre)", optional=True)
    norm_type: str | None = fields.choice(
        None, ("layernorm", "rmsnorm"), "kind of norm (default: layernorm)", optional=True
    )
    norm_eps: float | None = fields.positive(None, "epsilon of the norms (default: 1e-6)", optional=True)
    mlp: str | None = fields.choice(None, tuple(MLP_PROJECTIONS), "kind of MLP (default: gelu)", optional=True)
    intermediate_size: int | None = fields.integer(None, "width of the MLP (default: 4 * hidden_size)", optional=True)
    layers: int = fields.integer(1, "number of layers", at_most=1000)
    layer_pattern: tuple[Layer, ...] = attrs.field(
        default=(),
        converter=read_pattern,
        metadata={"help": "what layers differ in, over and over: encodings, each with ':key=value'", "allowed": "text"},
    )
    vocab_size: int | None = fields.integer(None, "start from input_ids through a token embedding", optional=True)
    scale_embedding: bool = fields.flag(False, "multiply the token embedding by sqrt(hidden_size)")
    dtype: str = fields.choice("fp32", DTYPES, "dtype of weights, inputs and outputs")

    def __attrs_post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen: these only replace None by what it stands for
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
        if self.scale > LARGEST[self.dtype]:
            raise RequestError(f"scale is {self.scale}: the largest number in {self.dtype} is {LARGEST[self.dtype]}.")
        self._check_keys()
        self._check_encoding()
        if self.qk_norm_type is not None and not self.qk_norm:
            raise RequestError(f"qk_norm_type is {self.qk_norm_type!r} without qk_norm: give qk_norm too, or drop it.")
        if self.qk_norm and self.qk_norm_type is None:
            put(self, "qk_norm_type", QK_NORMS[0])
        if self.qk_norm and self.norm_eps is None:
            put(self, "norm_eps", 1e-6)
        only_transformer = {"norm": "pre", "norm_type": "layernorm", "norm_eps": 1e-6, "mlp": "gelu"}
        only_transformer["intermediate_size"] = 4 * self.hidden_size
        for name, value in only_transformer.items():
            own = name == "norm_eps" and self.qk_norm
            if self.block == "attention" and getattr(self, name) is not None and not own:
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
            if name not in self.projections():
                raise unknown("projection in bias", name, self.projections())
        self.encoding.check(self)
        self._check_pattern(given_scale)

    def _check_pattern(self, given_scale: bool) -> None:
        """Refuse layers that can't stand in one block, each checked as a block of its own."""
        if not self.layer_pattern:
            return
        scales = {layer.encoding.name: layer.encoding.default_scale(self.head_dim) for layer in self.layer_pattern}
        if not given_scale and len(set(scales.values())) > 1:
            told = ", ".join(f"{name} {scale:.4g}" for name, scale in scales.items())
            raise RequestError(
                f"layer_pattern mixes encodings with scales of their own ({told}), but layers share one: give --scale."
            )
        if self.encoding != self.layer_pattern[0].encoding:
            raise RequestError(
                "encoding is another than that of the first layer of layer_pattern: give the same, or none."
            )
        for layer in self.layer_pattern:
            if layer.encoding.at_input:
                raise RequestError(
                    f"layer_pattern has {layer.encoding.name}, which acts once before the first layer: only encodings "
                    "that act in layers can differ."
                )
        axes = {layer.encoding.axes for layer in self.layer_pattern} - {0}
        if len(axes) > 1:
            raise RequestError(
                "layer_pattern mixes encodings over one axis with those over several: position_ids are the same for "
                "all layers."
            )
        for index in range(len(self.layer_pattern)):
            self.layer(index)

    def layer(self, index: int) -> Spec:
        """One layer as a block of its own."""
        if not self.layer_pattern:
            return self if self.layers == 1 else attrs.evolve(self, layers=1)
        kind = self.layer_pattern[index % len(self.layer_pattern)]
        fields = {name: getattr(self, name) for name in LAYER_FIELDS} | kind.own()
        if not fields["qk_norm"]:
            fields["qk_norm_type"] = None
            fields["norm_eps"] = self.norm_eps if self.block == "transformer" else None
        angles = self.angles if kind.encoding.angular else "parity"
        prefix = self.prefix_tokens if kind.encoding.takes_prefix else 0
        return attrs.evolve(
            self, encoding=kind.encoding, layers=1, layer_pattern=(), angles=angles, prefix_tokens=prefix, **fields
        )

    def position_limit(self) -> int | None:
        """The number of positions that every layer knows, or None where any is defined."""
        limits = [kind.encoding.position_limit() for kind in self.kinds()]
        return min((limit for limit in limits if limit is not None), default=None)

    def token_limit(self) -> int | None:
        """The most tokens whose positions are all known and all different, or None where there is no limit."""
        limit = self.position_limit()
        return None if limit is None else limit ** max(self.position_axes, 1)

    def reach(self) -> int:
        """The largest distance beyond which nothing changes any more in some layer; 0 where no layer has one."""
        return max(
            max(kind.window or 0, kind.attention_chunk_size or 0, kind.encoding.reach() or 0) for kind in self.kinds()
        )

    @property
    def ordered(self) -> bool:
        """Whether positions must not fall along the sequence."""
        return any(kind.encoding.ordered for kind in self.kinds())

    def kinds(self) -> list[Spec]:
        """Every kind of layer once, as a block of its own."""
        return [self.layer(index) for index in range(min(len(self.layer_pattern), self.layers) or 1)]

    def _check_keys(self) -> None:
        """Refuse what contradicts itself about where keys come from."""
        if not self.cross:
            return
        for name, why in (
            ("kv_cache", "an encoder's keys don't grow"),
            ("causal", "its keys are not the queries' past"),
            ("window", "its keys are not the queries' neighbours"),
            ("attention_chunk_size", "its keys are not the queries' neighbours"),
        ):
            if getattr(self, name):
                raise RequestError(f"cross and {name} were both given: with cross, {why}, so drop one of them.")
        if not self.encoding.in_cross:
            raise RequestError(
                f"cross was given with {self.encoding.name}, which relates positions of queries to positions of keys: "
                "an encoder's have none here, so use learned, sinusoidal, t5 (whose cross-attention has no bias) or "
                "none."
            )

    def _check_encoding(self) -> None:
        """Refuse what the encoding has no meaning for; in a pattern, one layer with a meaning is enough."""
        name = self.encoding.name
        layers = [layer.encoding for layer in self.layer_pattern] or [self.encoding]
        if self.angles != "parity" and not any(layer.angular for layer in layers):
            raise RequestError(f"angles is {self.angles!r} with {name}, which has no angles of positions: drop it.")
        if self.prefix_tokens and not any(layer.takes_prefix for layer in layers):
            raise RequestError(
                f"prefix_tokens is {self.prefix_tokens} with {name}: only tokens of rotary encodings can be left as "
                "they are, so drop it."
            )
        if self.prefix_tokens and self.kv_cache:
            raise RequestError(
                "prefix_tokens and kv_cache were both given: the first tokens are those of a whole image, which has no "
                "cache, so drop one of them."
            )
        if self.kv_cache and self.encoding.uncached:
            raise RequestError(f"kv_cache was given with {name}: {self.encoding.uncached}, so drop it.")

    @property
    def position_axes(self) -> int:
        """How many numbers of position_ids make a position; 0 where the block takes no positions."""
        if self.cross and not self.encoding.at_input:
            return 0
        return max([layer.encoding.axes for layer in self.layer_pattern] or [self.encoding.axes])

    def projections(self) -> tuple[str, ...]:
        """Names of the linear projections of one layer."""
        return ATTENTION_PROJECTIONS + (MLP_PROJECTIONS[self.mlp] if self.mlp else ())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every field spelled out; the encoding is a table with its `name` first."""
        data = {f.name: getattr(self, f.name) for f in attrs.fields(Spec)}
        data["encoding"] = encoding_dict(self.encoding)
        data["bias"] = list(self.bias)
        data["layer_pattern"] = [layer.to_dict() for layer in self.layer_pattern]
        return data

    def to_json(self) -> str:
        """One line of JSON, the same for equal specs."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def inputs(self) -> dict[str, tuple[tuple[str | int, ...], str]]:
        """The graph's inputs: name to (shape, dtype), dimensions by name where they may vary."""
        found: Values = (
            {"hidden_states": (("batch", "seq", self.hidden_size), self.dtype)}
            if self.vocab_size is None
            else {"input_ids": (("batch", "seq"), "int64")}
        )
        if self.cross:
            found["encoder_hidden_states"] = (("batch", "encoder_seq", self.hidden_size), self.dtype)
        axes = self.position_axes
        if axes:
            found["position_ids"] = (("batch", "seq") if axes == 1 else ("batch", "seq", axes), "int64")
        if self.padding_mask:
            found["attention_mask"] = (("batch", self._key_dim()), "int64")
        if self.kv_cache == "shared":
            found["write_indices"] = (("batch",), "int64")
        return {**found, **self._caches("past", "max_seq" if self.kv_cache == "shared" else "past_seq")}

    def outputs(self) -> dict[str, tuple[tuple[str | int, ...], str]]:
        """The graph's outputs, as `inputs` gives its inputs."""
        output: Values = {"output": (("batch", "seq", self.hidden_size), self.dtype)}
        return {**output, **self._caches("present", "max_seq" if self.kv_cache == "shared" else PRESENT)}

    def _key_dim(self) -> str:
        """The dimension of the keys that a query may see."""
        if self.cross:
            return "encoder_seq"
        return {None: "seq", "concat": "total_seq", "shared": "max_seq"}[self.kv_cache]

    def _caches(self, when: str, seq: str) -> Values:
        if self.kv_cache is None:
            return {}
        shape = ("batch", self.num_kv_heads, seq, self.head_dim)
        numbers = [f".{index}" for index in range(self.layers)] if self.layers > 1 else [""]
        return {f"{when}_{kind}{number}": (shape, self.dtype) for number in numbers for kind in ("key", "value")}
