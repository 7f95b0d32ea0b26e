"""What a block is, as plain data: the spec, its inputs and outputs, forms, positions and presets. Imports no engine."""

from posexport.spec.forms import FORMS, OPSETS, TARGETS
from posexport.spec.spec import DTYPES, EncodingParams, Spec

__all__ = ["DTYPES", "FORMS", "OPSETS", "TARGETS", "EncodingParams", "Spec"]
