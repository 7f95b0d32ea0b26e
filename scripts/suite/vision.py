"""Encoders of images and sound: learned grids, rotations by rows and columns, biases by offset."""

from __future__ import annotations

from functools import partial
from typing import Any

from architecture import HEADS, HIDDEN, LAYERS, architecture

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
SWIN: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
SPEECH: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "conv_dim": [16, 16],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "conv_depthwise_kernel_size": 3,
    "vocab_size": 32,
}
BIASED = {"use_relative_position_bias": True, "layer_scale_init_value": 0.5, "drop_path_rate": 0.0}
SAM = {
    **COMMON,
    "output_channels": 16,
    "mlp_ratio": 2.0,
    "window_size": 2,
    "global_attn_indexes": [1],
    "num_pos_feats": 8,
}
LEVIT = {
    "image_size": 64,
    "hidden_sizes": [32, 48],
    "num_attention_heads": [2, 3],
    "depths": [1, 2],
    "key_dim": [8, 8],
    "attention_ratio": [2, 2],
    "mlp_ratio": [2, 2],
    "down_ops": [["Subsample", 8, 4, 4, 2, 2], [""]],
}
HIERA = {
    "embed_dim": 32,
    "image_size": [32, 32],
    "depths": [1, 1],
    "num_heads": [2, 4],
    "num_query_pool": 1,
    "masked_unit_size": [2, 2],
    "masked_unit_attention": [True, False],
}
FRAMES = {
    **SPEECH,
    "feature_projection_input_dim": 16,
    "left_max_position_embeddings": 6,
    "right_max_position_embeddings": 3,
}
PARAKEET = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 96,
    "num_mel_bins": 16,
    "subsampling_factor": 2,
    "subsampling_conv_channels": 8,
    "max_position_embeddings": 256,
}


image = partial(architecture, "image", "Model")


VISION = [
    image("dinov3_vit", "DINOv3ViT", "rope2d", {**COMMON, "num_register_tokens": 2}, rope="2d half"),
    image("vit", "ViT", "learned", COMMON),
    image("deit", "DeiT", "learned", COMMON),
    image("dinov2", "Dinov2", "learned", {**COMMON, "mlp_ratio": 2}),
    image("swin", "Swin", "offset table", SWIN, sites=4, attention="eager"),
    image("swinv2", "Swinv2", "offset mlp", SWIN, sites=4, attention="eager"),
    image("beit", "Beit", "offset table", {**COMMON, **BIASED}),
    image("data2vec_vision", "Data2VecVision", "offset table", {**COMMON, **BIASED}, attention="eager"),
    image("siglip_vision", "SiglipVision", "learned", COMMON, notes="without its head, whose result is not exported"),
    image("clip_vision", "CLIPVision", "learned", COMMON),
    image("pixtral_vision", "PixtralVision", "rope2d", COMMON, rope="2d half", attention="eager"),
    image(
        "whisper_encoder",
        "Whisper",
        "sinusoidal",
        {
            "d_model": HIDDEN,
            "encoder_layers": LAYERS,
            "encoder_attention_heads": HEADS,
            "decoder_layers": 1,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": HIDDEN,
            "max_source_positions": 12,
            "vocab_size": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        kind="features",
        part="encoder",
    ),
    image("wav2vec2", "Wav2Vec2", "convolution", SPEECH, kind="audio"),
    image("hubert", "Hubert", "convolution", SPEECH, kind="audio"),
    image("wavlm", "WavLM", "t5 buckets, gated", SPEECH, kind="audio", attention="eager"),
    image(
        "wav2vec2_conformer_rotary",
        "Wav2Vec2Conformer",
        "rope",
        {**SPEECH, "position_embeddings_type": "rotary"},
        rope="half",
        kind="audio",
        attention="eager",
    ),
    image(
        "wav2vec2_conformer_relative",
        "Wav2Vec2Conformer",
        "xl",
        {**SPEECH, "position_embeddings_type": "relative"},
        kind="audio",
        attention="eager",
    ),
    image("dinov2_with_registers", "Dinov2WithRegisters", "learned", {**COMMON, "mlp_ratio": 2}),
    image("ijepa", "IJepa", "learned", COMMON),
    image("sam_vision", "SamVision", "decomposed offsets", SAM, attention="eager"),
    image("levit", "Levit", "offset table", LEVIT, sites=4, attention="eager"),
    image("hiera", "Hiera", "learned", HIERA, attention="eager", notes="attention inside windows"),
    image(
        "segformer",
        "Segformer",
        "convolution",
        {"depths": [1, 1], "num_encoder_blocks": 2, "sr_ratios": [2, 1], "hidden_sizes": [32, 64]}
        | {"num_attention_heads": [2, 4], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]},
        attention="eager",
    ),
    image("wav2vec2_bert", "Wav2Vec2Bert", "relative keys", FRAMES, kind="frames", attention="eager"),
    image(
        "parakeet_encoder",
        "Parakeet",
        "xl",
        PARAKEET,
        config="ParakeetEncoderConfig",
        model="ParakeetEncoder",
        kind="frames",
    ),
]
