"""TensorRT and TensorRT for RTX: build plans, run them, and evaluate the network that the parser made."""
