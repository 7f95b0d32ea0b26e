"""Corner mutants: graphs that are right but for one corner, in fourteen classes of families."""

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
)
"""The modules whose families FAMILIES has."""

__all__ = ["CLASSES", "FAMILIES", "MODULES", "corner_mutant"]
