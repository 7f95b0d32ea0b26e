"""The type of numpy arrays in signatures, for modules that import numpy anyway."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
"""A numpy array of any shape and dtype; docstrings give both."""
