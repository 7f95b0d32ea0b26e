"""The spec: a frozen, validated description of one block. Pure data, JSON in and out; imports no engine.

Sizes carry Hugging Face's config names. `read_spec` in `posexport.models` reads one back from plain data, since only
that side knows the table of encodings.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import attrs

from posexport.errors import RequestError, unknown
from posexport.spec import fields

LARGEST = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.3e38}
"""The largest finite number of each dtype of a block, the last two digits dropped."""

DTYPES = tuple(LARGEST)
CACHES = ("concat", "shared")
ANGLES = ("parity", "exact")
QK_NORMS = ("rms", "l2")


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
class EncodingParams:
    """The parameters of one encoding; a subclass is one row of the ENCODINGS table.

    `axes` is how many numbers make one position: 0 (the encoding ignores positions), 1, or more.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    axes: ClassVar[int] = 1
    at_input: ClassVar[bool] = False
    """True where it acts once, before the first layer, instead of in every layer."""
    in_cross: ClassVar[bool] = False
    """Whether it is defined where keys are those of an encoder: by acting at the input, or by not acting at all."""
    angular: ClassVar[bool] = False
    """Whether it takes cosines and sines of angles that are linear in integer positions."""
    uses_fp32_products: ClassVar[bool] = False
    """Whether fp32 products of positions and frequencies are its angles, which far out are as good as fp32 is."""
    base_properties: ClassVar[tuple[str, ...]] = ("permutation", "prefix", "finite")
    """The properties (posexport.verify.properties) that it has."""
    takes_prefix: ClassVar[bool] = False
    """Whether the first tokens can be left as they are."""
    ordered: ClassVar[bool] = False
    """Whether positions must not fall along the sequence."""
    no_cache_reason: ClassVar[str | None] = None
    """Why it goes with no cache, as the end of a sentence; None where it does."""

    def check(self, spec: Spec) -> None:
        """Raise RequestError where these parameters don't fit the sizes of `spec`."""

    def default_scale(self, head_dim: int) -> float:
        """The factor on the logits where none is given."""
        return float(head_dim**-0.5)

    def properties(self, spec: Spec) -> tuple[str, ...]:
        """What holds whatever the weights are; names of posexport.properties."""
        return self.base_properties

    def products(self) -> bool:
        """`uses_fp32_products`, where the parameters don't rule it out."""
        return self.uses_fp32_products

    def reach(self) -> int | None:
        """The distance beyond which nothing changes any more, where there is one."""
        return None

    def position_limit(self) -> int | None:
        """The number of positions a trained table holds, or None where any position is defined."""
        return None


@attrs.frozen(kw_only=True)
class Layer:
    """One kind of layer in a pattern: its encoding, and what it has otherwise than the block; None where it hasn't."""

    encoding: EncodingParams
    window: int | None = fields.integer(None, "a query sees keys with |i - j| < window", optional=True)
    attention_chunk_size: int | None = fields.integer(None, "a query sees keys of its own run", optional=True)
    qk_norm: bool | None = fields.flag(None, "RMS norm of each head's query and key")

    def own(self) -> dict[str, Any]:
        """What it has otherwise, by name."""
        found = {name: getattr(self, name) for name in LAYER_FIELDS}
        return {name: value for name, value in found.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"encoding": encoding_dict(self.encoding), **self.own()}


LAYER_FIELDS = ("window", "attention_chunk_size", "qk_norm")
"""What layers of one block may differ in, beside their encoding."""


def encoding_dict(encoding: EncodingParams) -> dict[str, Any]:
    """An encoding as plain data, its `name` first."""
    return {"name": encoding.name, **attrs.asdict(encoding)}


def read_pattern(value: Any) -> tuple[Layer, ...]:
    """A pattern of layers; RequestError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(layer, Layer) for layer in value):
        raise RequestError(f"layer_pattern is {value!r}: it must be a list of layers, each with an encoding.")
    return tuple(value)


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
                f"layer_pattern mixes encodings with scales of their own ({told}), but layers share one: give scale."
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
        if self.kv_cache and self.encoding.no_cache_reason:
            raise RequestError(f"kv_cache was given with {name}: {self.encoding.no_cache_reason}, so drop it.")

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
