"""The parts of matplotlib that drawings use. Only this module imports it (a test checks this).

matplotlib reads a person's variables and files when it is imported: MPLBACKEND, matplotlibrc, styles. If one of them
can't be used, importing this module raises RequestError.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from posexport.errors import RequestError

_LOGGER = logging.getLogger("matplotlib")


@contextmanager
def quiet() -> Iterator[None]:
    """Hide matplotlib's warnings. It continues if its cache can't be written or a text has no place."""
    level = _LOGGER.level
    _LOGGER.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _LOGGER.setLevel(level)


try:
    with quiet():
        from matplotlib import rc_context
        from matplotlib import style as matplotlib_style
        from matplotlib.axes import Axes
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch, Rectangle
        from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
        from matplotlib.transforms import ScaledTranslation
except Exception as error:
    raise RequestError(
        f"matplotlib, which draws, can't start ({' '.join(str(error).split())[:100]}): check MPLBACKEND, MATPLOTLIBRC "
        "and MPLCONFIGDIR, and the files matplotlibrc and *.mplstyle that it finds through them or here."
    ) from None

__all__ = [
    "Axes", "ConstrainedLayoutEngine", "Figure", "FigureCanvasAgg", "FixedLocator", "FuncFormatter", "Line2D",
    "ListedColormap", "MaxNLocator", "NullLocator", "Patch", "Rectangle", "ScaledTranslation", "matplotlib_style",
    "quiet", "rc_context",
]  # fmt: skip
