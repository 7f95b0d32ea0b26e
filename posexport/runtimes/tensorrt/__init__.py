"""TensorRT and TensorRT for RTX: building plans, running them, and evaluating the network that the parser made."""
