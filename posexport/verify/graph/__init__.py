"""Verification of ONNX files that anyone wrote: against themselves, or another file, in float64."""
