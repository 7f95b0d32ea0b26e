"""posexport: ship attention with positional encodings on ONNX Runtime and TensorRT, and prove that it is the same."""

__version__ = "0.1.0"
