"""DeBERTa's logarithmic buckets of distances: exact, and equal to those of transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers import small_spec
from hf_helpers import transformers
from oracle_scores import deberta_bucket

from posexport.errors import RequestError
from posexport.models.attention import EncodingState
from posexport.models.content import MAX_REACH, log_bucket_ends, log_buckets

LARGEST_BUCKETS, LARGEST_POSITIONS = 512, 4096

Array = np.ndarray[Any, Any]


def rounded_buckets(buckets: int, max_position: int) -> list[int]:
    """A planted fault: rows by ceil of a quotient of rounded logarithms."""
    middle, reach = buckets // 2, max_position

    def row(distance: int) -> int:
        size = abs(distance)
        if size > middle:
            quotient = math.log(size / middle) / math.log((max_position - 1) / middle) * (middle - 1)
            distance = int(math.copysign(math.ceil(quotient) + middle, distance))
        return min(max(distance + buckets, 0), 2 * buckets - 1)

    return [row(distance) for distance in range(-reach, reach + 1)]


def exact_buckets(buckets: int, max_position: int, reach: int) -> list[int]:
    sizes = [deberta_bucket(distance, buckets, max_position) for distance in range(reach + 1)]
    offsets = [-size for size in sizes[:0:-1]] + sizes
    return [min(max(offset + buckets, 0), 2 * buckets - 1) for offset in offsets]


def theirs(buckets: int, max_position: int, reach: int) -> list[int]:
    """The rows of transformers, which computes logarithms in float32."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    offsets = make_log_bucket_position(torch.arange(-reach, reach + 1), buckets, max_position).long()
    return (offsets + buckets).clamp(0, 2 * buckets - 1).tolist()


@pytest.mark.parametrize(
    ("buckets", "positions"),
    [(4, 4), (4, 4096), (5, 40), (7, 100), (20, 81), (32, 129), (33, 129), (128, 513), (127, 66)],
)
def test_every_row_is_exact(buckets: int, positions: int) -> None:
    rows = log_buckets(buckets, positions)
    reach = len(rows) // 2
    assert rows == exact_buckets(buckets, positions, reach)
    beyond = exact_buckets(buckets, positions, reach + 3)  # Every distance beyond the table has the row of its end.
    assert beyond[:4] == [rows[0]] * 4
    assert beyond[-4:] == [rows[-1]] * 4


@pytest.mark.parametrize(("buckets", "positions"), [(128, 513), (32, 129), (20, 81)])
def test_rounded_logarithms_would_put_the_last_distance_one_bucket_too_far(buckets: int, positions: int) -> None:
    assert rounded_buckets(buckets, positions) != log_buckets(buckets, positions)


USUAL = itertools.product((4, 16, 20, 32, 64, 128, 256, 512), (81, 128, 129, 512, 513, 1024, 1025, 2048, 4096))


# With more buckets, half of them are exact distances, and none is left for the other half.
@pytest.mark.parametrize(("buckets", "positions"), [pair for pair in USUAL if pair[0] // 2 < pair[1] - 1])
def test_usual_sizes_equal_transformers(buckets: int, positions: int) -> None:
    if (buckets, positions) not in ROUNDED:
        rows = log_buckets(buckets, positions)
        assert rows == theirs(buckets, positions, len(rows) // 2)


ROUNDED = {
    (20, 3610): {1876: (19, 18)},
    (32, 3350): {395: (26, 25)},
    (64, 2393): {903: (57, 56)},
    (100, 171): {114: (84, 83)},
    (300, 2049): {1943: (297, 296)},
    (512, 4096): {1643: (428, 427)},
}
"""(buckets, positions) to {distance: (exact bucket, transformers' bucket)}.

At these distances, the quotient of logarithms times m - 1 is above an integer by so little that float32 loses it.
transformers' bucket then depends on how a machine rounds logarithms, and posexport's bucket is exact. One in a hundred
pairs of (buckets, positions) has such distances, but no size of a published checkpoint.
"""


@pytest.mark.parametrize(("buckets", "positions"), ROUNDED)
def test_where_transformers_rounds_ours_is_exact(buckets: int, positions: int) -> None:
    rows = log_buckets(buckets, positions)
    reach = len(rows) // 2
    other = theirs(buckets, positions, reach)
    for distance, (exact, rounded) in ROUNDED[buckets, positions].items():
        assert rows[reach + distance] - buckets == exact == deberta_bucket(distance, buckets, positions)
        assert other[reach + distance] - buckets in (exact, rounded)
    apart = {abs(index - reach) for index, (ours, their) in enumerate(zip(rows, other, strict=True)) if ours != their}
    assert apart <= ROUNDED[buckets, positions].keys()


@pytest.mark.slow
def test_transformers_differs_only_by_its_rounding() -> None:
    """Every 29th size up to the largest, over all distances of the table.

    Rows differ by one bucket, and only if the quotient is within 1e-4 of an integer.
    """
    sizes = apart = 0
    for buckets in range(4, LARGEST_BUCKETS + 1, 2):
        middle = buckets // 2
        for positions in positions_of(buckets, 29):
            rows = np.array(log_buckets(buckets, positions))
            reach = len(rows) // 2
            differs = np.flatnonzero(rows != theirs(buckets, positions, reach))
            quotient = np.log(np.abs(differs - reach) / middle) / math.log((positions - 1) / middle) * (middle - 1)
            assert np.abs(quotient - quotient.round()).max(initial=0) < 1e-4
            sizes, apart = sizes + 1, apart + bool(len(differs))
    assert 0 < apart < 0.02 * sizes


def wrong_ends(middle: int, last: int, positions: Array, ends: Array) -> Array:
    """Whether each of `ends` [positions, steps 0 to last] is not the last distance of its bucket.

    d belongs to step s or below if (m - 1) ln d + s ln m <= s ln f + (m - 1) ln m, f = max_position - 1. Extended
    precision decides this, except within 1e-9, where Python's integers decide."""
    steps, furthest = np.arange(last + 1), positions - 1
    logs = np.log(np.arange(1, int(ends.max()) + 3).astype(np.longdouble))
    bound = steps * logs[furthest - 1][:, None] + (middle - 1 - steps) * logs[middle - 1]
    wrong = np.zeros(ends.shape, bool)
    for extra, belongs in ((0, True), (1, False)):
        excess = (middle - 1) * logs[ends + extra - 1] - bound
        wrong |= (excess <= 0) != belongs
        for row, step in np.argwhere(np.abs(excess) < 1e-9):
            distance, far = int(ends[row, step]) + extra, int(furthest[row])
            inside = distance ** (middle - 1) * middle ** int(step) <= far ** int(step) * middle ** (middle - 1)
            wrong[row, step] = inside != belongs
    return wrong


def checked(buckets: int, all_positions: list[int]) -> Iterator[tuple[int, int]]:
    """The pairs (buckets, positions) with a wrong end."""
    ends = np.array([log_bucket_ends(buckets, positions) for positions in all_positions])
    wrong = wrong_ends(buckets // 2, ends.shape[1] - 1, np.array(all_positions), ends)
    yield from ((buckets, all_positions[row]) for row in np.flatnonzero(wrong.any(1)))


def positions_of(buckets: int, stride: int) -> list[int]:
    """Every `stride`th number of positions that is valid for these buckets."""
    middle = buckets // 2
    allowed = range(middle + 2, LARGEST_POSITIONS + 1)
    if buckets % 2:  # With few odd buckets, the last one begins at distances beyond any table.
        allowed = range(middle + 2, next((p for p in (allowed) if log_bucket_ends(buckets, p)[-1] >= MAX_REACH), 4097))
    return list(allowed[::stride])


@pytest.mark.slow
@pytest.mark.parametrize("parity", [0, 1])
def test_a_sample_of_all_sizes_is_exact(parity: int) -> None:
    for buckets in range(4 + parity, LARGEST_BUCKETS + 1, 46):
        assert not list(checked(buckets, positions_of(buckets, 97)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4, 20))
def test_every_size_is_exact(first: int) -> None:
    for buckets in range(first, LARGEST_BUCKETS + 1, 16):
        assert not list(checked(buckets, positions_of(buckets, 1)))


def test_the_exact_check_finds_a_shifted_end() -> None:
    ends = np.array([log_bucket_ends(32, positions) for positions in (129, 512)])
    for change in (-1, 1):
        shifted = ends.copy()
        shifted[0, 7] += change
        assert wrong_ends(16, 15, np.array([129, 512]), shifted)[0].any()


def test_the_block_looks_up_these_rows() -> None:
    spec = small_spec("deberta", position_buckets=20, max_relative_positions=81)
    assert EncodingState(spec, torch.float32)["buckets"].tolist() == log_buckets(20, 81)
    assert spec.saturation_distance() == len(log_buckets(20, 81)) // 2


def test_odd_buckets_whose_last_begins_too_far_are_refused() -> None:
    with pytest.raises(RequestError, match="give an even number of buckets"):
        small_spec("deberta", position_buckets=5, max_relative_positions=4096)


@pytest.mark.parametrize(("buckets", "positions", "tokens"), [(128, 513, 600), (20, 81, 90), (33, 70, 90)])
def test_scores_equal_transformers_over_all_distances(buckets: int, positions: int, tokens: int) -> None:
    """Both terms of the attention of transformers' DebertaV2, at distances up to and beyond the last bucket."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

    config = transformers.DebertaV2Config(
        **{"hidden_size": 8, "num_attention_heads": 2, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        **{"position_buckets": buckets, "max_relative_positions": positions, "position_biased_input": False},
    )
    torch.manual_seed(0)
    attention = DisentangledSelfAttention(config).eval()
    state, x, table = attention.state_dict(), torch.randn(1, tokens, 8), torch.randn(2 * buckets, 8)
    with torch.no_grad():
        context = attention(x, torch.ones(1, 1, tokens, tokens), rel_embeddings=table)[0]
    spec = small_spec(
        "deberta",
        **{"hidden_size": 8, "num_heads": 2, "bias": ["q_proj", "k_proj", "v_proj"], "pos_bias": True},
        **{"position_buckets": buckets, "max_relative_positions": positions},
    )
    weights = {
        f"{name[0]}_proj.{kind}": state[f"{name}_proj.{kind}"]
        for name in ("query", "key", "value")
        for kind in ("weight", "bias")
    }
    weights["o_proj.weight"] = torch.eye(8)
    weights["encoding.weight"] = table
    for name in ("key", "query"):
        for kind in ("weight", "bias"):
            weights[f"encoding.pos_{name}_proj.{kind}"] = state[f"pos_{name}_proj.{kind}"]
    from posexport.models.block import build_block

    ours = build_block(spec, weights)(x, torch.arange(tokens).unsqueeze(0))
    assert (ours - context).abs().max() <= 1e-5 * context.abs().max()
