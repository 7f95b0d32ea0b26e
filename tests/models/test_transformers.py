"""Blocks without caches against transformers' modules with the same random weights, in fp32.

A case is one attention layer with its input and output. Each case has faults of the spec, which must show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import small_spec
from hf_helpers import (
    ATTENTION,
    BATCH,
    BOUND,
    FAMILIES,
    HIDDEN,
    LAYERS,
    PLAIN,
    T5_SIZES,
    T5_SPEC,
    Watch,
    Weights,
    error,
    made,
    renamed,
    states,
    t5_weights,
    torch_call,
    transformers,
)
from torch import Tensor

from posexport.models.biases import t5_buckets
from posexport.models.weights import weight_shapes

SEQ = 9


def future() -> Tensor:
    return torch.full((SEQ, SEQ), -1e9).triu(1)[None, None]


def positions(*starts: int) -> Tensor:
    return torch.arange(SEQ) + torch.tensor(starts).unsqueeze(1)


def token_ids() -> Tensor:
    return torch.randint(0, 17, (BATCH, SEQ), generator=torch.Generator().manual_seed(2))


@dataclass(frozen=True)
class Case:
    """Arguments of `small_spec`, weights and inputs by posexport's names, the output, and the mask of real queries."""

    spec: dict[str, Any]
    weights: Weights
    inputs: dict[str, Tensor]
    theirs: Tensor
    real: Tensor | None = None

    def error(self, wrong: dict[str, Any] | None = None) -> float:
        """The error of the block, or of one with the fault `wrong`, without the weights that it does not have."""
        spec = small_spec(**{**self.spec, **(wrong or {})})
        weights = {key: value for key, value in self.weights.items() if wrong is None or key in weight_shapes(spec)}
        return error(torch_call(spec, weights)(self.inputs)["output"], self.theirs, self.real)


def decoder_layer(name: str, index: int) -> Case:
    """A layer of the decoders of hf_helpers, with positions that do not start at 0."""
    family = FAMILIES[name]
    model, layers, watches = family.build()
    at = positions(0, 40)
    model(inputs_embeds=states(SEQ, family.width), position_ids=at, use_cache=False)
    inputs = {"hidden_states": watches[index].entered, "position_ids": at}
    return Case(family.of_layer(index), family.weights(layers[index]), inputs, watches[index].left)


def mistral_model() -> Case:
    """Two whole layers from token ids, with the model's names of weights, norms, SwiGLU and a window."""
    family = FAMILIES["mistral"]
    config = family.config()
    config.num_hidden_layers = 2
    config.layer_types = ["sliding_attention"] * 2
    model, kept = made(transformers.MistralModel(config)), []
    model.layers[-1].register_forward_hook(lambda *args: kept.append(args[-1]))
    inputs = {"input_ids": token_ids(), "position_ids": positions(0, 0)}
    model(**inputs, use_cache=False)
    spec = family.of_layer(
        vocab_size=17,
        intermediate_size=48,
        layers=2,
        block="transformer",
        norm_type="rmsnorm",
        norm_eps=config.rms_norm_eps,
        mlp="swiglu",
    )
    state = {name.replace("self_attn.", ""): value for name, value in model.state_dict().items()}
    del state["norm.weight"]
    return Case(spec, state, inputs, kept[0][0] if isinstance(kept[0], tuple) else kept[0])


def gptj(rotary_dim: int) -> Case:
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    config = transformers.GPTJConfig(
        n_embd=HIDDEN, n_head=4, rotary_dim=rotary_dim, n_positions=64, n_inner=64, n_layer=1
    )
    theirs, inputs = (
        made(GPTJAttention(config, layer_idx=0)),
        {"hidden_states": states(SEQ), "position_ids": positions(0, 40)},
    )
    out = theirs(inputs["hidden_states"], attention_mask=future(), position_ids=inputs["position_ids"])[0]
    weights = renamed(theirs, {name: name for name in ATTENTION} | {"o_proj": "out_proj"})
    return Case({"encoding": "rope", "rotary_dim": rotary_dim, "causal": True}, weights, inputs, out)


@functools.cache
def t5_model() -> dict[str, Case]:
    """The attention of T5's encoder, with padding on the right, and the decoder's cross-attention to it.

    The cross-attention runs for a prefill and for one more token over the cache.
    """
    model = made(transformers.T5Model(transformers.T5Config(vocab_size=17, num_layers=1, **T5_SIZES)))
    model.set_attn_implementation("eager")
    encoder, cross = model.encoder.block[0].layer[0].SelfAttention, model.decoder.block[0].layer[1].EncDecAttention
    inside, across, over = Watch(encoder.q, encoder.o), Watch(cross.q, cross.o), Watch(cross.k, cross.o)
    kept = torch.tensor([[1] * SEQ, [1] * (SEQ - 3) + [0] * 3])
    x = states(5, seed=3)
    first = model(inputs_embeds=states(SEQ), attention_mask=kept, decoder_inputs_embeds=x[:, :4], use_cache=True)
    entered = {"hidden_states": inside.entered, "position_ids": positions(0, 100), "attention_mask": kept}
    spec = {**T5_SPEC, "padding_mask": True}
    cases = {"t5-encoder": Case(spec, t5_weights(encoder), entered, inside.left, kept)}
    for name in ("t5-cross", "t5-cross-step"):
        inputs = {"hidden_states": across.entered, "encoder_hidden_states": over.entered, "attention_mask": kept}
        cases[name] = Case({**spec, "cross": True}, t5_weights(cross), inputs, across.left)
        model(
            encoder_outputs=(first.encoder_last_hidden_state,),
            attention_mask=kept,
            decoder_inputs_embeds=x[:, 4:],
            past_key_values=first.past_key_values,
        )
    return cases


def bert() -> Case:
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=20,
        attn_implementation="eager",
    )
    model = made(transformers.BertModel(config, add_pooling_layer=False))
    model.embeddings.token_type_embeddings.weight.zero_()  # A block does not have segments.
    model.embeddings.LayerNorm = torch.nn.Identity()  # A block does not have BERT's norm after the embedding.
    attention = model.encoder.layer[0].attention
    watch = Watch(attention.self.query, attention.output.dense)
    kept = torch.tensor([[1] * SEQ, [1] * (SEQ - 2) + [0] * 2])
    inputs = {"input_ids": token_ids(), "position_ids": positions(0, 11), "attention_mask": kept}
    model(**inputs)
    names = {f"{name[0]}_proj": f"self.{name}" for name in ("query", "key", "value")} | {"o_proj": "output.dense"}
    weights = renamed(attention, names)
    weights["embed_tokens.weight"] = model.embeddings.word_embeddings.weight
    weights["encoding.weight"] = model.embeddings.position_embeddings.weight
    spec = {"encoding": "learned", "max_positions": 20, "vocab_size": 17, "bias": list(ATTENTION), "padding_mask": True}
    return Case(spec, weights, inputs, watch.left, kept)


def conformer() -> Case:
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
        Wav2Vec2ConformerRelPositionalEmbedding,
        Wav2Vec2ConformerSelfAttention,
    )

    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        position_embeddings_type="relative",
        max_source_positions=50,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    theirs, x = made(Wav2Vec2ConformerSelfAttention(config)), states(SEQ)
    rows = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    out = theirs(x, relative_position_embeddings=rows)[0]
    weights = renamed(
        theirs, {f"{name[0]}_proj": f"linear_{name[0]}" for name in ATTENTION[:3]} | {"o_proj": "linear_out"}
    )
    alternating = (
        theirs.linear_pos.weight
    )  # Their R alternates sines and cosines; ours has all sines, then all cosines.
    weights["encoding.r_proj.weight"] = torch.cat((alternating[:, 0::2], alternating[:, 1::2]), 1)
    weights["encoding.content_bias"], weights["encoding.position_bias"] = theirs.pos_bias_u, theirs.pos_bias_v
    inputs = {"hidden_states": x, "position_ids": positions(0, 30)}
    return Case({"encoding": "relative", "bias": True}, weights, inputs, out)


def xlnet(causal: bool) -> Case:
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    config = transformers.XLNetConfig(d_model=HIDDEN, n_head=4, d_inner=64, n_layer=1, dropout=0.0, vocab_size=17)
    theirs, x = made(XLNetRelativeAttention(config)), states(SEQ)
    rows = transformers.XLNetModel(config).relative_positional_encoding(SEQ, SEQ, bsz=BATCH)
    mask = torch.ones(SEQ, SEQ).triu(1)[:, :, None, None].expand(-1, -1, BATCH, 1)
    theirs.layer_norm = torch.nn.Identity()
    x_SBD = x.transpose(0, 1)
    summed = theirs(x_SBD, None, mask if causal else None, None, rows, None)[0]
    state = theirs.state_dict()
    weights = {f"{name}_proj.weight": state[name].flatten(1).T for name in "qkv"}
    weights["o_proj.weight"] = state["o"].flatten(1)
    weights["encoding.r_proj.weight"] = state["r"].flatten(1).T
    weights["encoding.content_bias"], weights["encoding.position_bias"] = state["r_w_bias"], state["r_r_bias"]
    inputs = {"hidden_states": x, "position_ids": positions(0, 30)}
    return Case({"encoding": "relative", "causal": causal}, weights, inputs, (summed - x_SBD).transpose(0, 1))


CASES: dict[str, Callable[[], Case]] = {
    **{f"{name}-{index}": functools.partial(decoder_layer, name, index) for name, index in LAYERS},
    "mistral-model": mistral_model,
    "gptj-4": functools.partial(gptj, 4),
    "gptj-8": functools.partial(gptj, 8),
    **{name: lambda name=name: t5_model()[name] for name in ("t5-encoder", "t5-cross", "t5-cross-step")},
    "bert": bert,
    "conformer": conformer,
    "xlnet": functools.partial(xlnet, False),
    "xlnet-causal": functools.partial(xlnet, True),
}


@functools.cache
def case(name: str) -> Case:
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str) -> None:
    assert case(name).error() <= BOUND


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("llama-0", {"layout": "interleaved"}),
    ("gemma2-1", {"window": 4}),
    ("gemma2-1", {"softcap": 2.0}),
    ("gpt-oss-1", {"window": 3}),
    ("gpt-oss-1", {"sinks": False}),
    ("mistral-model", {"norm_eps": 0.01}),
    ("mistral-model", {"window": 5}),
    ("gptj-4", {"layout": "half"}),
    ("gptj-4", {"rotary_dim": 8}),
    ("t5-encoder", {"causal": True}),
    ("t5-encoder", {"max_distance": 3}),
    ("t5-cross", {"scale": None}),
    ("t5-cross-step", {"scale": None}),
    ("bert", {"bias": list(ATTENTION[:3])}),
    ("bert", {"bias": ["k_proj", "v_proj", "o_proj"]}),
    ("conformer", {"causal": True}),
    ("xlnet", {"theta": 500.0}),
]


@pytest.mark.parametrize(("name", "wrong"), FAULTS, ids=str)
def test_a_wrong_spec_is_noticed(name: str, wrong: dict[str, Any]) -> None:
    assert case(name).error(wrong) > PLAIN


@pytest.mark.parametrize("name", ["t5-encoder", "t5-cross", "t5-cross-step", "bert"])
def test_padding_that_is_seen_is_noticed(name: str) -> None:
    found = case(name)
    mask = torch.ones_like(found.inputs["attention_mask"])
    seen = Case(found.spec, found.weights, {**found.inputs, "attention_mask": mask}, found.theirs, found.real)
    assert seen.error() > PLAIN


def test_wrong_positions_are_noticed() -> None:
    found = case("bert")
    at = found.inputs["position_ids"] - torch.tensor([[0], [1]])
    moved = Case(found.spec, found.weights, {**found.inputs, "position_ids": at}, found.theirs, found.real)
    assert moved.error() > PLAIN


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (32, 256), (16, 20), (8, 1000), (64, 1024), (320, 800), (256, 4096)]
)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    offsets = torch.arange(-max_distance, max_distance + 1)
    theirs = T5Attention._relative_position_bucket(offsets, bidirectional, num_buckets, max_distance)
    ours = torch.tensor(t5_buckets(num_buckets, max_distance, bidirectional))
    apart = offsets[ours != theirs].abs()
    # transformers computes logarithms in fp32, so a distance at the edge of a bucket may get the bucket before it.
    exact = num_buckets // (4 if bidirectional else 2)
    wide = exact
    for distance in apart.tolist():
        edge = (
            wide * torch.tensor(distance / exact, dtype=torch.float64).log() / torch.tensor(max_distance / exact).log()
        )
        assert abs(float(edge) - round(float(edge))) < 1e-5, (distance, float(edge))
    assert int((ours - theirs).abs().max()) <= 1
