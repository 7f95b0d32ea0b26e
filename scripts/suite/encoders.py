"""Encoders of tokens, and encoder-decoders: learned positions, rotations, buckets and content-dependent biases."""

from __future__ import annotations

from functools import partial
from typing import Any

from architecture import HEAD_SIZE, HEADS, HIDDEN, LAYERS, VOCABULARY, architecture

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": HEAD_SIZE,
    "d_ff": 96,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 12,
}
DEBERTA = {**COMMON, "relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


encoder = partial(architecture, "tokens", "Model")

seq2seq = partial(architecture, "seq2seq", "ForConditionalGeneration", sites=6)
"""An encoder-decoder without a cache. It has two attentions in the encoder and four in the decoder."""


ENCODERS = [
    encoder("bert", "Bert", "learned", COMMON),
    encoder("t5_encoder", "T5", "t5 buckets", T5, model="T5EncoderModel", attention="eager", gain=0.8),
    encoder("roberta", "Roberta", "learned", COMMON, notes="positions counted from padding"),
    encoder(
        "distilbert",
        "DistilBert",
        "learned",
        {
            "vocab_size": VOCABULARY,
            "dim": HIDDEN,
            "hidden_dim": 96,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "max_position_embeddings": 256,
        },
    ),
    encoder("electra", "Electra", "learned", {**COMMON, "embedding_size": 32}),
    encoder("albert", "Albert", "learned", {**COMMON, "embedding_size": 32}, notes="both layers share their weights"),
    encoder("deberta", "Deberta", "deberta", DEBERTA, attention="eager"),
    encoder(
        "deberta_v2",
        "DebertaV2",
        "deberta",
        {**DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
        attention="eager",
    ),
    encoder("modernbert", "ModernBert", "rope", {**COMMON, **SPECIAL, "local_attention": 6}, rope="half"),
    encoder("nomic_bert", "NomicBert", "rope", COMMON, rope="half"),
    encoder("xlm_roberta", "XLMRoberta", "learned", COMMON),
    encoder("jina_embeddings_v3", "JinaEmbeddingsV3", "rope", COMMON, rope="half"),
    encoder("gte", "Gte", "rope", COMMON, rope="half"),
    encoder("eurobert", "EuroBert", "rope", {**COMMON, "num_key_value_heads": 2}, rope="half"),
    encoder("roformer", "RoFormer", "rope", COMMON, rope="interleaved", attention="eager"),
    encoder("mpnet", "MPNet", "t5 buckets", COMMON, attention="eager"),
    encoder(
        "esm",
        "Esm",
        "rope",
        {**COMMON, "position_embedding_type": "rotary", "mask_token_id": 3, "emb_layer_norm_before": True},
        rope="half",
    ),
    encoder("umt5_encoder", "UMT5", "t5 buckets", T5, model="UMT5EncoderModel", attention="eager", gain=0.8),
    encoder(
        "xlnet",
        "XLNet",
        "xl",
        {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 96},
        attention="eager",
    ),
    encoder(
        "clip_text", "CLIP", "learned", {**COMMON, "eos_token_id": 2}, config="CLIPTextConfig", model="CLIPTextModel"
    ),
    encoder("longformer", "Longformer", "learned", {**COMMON, "attention_window": 4}, attention="eager"),
    encoder("siglip_text", "Siglip", "learned", COMMON, config="SiglipTextConfig", model="SiglipTextModel"),
    encoder("rembert", "RemBert", "learned", {**COMMON, "input_embedding_size": 32}, attention="eager"),
    encoder("squeezebert", "SqueezeBert", "learned", {**COMMON, "embedding_size": HIDDEN}, attention="eager"),
    encoder("big_bird", "BigBird", "learned", {**COMMON, "attention_type": "original_full"}, attention="eager"),
    seq2seq("pegasus", "Pegasus", "sinusoidal", BART, notes="two attentions of the decoder are crossed"),
    seq2seq("marian", "Marian", "sinusoidal", BART, model="MarianMTModel", notes="two attentions are crossed"),
    seq2seq(
        "t5", "T5", "t5 buckets", T5, attention="eager", gain=0.8, notes="two attentions of the decoder are crossed"
    ),
    seq2seq("bart", "Bart", "learned", BART, notes="two attentions of the decoder are crossed"),
]
