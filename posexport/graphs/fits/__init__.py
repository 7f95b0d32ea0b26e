"""Numbers that were measured, as the parameters of encodings that have them."""
