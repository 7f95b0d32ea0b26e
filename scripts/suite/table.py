"""All architectures by name."""

from __future__ import annotations

from decoders import DECODERS
from encoders import ENCODERS
from vision import VISION

ARCHITECTURES = {row.name: row for row in [*DECODERS, *ENCODERS, *VISION]}
