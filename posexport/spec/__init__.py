"""A block as plain data: spec, encoding, inputs and outputs, forms, positions, presets. Imports no engine."""

from posexport.spec.encoding import Encoding
from posexport.spec.forms import FORMS, OPSETS, TARGETS
from posexport.spec.spec import DTYPES, Spec

__all__ = ["DTYPES", "FORMS", "OPSETS", "TARGETS", "Encoding", "Spec"]
