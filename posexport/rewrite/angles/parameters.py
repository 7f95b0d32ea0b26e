"""The angles of a recognised rotation in float64: the cosines and sines that `--angles exact` gives.

    scale * cos(p w_i), scale * sin(p w_i)

w_i are the frequencies of the encoding's parameters, such as theta^(-2i/d), in float64. The graph has them rounded to
float32, after some operations, so its angles differ from these by `slack_i` p radians at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from posexport.errors import Reason, RequestError

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]
    Whole = np.ndarray[Any, np.dtype[np.int64]]

UNKNOWN, BY_LENGTH, AXES, FAST = "angles-unknown", "angles-by-length", "angles-of-kind", "angles-fast"
"""Codes of reasons why a rotation has no exact angles.

Its frequencies are of unknown origin; they depend on the length of a row; the encoding is not a rotation by one
position; a pair rotates by more than a radian per position.
"""

ROUNDINGS = 16
"""Rounding errors of float32 in a frequency: an exponent, a power and a division have up to 10 for a large theta."""

NOISE = 1e-6
"""How much cosines and sines may differ at any position: tables hold them in float32, and the scale was measured."""


@attrs.frozen(kw_only=True, eq=False)
class ExactAngles:
    """The angles of P pairs.

    `frequencies` [P] are in radians per position; `slack` [P] is the part of them that may be rounding in a graph.
    Cosines and sines are multiplied by `scale`.
    """

    frequencies: Array
    slack: Array
    scale: float

    def cos_sin(self, positions: Whole) -> tuple[Array, Array]:
        """Cosines and sines [..., P] of positions [...], in float64."""
        angles = positions[..., None].astype(np.float64) * self.frequencies
        return self.scale * np.cos(angles), self.scale * np.sin(angles)

    def tolerance(self, positions: Whole) -> Array:
        """[..., P]: how far the graph's cosines and sines may be from these at positions [...]."""
        return np.asarray(self.scale * (np.abs(positions)[..., None] * self.slack + NOISE))


def exact_of(encoding: Mapping[str, Any], pairs: int) -> ExactAngles | Reason:
    """The exact angles of `pairs` pairs of an encoding, or why it has none.

    The encoding is described as in posexport.graphs.attention.rotation.
    """
    if (reason := encoding.get("reason")) is not None:
        return Reason(UNKNOWN, reason["text"])
    if encoding["name"] != "rope":
        return Reason(AXES, f"{encoding['name']} is not a rotation by multiples of one position")
    if "frequencies" in encoding:
        near = encoding.get("near")
        text = "its frequencies match no known parameters"
        return Reason(UNKNOWN, text if near is None else f"{text}, only near those of theta {near['theta']:g}")
    from posexport.models.rotary import Rope
    from posexport.models.scaling import scaling_of

    given = {name: value for name, value in encoding.items() if name not in ("name", "rotary_dim", "rotary_start")}
    try:
        rope = Rope(**given)
    except RequestError as error:
        return Reason(UNKNOWN, str(error).rstrip("."))
    if scaling_of(rope).by_length:
        return Reason(BY_LENGTH, f"with scaling {rope.scaling} its frequencies depend on the length of a row")
    return _of_rope(rope, 2 * pairs)


def _of_rope(rope: Any, dim: int) -> ExactAngles | Reason:
    import torch

    from posexport.models.angles import FASTEST, inverse_frequencies
    from posexport.models.scaling import scaling_of

    scaling = scaling_of(rope)
    parameters = scaling.parameters_of(rope)
    frequencies = scaling.frequencies(rope.theta, dim, torch.float64, **parameters)["frequencies"].numpy()
    if frequencies.max() > FASTEST:
        return Reason(FAST, f"its fastest pair turns by {frequencies.max():.3g} radians per position, more than 1")
    unit = ROUNDINGS * 2.0**-24
    slack = unit * frequencies
    if rope.scaling in ("yarn", "llama3"):  # sums of two parts, of which one may be nearly zero
        slack = np.maximum(slack, unit / 4 * inverse_frequencies(dim, rope.theta, torch.float64).numpy())
    scale = float(rope.attention_factor or scaling.attention_factor(**parameters))
    return ExactAngles(frequencies=frequencies, slack=slack, scale=scale)
