"""Files with inputs, float64 references and limits, made here and verified on a machine that can't make them."""
