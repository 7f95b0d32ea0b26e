"""Measured numbers as the parameters of the encodings that have them."""
