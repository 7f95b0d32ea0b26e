"""Scaled frequencies of RoPE for contexts beyond the trained length. Names are those of Hugging Face's
`rope_parameters`.

With w_i = theta^(-2i/dim), L the trained length (original_max_position_embeddings), s the factor:

linear        w_i / s: position interpolation (Chen et al. 2023, arXiv:2306.15595, eq. 4)
ntk           w_i of theta s^(dim/(dim-2)) (bloc97's NTK-aware scaling; Peng et al. 2023, arXiv:2309.00071, eq. 15)
dynamic       the same with s n / L - (s - 1) in place of s, n = the largest position + 1, if n > L (ibid., app. B)
yarn          (1 - r_i) w_i / s + r_i w_i. r_i falls from 1 to 0 over the pairs between beta_fast and beta_slow
              rotations within L. Cosines and sines are multiplied by 0.1 ln s + 1 (ibid., eq. 17 to 22)
longrope      w_i / long_factor_i if n > L, else w_i / short_factor_i; times sqrt(1 + ln s / ln L)
              (Ding et al. 2024, arXiv:2402.13753, eq. 3 and 5)
llama3        w_i above high_freq_factor rotations within L, w_i / s below low_freq_factor, in between a mean of the two
              (Llama Team 2024, arXiv:2407.21783, section 3.4, and its code)
proportional  w_i for the first partial_rotary_factor of the pairs of the whole head, 0 for the rest
              (p-RoPE: Barbero et al. 2024, arXiv:2410.06205, section 5)

The operations and their order are those of transformers' modeling_rope_utils, so that float32 results are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.models.angles import inverse_frequencies

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.models.rotary import Rope

NEEDED = object()
"""Marks a parameter that has no default."""


def _linear(theta: float, dim: int, dtype: torch.dtype, *, factor: float) -> Mapping[str, Tensor]:
    return {"frequencies": inverse_frequencies(dim, theta, dtype) / factor}


def _ntk(theta: float, dim: int, dtype: torch.dtype, *, factor: float) -> Mapping[str, Tensor]:
    return {"frequencies": inverse_frequencies(dim, theta * factor ** (dim / (dim - 2)), dtype)}


def _plain(theta: float, dim: int, dtype: torch.dtype, **_: object) -> Mapping[str, Tensor]:
    return {"frequencies": inverse_frequencies(dim, theta, dtype)}


def _yarn(
    theta: float,
    dim: int,
    dtype: torch.dtype,
    *,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    **_: object,
) -> Mapping[str, Tensor]:
    import torch

    def pair(rotations: float) -> float:
        """Return the pair that makes this many rotations within the trained length."""
        return dim * math.log(original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(beta_fast), pair(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = theta ** (torch.arange(0, dim, 2).to(dtype) / dim)
    return {"frequencies": 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept}


def _longrope(
    theta: float,
    dim: int,
    dtype: torch.dtype,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    **_: object,
) -> Mapping[str, Tensor]:
    import torch

    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype) / dim
    factors = {"short_frequencies": short_factor, "long_frequencies": long_factor}
    return {name: 1.0 / (torch.tensor(value, dtype=dtype) * theta**steps) for name, value in factors.items()}


def _llama3(
    theta: float,
    dim: int,
    dtype: torch.dtype,
    *,
    factor: float,
    original_max_position_embeddings: int,
    low_freq_factor: float,
    high_freq_factor: float,
) -> Mapping[str, Tensor]:
    import torch

    length, low, high = original_max_position_embeddings, low_freq_factor, high_freq_factor
    frequencies = inverse_frequencies(dim, theta, dtype)
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > length / low, frequencies / factor, frequencies)
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= length / high) & (wavelength <= length / low)
    return {"frequencies": torch.where(medium, between, scaled)}


def _proportional(
    theta: float, dim: int, dtype: torch.dtype, *, partial_rotary_factor: float, factor: float
) -> Mapping[str, Tensor]:
    import torch

    rotating = int(partial_rotary_factor * dim // 2)
    frequencies = inverse_frequencies(dim, theta, dtype)[:rotating]
    return {"frequencies": torch.cat((frequencies, torch.zeros(dim // 2 - rotating, dtype=dtype))) / factor}


def _yarn_attention(*, factor: float, mscale: float | None, mscale_all_dim: float | None, **_: object) -> float:
    def attention(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale is not None and mscale_all_dim is not None:
        return attention(mscale) / attention(mscale_all_dim)
    return attention(1.0)


def _longrope_attention(*, factor: float, original_max_position_embeddings: int, **_: object) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings)) if factor > 1.0 else 1.0


def _takes(*needed: str, **defaults: Any) -> dict[str, Any]:
    return dict.fromkeys(needed, NEEDED) | defaults


@attrs.frozen
class Scaling:
    """One scaling.

    `takes` maps its parameters to their defaults. `frequencies(theta, dim, dtype, **parameters)` returns its constants
    by name. `attention_factor(**parameters)` returns the default factor on cosines and sines. `by_length` says whether
    frequencies depend on the length.
    """

    summary: str
    takes: Mapping[str, Any]
    frequencies: Callable[..., Mapping[str, Tensor]]
    attention_factor: Callable[..., float] = lambda **_: 1.0
    by_length: bool = False

    def parameters_of(self, rope: Rope) -> dict[str, Any]:
        """Return the parameters of `rope` that this scaling takes, by name."""
        return {name: getattr(rope, name) for name in self.takes}


UNSCALED = Scaling("the frequencies of the trained context", {}, _plain)

_LENGTH = "original_max_position_embeddings"

SCALINGS = {
    "linear": Scaling("position interpolation: every frequency divided by the factor", _takes("factor"), _linear),
    "ntk": Scaling("NTK-aware: a larger theta, once", _takes("factor"), _ntk),
    "dynamic": Scaling(
        "NTK-aware for the current length, beyond the trained length", _takes("factor", _LENGTH), _plain, by_length=True
    ),
    "yarn": Scaling(
        "slow pairs interpolated, fast pairs kept, a ramp between",
        _takes("factor", _LENGTH, beta_fast=32.0, beta_slow=1.0)
        | _takes(mscale=None, mscale_all_dim=None, attention_factor=None, truncate=True),
        _yarn,
        attention_factor=_yarn_attention,
    ),
    "longrope": Scaling(
        "frequencies divided by short or long factors, depending on the length",
        _takes("short_factor", "long_factor", _LENGTH, "factor", attention_factor=None),
        _longrope,
        attention_factor=_longrope_attention,
        by_length=True,
    ),
    "llama3": Scaling(
        "slow pairs divided by the factor, fast pairs kept, a mean between",
        _takes("factor", _LENGTH, low_freq_factor=1.0, high_freq_factor=4.0),
        _llama3,
    ),
    "proportional": Scaling(
        "p-RoPE: the slowest pairs don't rotate", _takes("partial_rotary_factor", factor=1.0), _proportional
    ),
}
"""Every scaling by its name in `rope_parameters`. `ntk` (static NTK) has no name there."""


def parameters() -> tuple[str, ...]:
    """Return the names of all parameters that some scaling takes."""
    return tuple(dict.fromkeys(name for scaling in SCALINGS.values() for name in scaling.takes))


def scaling_of(rope: Rope) -> Scaling:
    """Return the scaling of `rope`, or UNSCALED."""
    return UNSCALED if rope.scaling is None else SCALINGS[rope.scaling]


def settle(rope: Rope) -> None:
    """Set the defaults of the scaling in `rope`.

    RequestError for a parameter that is missing, wrong or belongs to another scaling.
    """
    takes = scaling_of(rope).takes
    for name in parameters():
        value = getattr(rope, name)
        if name not in takes and value is not None:
            allowed = ", ".join(other for other, scaling in SCALINGS.items() if name in scaling.takes)
            raise RequestError(
                f"{name} was given with scaling {rope.scaling or 'none'}: it belongs to {allowed}, so give that "
                "scaling or drop it."
            )
        if value is None and takes.get(name) is NEEDED:
            needed = ", ".join(key for key, default in takes.items() if default is NEEDED)
            raise RequestError(f"scaling {rope.scaling} lacks {name}: it needs {needed}.")
        if value is None:
            object.__setattr__(rope, name, takes.get(name))
    for problem in _problems(rope):
        raise RequestError(problem)


def _problems(rope: Rope) -> Iterator[str]:
    if rope.factor is not None and rope.factor < 1.0:
        yield f"factor is {rope.factor:g}: a scaling extends the context, so it must be 1 or more."
    if rope.partial_rotary_factor is not None and rope.partial_rotary_factor > 1.0:
        yield f"partial_rotary_factor is {rope.partial_rotary_factor:g}: it must be at most 1."
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        lower, upper = getattr(rope, low), getattr(rope, high)
        if lower is not None and upper is not None and lower > upper:
            yield f"{low} is {lower:g} and {high} {upper:g}: {low} must not be larger."
    if (rope.mscale is None) != (rope.mscale_all_dim is None):
        yield "one of mscale and mscale_all_dim was given: they act together, so give both or none."
    if rope.scaling == "yarn" and rope.theta <= 1.0:
        yield f"theta is {rope.theta:g} with scaling yarn: it must be more than 1."
