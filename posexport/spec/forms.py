"""Names of the forms, opsets and targets that a graph can be written in and for."""

from __future__ import annotations

FORMS = {
    "decomposed": "standard ONNX operators only, the most portable",
    "function": "model-local onnxscript functions of the domain 'posexport', which any runtime may inline",
    "native": "ONNX's own RotaryEmbedding and Attention, of opset 23 and 24",
    "contrib": "com.microsoft RotaryEmbedding, MultiHeadAttention and GroupQueryAttention, for ONNX Runtime",
}


OPSETS = range(18, 26)
"""ONNX opsets a file can be written in: each is exported, checked and run by a test."""


TARGETS = {
    "portable": "what ONNX Runtime and TensorRT both take",
    "ort": "what ONNX Runtime takes, or is faster with: caches inside of Attention, GroupQueryAttention, ScatterND",
    "tensorrt": "what TensorRT takes: no opset above 24",
}
"""What a form is lowered for. Where two targets take the same graph, the bytes are the same."""


ORT_ALONE = (
    "the file is written for ONNX Runtime alone: export with --target portable, in another form if that is refused"
)
"""What is said where a file for the target `ort` meets TensorRT."""
