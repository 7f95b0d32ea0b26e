"""Corner mutants: graphs that are right but for one corner, in eight classes of families."""

from mutation.corners import batch, chunk, grid, length, magnitude, padding, position, special
from mutation.corners.family import CLASSES, FAMILIES, corner_mutant

MODULES = (grid, padding, batch, chunk, length, position, magnitude, special)
"""The modules whose families FAMILIES has."""

__all__ = ["CLASSES", "FAMILIES", "MODULES", "corner_mutant"]
