"""Blocks against transformers' own modules, with their weights (random, from small configs: nothing is downloaded).

Both sides run in float64; transformers computes its angles in fp32, which sets the bound.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import small_spec
from torch import Tensor

from posexport.models.biases import t5_buckets
from posexport.models.block import build_block
from posexport.models.weights import weight_shapes
from posexport.spec import Spec

transformers: Any = pytest.importorskip("transformers")

BATCH, SEQ, HIDDEN = 2, 9, 32
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def made(module: Any) -> Any:
    """The module in float64 with weights large enough that every term shows."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double().eval().requires_grad_(False)


def hidden() -> Tensor:
    return torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def future() -> Tensor:
    return torch.full((SEQ, SEQ), -1e9, dtype=torch.float64).triu(1)[None, None]


def positions(*starts: int) -> Tensor:
    return torch.arange(SEQ) + torch.tensor(starts).unsqueeze(1)


def check(spec: Spec, weights: dict[str, Tensor], inputs: tuple[Tensor, ...], theirs: Tensor, bound: float) -> None:
    assert set(weights) == set(weight_shapes(spec))
    ours = build_block(spec, weights, torch.float64)(*inputs)
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.1
    torch.testing.assert_close(ours, theirs.double(), atol=bound * float(theirs.abs().max()), rtol=0)


def renamed(module: Any, names: dict[str, str]) -> dict[str, Tensor]:
    """Ours -> theirs, weights and where they are there biases."""
    state = module.state_dict()
    found = {}
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in state:
                found[f"{ours}.{kind}"] = state[f"{theirs}.{kind}"]
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_llama_attention(bias: bool) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=bias,
        attn_implementation="eager",
    )
    theirs, x, at = made(LlamaAttention(config, 0)), hidden(), positions(0, 40)
    out, _ = theirs(x, LlamaRotaryEmbedding(config)(x, at), future())
    spec = small_spec("rope", layout="half", num_kv_heads=2, causal=True, bias=bias)
    check(spec, renamed(theirs, {name: name for name in ATTENTION}), (x, at), out, 1e-5)


def test_mistral_model_with_its_window() -> None:
    """Two whole layers from token ids: names of weights as in the model's own files, norms, SwiGLU and window."""
    config = transformers.MistralConfig(
        vocab_size=17,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=6,
        sliding_window=3,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        attn_implementation="eager",
    )
    theirs, kept = made(transformers.MistralModel(config)), []
    theirs.layers[-1].register_forward_hook(lambda *args: kept.append(args[-1]))
    ids = torch.randint(0, 17, (BATCH, SEQ), generator=torch.Generator().manual_seed(2))
    theirs(ids, position_ids=positions(0, 0), use_cache=False)
    out = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    spec = small_spec(
        "rope",
        layout="half",
        theta=500.0,
        vocab_size=17,
        intermediate_size=48,
        layers=2,
        num_kv_heads=1,
        head_dim=6,
        window=3,
        causal=True,
        block="transformer",
        norm_type="rmsnorm",
        norm_eps=1e-5,
        mlp="swiglu",
    )
    state = {
        name.replace("self_attn.", ""): value for name, value in theirs.state_dict().items() if name != "norm.weight"
    }
    check(spec, state, (ids, positions(0, 0)), out, 1e-5)


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_gptj_attention(rotary_dim: int) -> None:
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    config = transformers.GPTJConfig(
        n_embd=HIDDEN, n_head=4, rotary_dim=rotary_dim, n_positions=64, n_inner=64, n_layer=1
    )
    theirs, x, at = made(GPTJAttention(config)), hidden(), positions(0, 40)
    out = theirs(x, attention_mask=future(), position_ids=at)[0]
    names = {name: name for name in ATTENTION} | {"o_proj": "out_proj"}
    spec = small_spec("rope", rotary_dim=rotary_dim, causal=True)
    check(spec, renamed(theirs, names), (x, at), out, 1e-5)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom_attention(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    width = 8 * heads
    config = transformers.BloomConfig(hidden_size=width, n_head=heads, hidden_dropout=0.0, attention_dropout=0.0)
    theirs, x = made(BloomAttention(config, 0)), torch.randn(BATCH, SEQ, width, dtype=torch.float64)
    alibi = build_alibi_tensor(torch.ones(BATCH, SEQ), heads, torch.float64)
    out = theirs(x, torch.zeros_like(x), alibi, future())[0]
    fused = theirs.query_key_value
    weights = renamed(theirs, {"o_proj": "dense"})
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        weights[f"{name}.weight"] = fused.weight.view(heads, 3, 8, width)[:, index].flatten(0, 1)
        weights[f"{name}.bias"] = fused.bias.view(heads, 3, 8)[:, index].flatten()
    spec = small_spec("alibi", hidden_size=width, num_heads=heads, causal=True, bias=list(ATTENTION))
    check(spec, weights, (x, positions(0, 7)), out, 1e-5)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_self_attention(decoder: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=HIDDEN,
        d_kv=8,
        num_heads=4,
        is_decoder=decoder,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
        attn_implementation="eager",
    )
    theirs, x = made(T5Attention(config, has_relative_attention_bias=True, layer_idx=0)), hidden()
    out = theirs(x, mask=future() if decoder else None)[0]
    weights = renamed(theirs, dict(zip(ATTENTION, "qkvo", strict=True)))
    weights["encoding.relative_attention_bias.weight"] = theirs.relative_attention_bias.weight
    spec = small_spec("t5", num_buckets=8, max_distance=6, causal=decoder, scale=1.0)
    check(spec, weights, (x, positions(0, 100)), out, 1e-12)


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
    # transformers takes logarithms in fp32: a distance on a bucket's edge may fall one short of it
    exact = num_buckets // (4 if bidirectional else 2)
    wide = exact
    for distance in apart.tolist():
        edge = (
            wide * torch.tensor(distance / exact, dtype=torch.float64).log() / torch.tensor(max_distance / exact).log()
        )
        assert abs(float(edge) - round(float(edge))) < 1e-5, (distance, float(edge))
    assert int((ours - theirs).abs().max()) <= 1


def test_bert_embeddings_and_self_attention() -> None:
    from transformers.models.bert.modeling_bert import BertEmbeddings, BertSelfAttention

    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        max_position_embeddings=20,
        attn_implementation="eager",
    )
    front, attention = made(BertEmbeddings(config)), made(BertSelfAttention(config))
    front.token_type_embeddings.weight.zero_()  # ours has no segments
    front.LayerNorm = torch.nn.Identity()  # nor BERT's norm between embedding and first layer
    ids, at = torch.randint(0, 17, (BATCH, SEQ), generator=torch.Generator().manual_seed(2)), positions(0, 11)
    out = attention(front(ids, position_ids=at))[0]
    weights = renamed(attention, {"q_proj": "query", "k_proj": "key", "v_proj": "value"})
    weights["o_proj.weight"] = torch.eye(HIDDEN, dtype=torch.float64)
    weights["embed_tokens.weight"] = front.word_embeddings.weight
    weights["encoding.weight"] = front.position_embeddings.weight
    spec = small_spec("learned", max_positions=20, vocab_size=17, bias=["q_proj", "k_proj", "v_proj"])
    check(spec, weights, (ids, at), out, 1e-12)


def test_wav2vec2_conformer_relative_attention() -> None:
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
    theirs, x = made(Wav2Vec2ConformerSelfAttention(config)), hidden()
    rows = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    out = theirs(x, relative_position_embeddings=rows)[0]
    weights = renamed(
        theirs, {f"{name[0]}_proj": f"linear_{name[0]}" for name in ATTENTION[:3]} | {"o_proj": "linear_out"}
    )
    alternating = theirs.linear_pos.weight  # their R alternates sine and cosine, ours holds one half of each
    weights["encoding.r_proj.weight"] = torch.cat((alternating[:, 0::2], alternating[:, 1::2]), 1)
    weights["encoding.content_bias"], weights["encoding.position_bias"] = theirs.pos_bias_u, theirs.pos_bias_v
    check(small_spec("relative", bias=True), weights, (x, positions(0, 30)), out, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_xlnet_relative_attention(causal: bool) -> None:
    from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

    config = transformers.XLNetConfig(d_model=HIDDEN, n_head=4, d_inner=64, n_layer=1, dropout=0.0, vocab_size=17)
    theirs, x = made(XLNetRelativeAttention(config)), hidden()
    model = transformers.XLNetModel(config)
    rows = model.relative_positional_encoding(SEQ, SEQ, bsz=BATCH).double()
    mask = torch.ones(SEQ, SEQ, dtype=torch.float64).triu(1)[:, :, None, None].expand(-1, -1, BATCH, 1)
    kept: list[Tensor] = []
    theirs.layer_norm = torch.nn.Identity()
    theirs.layer_norm.register_forward_hook(lambda *args: kept.append(args[-1]))
    x_SBD = x.transpose(0, 1)
    theirs(x_SBD, None, mask if causal else None, None, rows, None)
    out = (kept[0] - x_SBD).transpose(0, 1)
    state = theirs.state_dict()
    weights = {f"{name}_proj.weight": state[name].flatten(1).T for name in "qkv"}
    weights["o_proj.weight"] = state["o"].flatten(1)
    weights["encoding.r_proj.weight"] = state["r"].flatten(1).T
    weights["encoding.content_bias"], weights["encoding.position_bias"] = state["r_w_bias"], state["r_r_bias"]
    check(small_spec("relative", causal=causal), weights, (x, positions(0, 30)), out, 1e-5)
