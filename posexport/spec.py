"""The spec: a frozen, validated description of one block. Pure data, JSON in and out; imports no engine.

Sizes carry Hugging Face's config names. `read_spec` in `posexport.models` reads one back from plain data, since only
that side knows the table of encodings.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import attrs

from posexport import fields
from posexport.errors import RequestError, unknown

LARGEST = {"fp32": 3.4e38, "fp16": 65504.0, "bf16": 3.3e38}
"""The largest finite number of each dtype of a block, the last two digits dropped."""

DTYPES = tuple(LARGEST)
FORMS = {
    "decomposed": "standard ONNX operators only, the most portable",
    "function": "model-local onnxscript functions of the domain 'posexport', which any runtime may inline",
}
OPSETS = range(18, 26)
"""ONNX opsets a file can be written in: each is exported, checked and run by a test."""

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = {
    "gelu": ("mlp.fc1", "mlp.fc2"),
    "swiglu": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


@attrs.frozen(kw_only=True)
class EncodingParams:
    """The parameters of one encoding; a subclass is one row of the ENCODINGS table.

    `axes` is how many numbers make one position: 0 (the encoding ignores positions), 1, or more.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    axes: ClassVar[int] = 1

    def check(self, spec: Spec) -> None:
        """Raise RequestError where these parameters don't fit the sizes of `spec`."""

    def reach(self) -> int | None:
        """The distance beyond which nothing changes any more, where there is one."""
        return None

    def position_limit(self) -> int | None:
        """The number of positions a trained table holds, or None where any position is defined."""
        return None


def _read_bias(value: Any) -> tuple[str, ...] | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise RequestError(f"bias is {value!r}: it must be true, false or a list of projections such as ['q_proj'].")


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
    scale: float = fields.positive(None, "factor on the logits (default: 1/sqrt(head_dim))", optional=True)
    causal: bool = fields.flag(False, "a query sees no later key")
    window: int | None = fields.integer(None, "a query sees keys with |i - j| < window", optional=True)
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
        if self.scale is None:
            put(self, "scale", self.head_dim**-0.5)
        if self.scale > LARGEST[self.dtype]:
            raise RequestError(f"scale is {self.scale}: the largest number in {self.dtype} is {LARGEST[self.dtype]}.")
        only_transformer = {"norm": "pre", "norm_type": "layernorm", "norm_eps": 1e-6, "mlp": "gelu"}
        only_transformer["intermediate_size"] = 4 * self.hidden_size
        for name, value in only_transformer.items():
            if self.block == "attention" and getattr(self, name) is not None:
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

    def projections(self) -> tuple[str, ...]:
        """Names of the linear projections of one layer."""
        return ATTENTION_PROJECTIONS + (MLP_PROJECTIONS[self.mlp] if self.mlp else ())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, every field spelled out; the encoding is a table with its `name` first."""
        data = {f.name: getattr(self, f.name) for f in attrs.fields(Spec)}
        data["encoding"] = {"name": self.encoding.name, **attrs.asdict(self.encoding)}
        data["bias"] = list(self.bias)
        return data

    def to_json(self) -> str:
        """One line of JSON, the same for equal specs."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def inputs(self) -> dict[str, tuple[tuple[str | int, ...], str]]:
        """The graph's inputs: name to (shape, dtype), dimensions by name where they may vary."""
        first: dict[str, tuple[tuple[str | int, ...], str]] = (
            {"hidden_states": (("batch", "seq", self.hidden_size), self.dtype)}
            if self.vocab_size is None
            else {"input_ids": (("batch", "seq"), "int64")}
        )
        axes = self.encoding.axes
        if axes:
            shape: tuple[str | int, ...] = ("batch", "seq") if axes == 1 else ("batch", "seq", axes)
            first["position_ids"] = (shape, "int64")
        return first

    def outputs(self) -> dict[str, tuple[tuple[str | int, ...], str]]:
        """The graph's outputs, as `inputs` gives its inputs."""
        return {"output": (("batch", "seq", self.hidden_size), self.dtype)}
