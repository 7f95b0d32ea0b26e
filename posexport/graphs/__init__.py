"""What any ONNX graph holds: its inputs by role, its attention, its values in float64."""
