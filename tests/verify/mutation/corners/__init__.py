"""Corner mutants: graphs that are right except in one corner. Families of such mutants are grouped into classes."""

from mutation.corners import (
    band,
    batch,
    chunk,
    grid,
    length,
    magnitude,
    ordinary,
    other_spec,
    own_size,
    padding,
    plain,
    position,
    reserve,
    served,
    special,
    step,
    together,
)
from mutation.corners.family import CLASSES, FAMILIES, corner_mutant

MODULES = (
    grid,
    padding,
    batch,
    chunk,
    length,
    position,
    magnitude,
    ordinary,
    special,
    band,
    step,
    own_size,
    reserve,
    plain,
    other_spec,
    served,
    together,
)
"""The modules that register families in FAMILIES."""

__all__ = ["CLASSES", "FAMILIES", "MODULES", "corner_mutant"]
