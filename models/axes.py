"""Rotary encodings over several axes: columns (x), rows (y) and time (t), in this order in `position_ids`.

rope2d      one half of a head rotates by one axis, the other half by the other axis. Pair i of each half rotates by
            p * theta^(-4i/head_dim) (Heo et al. 2024, arXiv:2403.13298, eq. 12 and 13, "RoPE-Axial"). With
            `spacing=alternate` the axes take the frequencies theta^(-2i/head_dim) in turns (Pixtral: Agrawal et al.
            2024, arXiv:2410.07073, section 2.1)
rope3d      the same for video, with `split` features for each axis (as in HunyuanVideo: Kong et al. 2024,
            arXiv:2412.03603)
mrope       pair i has RoPE's frequency and rotates by the axis of its section (Qwen2-VL: Wang et al. 2024,
            arXiv:2409.12191, section 2.1). Sections are consecutive or interleaved (Qwen3-VL)
rope-mixed  pair i of head h rotates by x * f_x + y * f_y, both trained (Heo et al. 2024, eq. 14, "RoPE-Mixed")
rope-dinov3 as rope2d, with the centres of patches from -1 to 1 along each axis, times 2 pi (Simeoni et al. 2025,
            arXiv:2508.10104, as in its code)
rope-vjepa2 one third of a head for each axis, and an angle for each feature (Assran et al. 2025, arXiv:2506.09985, as
            in its code)

Every constant is a matrix [axes, P] of frequencies. An entry is zero if the pair does not rotate by that axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from posexport import custom_ops
from posexport.models.angles import angle_constant, cos_sin, inexact, inverse_frequencies
from posexport.models.rotary import Rope, Rotary
from posexport.spec import fields
from posexport.spec.encoding import State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant

AXES = "xyt"
LAYOUTS = ("interleaved", "half", "half-head")
_LAYOUT = "pairs (2i, 2i+1), or (i, i + n/2) of the n features of an axis, or (i, i + head_dim/2)"


def placed(order: str, runs: Sequence[Tensor]) -> Tensor:
    """Return the matrix [axes, P] of runs of frequencies, one run for each axis in `order`."""
    import torch

    matrix: Tensor = torch.block_diag(*runs)
    return matrix[[order.index(axis) for axis in AXES[: len(order)]]]


@attrs.frozen(kw_only=True)
class Rope2d(Rotary):
    """RoPE over the columns and rows of a grid of any size. Tokens may have any order, and some may be missing."""

    name = "rope2d"
    summary = "rotary over columns and rows: half of each head turns by x, half by y"
    source = "Heo et al. 2024, arXiv:2403.13298, eq. 12 and 13"
    axes = 2
    theta: float = fields.positive(100.0, "base of the wavelengths")
    theta_y: float | None = fields.positive(None, "base of the wavelengths of rows (default: theta)")
    layout: str = fields.choice("interleaved", LAYOUTS, _LAYOUT)
    order: str = fields.choice("xy", ("xy", "yx"), "which axis has the first half of a head")
    spacing: str = fields.choice("each", ("each", "alternate"), "frequencies per axis, or of one list in turns")
    factor: float = fields.positive(1.0, "what positions are divided by (EVA-02: grid / trained grid)")

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.head_dim % 4:
            yield f"head_dim is {spec.head_dim}: rope2d gives pairs to two axes, so it must be divisible by 4."
        if self.spacing == "alternate" and self.theta_y is not None:
            yield "theta_y was given with spacing alternate: there both axes share one list, so drop it."
        yield from inexact(spec, min(self.theta, self.theta_y or self.theta))

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        def frequencies(dtype: torch.dtype) -> Tensor:
            if self.spacing == "alternate":
                whole = inverse_frequencies(spec.head_dim, self.theta, dtype)
                halves = [whole[::2], whole[1::2]]
            else:
                thetas = {"x": self.theta, "y": self.theta_y or self.theta}
                halves = [inverse_frequencies(spec.head_dim // 2, thetas[axis], dtype) for axis in self.order]
            return placed(self.order, halves) / self.factor

        return {"frequencies": angle_constant(spec, dtype, frequencies)}

    def runs(self, spec: Spec) -> list[int]:
        return [spec.head_dim // 4] * 2 if self.layout == "half" else [spec.head_dim // 2]


@attrs.frozen(kw_only=True)
class Rope3d(Rotary):
    name = "rope3d"
    summary = "rotary over columns, rows and frames: a part of each head for each"
    source = "Kong et al. 2024, arXiv:2412.03603 (HunyuanVideo)"
    axes = 3
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    theta_y: float | None = fields.positive(None, "base of the wavelengths of rows (default: theta)")
    theta_t: float | None = fields.positive(None, "base of the wavelengths of time (default: theta)")
    layout: str = fields.choice("interleaved", LAYOUTS, _LAYOUT)
    order: str = fields.choice("tyx", ("xyt", "xty", "yxt", "ytx", "txy", "tyx"), "whose features come first in a head")
    split: tuple[int, ...] | None = fields.numbers(
        "features of each axis in that order (default: thirds, the remainder to the first)", whole=True
    )

    def parts(self, spec: Spec) -> tuple[int, ...]:
        """Return the number of features of each axis, in `order`."""
        third = 2 * (spec.head_dim // 6)
        return self.split or (spec.head_dim - 2 * third, third, third)

    def problems(self, spec: Spec) -> Iterator[str]:
        parts = self.parts(spec)
        if len(parts) != 3 or any(part % 2 for part in parts) or not 0 < sum(parts) <= spec.head_dim:
            yield (
                f"split is {list(parts)} with head_dim {spec.head_dim}: it must be three even numbers, one for each of "
                f"{self.order}, of at most head_dim together."
            )
        yield from inexact(spec, min(self.theta, self.theta_y or self.theta, self.theta_t or self.theta))

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        thetas = {"x": self.theta, "y": self.theta_y or self.theta, "t": self.theta_t or self.theta}

        def frequencies(dtype: torch.dtype) -> Tensor:
            parts = zip(self.order, self.parts(spec), strict=True)
            return placed(self.order, [inverse_frequencies(width, thetas[axis], dtype) for axis, width in parts])

        return {"frequencies": angle_constant(spec, dtype, frequencies)}

    def runs(self, spec: Spec) -> list[int]:
        runs = [part // 2 for part in self.parts(spec) if part]
        return runs if self.layout == "half" else [sum(runs)]


@attrs.frozen(kw_only=True)
class Mrope(Rope):
    """RoPE whose pairs rotate by time, row or column, as `mrope_section` says. Scaling works as in RoPE."""

    name = "mrope"
    summary = "multimodal rotary: sections of RoPE's pairs turn by time, row and column"
    source = "Wang et al. 2024, arXiv:2409.12191, section 2.1"
    axes = 3
    layout: str = fields.choice("half", ("interleaved", "half"), "pairs (2i, 2i+1), or (i, i + rotary_dim/2)")
    mrope_section: tuple[int, ...] | None = fields.numbers(
        "pairs of time, row and column (default: a quarter and three eighths each)", whole=True
    )
    mrope_interleaved: bool = fields.flag(False, "time, row and column alternate (Qwen3-VL)")

    def sections(self, spec: Spec) -> tuple[int, ...]:
        """Return the number of pairs of time, row and column."""
        pairs = self.dim(spec) // 2
        return self.mrope_section or (pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8)

    def problems(self, spec: Spec) -> Iterator[str]:
        yield from super().problems(spec)
        sections, pairs = self.sections(spec), self.dim(spec) // 2
        if len(sections) != 3 or sum(sections) != pairs:
            yield (
                f"mrope_section is {list(sections)}: it must be three numbers (time, row, column) of {pairs} together, "
                "which are the pairs that turn."
            )
        limits = ((pairs + 1) // 3, pairs // 3)
        if self.mrope_interleaved and (sections[1] > limits[0] or sections[2] > limits[1]):
            yield (
                f"mrope_section is {list(sections)} with mrope_interleaved: rows and columns take every third of "
                f"{pairs} pairs, so at most {limits[0]} and {limits[1]}."
            )
        if self.scaling == "dynamic":
            yield "scaling dynamic was given with mrope: give another scaling, or none."

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Tensor]:
        import torch

        _, rows, columns = self.sections(spec)
        owner = torch.full((self.dim(spec) // 2,), AXES.index("t"))
        if self.mrope_interleaved:
            owner[1 : 3 * rows : 3] = AXES.index("y")
            owner[2 : 3 * columns : 3] = AXES.index("x")
        else:
            owner[len(owner) - rows - columns : len(owner) - columns] = AXES.index("y")
            owner[len(owner) - columns :] = AXES.index("x")
        owned = torch.arange(3)[:, None] == owner
        constants = super().constants(spec, dtype)
        return {name: torch.where(owned, values[..., None, :], 0) for name, values in constants.items()}


@attrs.frozen(kw_only=True)
class RopeMixed(Rotary):
    name = "rope-mixed"
    summary = "rotary over columns and rows at trained frequencies, per head and layer"
    source = "Heo et al. 2024, arXiv:2403.13298, eq. 14"
    axes = 2
    angular = False  # its frequencies are trained
    layout: str = fields.choice("interleaved", ("interleaved", "half"), "pairs (2i, 2i+1), or (i, i + head_dim/2)")

    def uses_fp32_products(self) -> bool:
        return True

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.head_dim % 2:
            yield f"head_dim is {spec.head_dim}: rope-mixed turns pairs, so it must be even."
        if spec.num_kv_heads != spec.num_heads:
            yield (
                f"num_kv_heads is {spec.num_kv_heads} with {spec.num_heads} heads: heads of rope-mixed have different "
                "frequencies, so give as many key heads as query heads."
            )

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"freqs": (2, spec.num_heads * spec.head_dim // 2)}

    def seeded(self, name: str, values: Tensor) -> Tensor:
        return values * 0.3

    def cos_sin(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        freqs = state["freqs"]
        freqs = freqs if freqs.element_size() > 2 else freqs.float()  # angles are never in half precision
        cos, sin = (custom_ops.angles_by_heads(t, state.spec.num_heads) for t in cos_sin(positions, freqs))
        return cos, sin


@attrs.frozen(kw_only=True)
class RopeDinov3(Rotary):
    name = "rope-dinov3"
    summary = "rotary over patch centres, from -1 to 1 along each axis of the grid"
    source = "Simeoni et al. 2025, arXiv:2508.10104 (DINOv3)"
    axes = 2
    base_properties = ("norms", "permutation", "finite")
    angular = False  # its angles are angles of fractions
    negative_positions = False
    theta: float = fields.positive(100.0, "base of the periods")
    grid: tuple[int, ...] | None = fields.numbers(
        "rows and columns (default: up to the largest positions of each batch row)", whole=True
    )

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.head_dim % 4:
            yield f"head_dim is {spec.head_dim}: rope-dinov3 gives pairs to two axes, so it must be divisible by 4."
        if self.grid is not None and (len(self.grid) != 2 or not all(self.grid)):
            yield f"grid is {list(self.grid)}: it must be two numbers, rows and columns, from 1."
        if spec.kv_cache and self.grid is None:
            yield (
                "kv_cache was given with rope-dinov3 without a grid: each step would use another grid, that of its own "
                "positions, so set grid=ROWS,COLUMNS, or drop the cache."
            )

    def properties(self, spec: Spec) -> tuple[str, ...]:
        return self.base_properties if self.grid is None else (*self.base_properties, "prefix")

    def position_limits(self) -> tuple[int, ...] | None:
        return None if self.grid is None else tuple(int(size) for size in self.grid[::-1])

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        half = inverse_frequencies(spec.head_dim // 2, self.theta, dtype)
        return {"frequencies": placed("yx", (half, half))}

    def cos_sin(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        columns_and_rows = list(self.grid or ())[::-1]
        return custom_ops.grid_sinusoids(positions, state["frequencies"], columns_and_rows, state.spec.prefix_tokens)


@attrs.frozen(kw_only=True)
class RopeVjepa2(Rotary):
    """The rotation of V-JEPA 2 over time, row and column.

    The two features of a pair (2i, 2i+1) have different angles, because the original code repeats the whole list of
    frequencies of an axis.
    """

    name = "rope-vjepa2"
    summary = "V-JEPA 2: a third of each head for time, row and column, an angle per feature"
    source = "Assran et al. 2025, arXiv:2506.09985 (V-JEPA 2)"
    axes = 3
    base_properties = ("permutation", "prefix", "finite")
    theta: float = fields.positive(10_000.0, "base of the wavelengths")

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.head_dim < 6:
            yield f"head_dim is {spec.head_dim}: rope-vjepa2 gives pairs to three axes, so at least 6."
        yield from inexact(spec, self.theta)

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        def frequencies(dtype: torch.dtype) -> Tensor:
            axis = inverse_frequencies(2 * (spec.head_dim // 3 // 2), self.theta, dtype).repeat(2)
            return placed("tyx", (axis, axis, axis))

        return {"frequencies": angle_constant(spec, dtype, frequencies)}

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.turns(state, positions)
        head_dim = state.spec.head_dim
        return custom_ops.rotate_features(q, cos, sin, head_dim), custom_ops.rotate_features(k, cos, sin, head_dim)
