"""Reads any ONNX graph: its inputs by role, its attention, and its values in float64."""
