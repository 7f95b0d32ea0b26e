"""The kernels of the evaluator, one file for each family of operators. Importing this package fills the table."""

from posexport.graphs.kernels import (
    attention,
    contrib,
    contrib_attention,
    control,
    convolutions,
    elementwise,
    indexing,
    layout,
    linear_attention,
    norms,
    products,
    q_linear,
    quantised,
    recurrent,
    reductions,
    resize,
)
from posexport.graphs.kernels.registry import KERNELS, MICROSOFT, Call, Value

__all__ = [
    "KERNELS",
    "MICROSOFT",
    "Call",
    "Value",
    "attention",
    "contrib",
    "contrib_attention",
    "control",
    "convolutions",
    "elementwise",
    "indexing",
    "layout",
    "linear_attention",
    "norms",
    "products",
    "q_linear",
    "quantised",
    "recurrent",
    "reductions",
    "resize",
]
