"""The support matrix: which encoding, form, dtype and runtime work together, measured."""
