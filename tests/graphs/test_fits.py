"""Parameters that are fitted to frequencies and biases, against the formulas of transformers and of papers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from posexport.graphs.attention.angles import Turning
from posexport.graphs.attention.pairings import Pairs
from posexport.graphs.fits.axes import axes_parameters
from posexport.graphs.fits.decay import xpos_decay
from posexport.graphs.fits.distance import distance_parameters
from posexport.graphs.fits.grid import dinov3_parameters, grid_turning
from posexport.graphs.fits.rope import rope_parameters, shortest, static_parameters
from posexport.models import read_encoding

Array = np.ndarray[Any, Any]


def made(dim: int, parameters: dict[str, Any]) -> tuple[Array, float]:
    """The frequencies in float32 and the factor on cosines that transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 10_000.0, "rope_type": parameters.get("scaling", "default")}
    rope |= {"rope_theta" if key == "theta" else key: value for key, value in parameters.items() if key != "scaling"}
    if rope["rope_type"] == "default":
        steps = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return (1.0 / rope["rope_theta"] ** steps).double().numpy(), 1.0
    length = int(rope.get("original_max_position_embeddings", 2048) * rope.get("factor", 1))
    config = LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, rope_parameters=rope, max_position_embeddings=length
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return frequencies.double().numpy(), float(np.float32(factor))


def turning(frequencies: Array, amplitude: float = 1.0, **more: Any) -> Turning:
    """The result of an exact measurement of these frequencies."""
    return Turning(
        frequencies=np.atleast_2d(frequencies), amplitude=amplitude, spread=1e-16, reach=32767, inputs=True, **more
    )


LENGTH = "original_max_position_embeddings"

ROPES: list[dict[str, Any]] = [
    *({"theta": theta} for theta in (10_000.0, 500_000.0, 1_000_000.0, 100.0, 5e6, 12_345.0)),
    *({"theta": theta, "scaling": "linear", "factor": factor} for theta in (10_000.0, 1e6) for factor in (2.5, 8.0)),
    *(
        {"theta": theta, "scaling": scaling, "factor": factor, LENGTH: length}
        for scaling in ("llama3", "yarn")
        for theta in (10_000.0, 500_000.0)
        for factor in (4.0, 32.0)
        for length in (2048, 8192)
    ),
    {"theta": 500_000.0, "scaling": "llama3", "factor": 8.0, LENGTH: 8192, "high_freq_factor": 16.0},
    {"theta": 150_000.0, "scaling": "yarn", "factor": 32.0, LENGTH: 4096, "truncate": False},
    {"theta": 10_000.0, "scaling": "yarn", "factor": 40.0, LENGTH: 4096, "attention_factor": 1.0},
    {"theta": 10_000.0, "scaling": "yarn", "factor": 16.0, LENGTH: 4096, "attention_factor": 1.25},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("parameters", ROPES, ids=lambda one: " ".join(f"{key}={one[key]}" for key in one))
def test_parameters_come_back_from_the_frequencies_of_transformers(parameters: dict[str, Any], dim: int) -> None:
    given = dict(parameters)
    if given.get("scaling") == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": given.get("high_freq_factor", 4.0)}
    frequencies, amplitude = made(dim, given)
    found = rope_parameters(turning(frequencies, amplitude))
    assert found is not None
    assert read_encoding({"name": "rope", **found}) == read_encoding({"name": "rope", **parameters})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dim", [8, 16, 32])
@pytest.mark.parametrize("parameters", ROPES, ids=lambda one: " ".join(f"{key}={one[key]}" for key in one))
def test_few_pairs_get_parameters_of_the_same_function_or_none(parameters: dict[str, Any], dim: int) -> None:
    """Several sets of parameters may give the same few frequencies. The returned set must give them."""
    given = dict(parameters)
    if given.get("scaling") == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": given.get("high_freq_factor", 4.0)}
    frequencies, amplitude = made(dim, given)
    found = rope_parameters(turning(frequencies, amplitude))
    if found is None:
        assert dim == 8  # Three pairs after the first are too few for five parameters.
        return
    again = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **found} if found.get("scaling") == "llama3" else found
    if "scaling" not in again:
        again = {"theta": again["theta"]}
    same, factor = made(dim, again)
    np.testing.assert_allclose(same, frequencies, rtol=1e-5)
    assert factor == pytest.approx(found.get("attention_factor", amplitude), rel=1e-5)


@pytest.mark.parametrize("theta", [10_001.0, 500_050.0, 9_999.0])
def test_a_theta_that_is_off_by_a_little_is_not_made_the_usual_one(theta: float) -> None:
    frequencies, _ = made(128, {"theta": theta})
    assert rope_parameters(turning(frequencies)) == {"theta": theta}


@pytest.mark.parametrize("pair", [0, 7, 31])
def test_one_frequency_that_is_off_has_no_parameters(pair: int) -> None:
    frequencies, _ = made(64, {"theta": 10_000.0})
    frequencies[pair] *= 1 + 1e-4
    found = rope_parameters(turning(frequencies))
    assert found is None or found != {"theta": 10_000.0}
    if found is not None:
        np.testing.assert_allclose(made(64, found)[0], frequencies, rtol=2e-6)


def test_frequencies_of_a_table_in_half_precision_are_within_its_rounding() -> None:
    frequencies, _ = made(64, {"theta": 10_000.0})
    loose = Turning(frequencies=frequencies[None], amplitude=1.0, spread=4e-4, reach=2047, inputs=True)
    assert rope_parameters(loose) == {"theta": 10_000.0}
    off = Turning(frequencies=frequencies[None] * (1 + 1e-3), amplitude=1.0, spread=4e-4, reach=2047, inputs=True)
    assert rope_parameters(off) != {"theta": 10_000.0}


def test_slow_pairs_that_stand_still() -> None:
    frequencies, _ = made(64, {"theta": 10_000.0})
    frequencies[16:] = 0
    found = rope_parameters(turning(frequencies))
    assert found == {"theta": 10_000.0, "scaling": "proportional", "partial_rotary_factor": 0.5}


def test_two_lists_by_length_are_longrope() -> None:
    steps = 10_000.0 ** (-np.arange(32) / 32)
    short, long = np.linspace(1.0, 2.0, 32), np.linspace(1.0, 40.0, 32)
    amplitude = math.sqrt(1 + math.log(32) / math.log(4096))
    one = turning(steps / short, amplitude, edge=4096, long=steps / long, longest=steps / long)
    found = rope_parameters(one)
    assert found is not None and (found["scaling"], found[LENGTH], found["factor"]) == ("longrope", 4096, 32.0)
    np.testing.assert_allclose(found["short_factor"], short, rtol=2e-6)
    np.testing.assert_allclose(found["long_factor"], long, rtol=2e-6)


def test_a_theta_that_grows_with_the_length_is_dynamic() -> None:
    def at(length: int) -> Array:
        theta = 10_000.0 * (8.0 * length / 2048 - 7.0) ** (64 / 62)
        return theta ** (-np.arange(32) / 32)

    one = turning(10_000.0 ** (-np.arange(32) / 32), edge=2048, long=at(2049), longest=at(32768))
    expected = {"theta": 10_000.0, "scaling": "dynamic", "factor": 8.0, LENGTH: 2048}
    assert rope_parameters(one) == expected


HALF, PER_AXIS = Pairs(interleaved=False, runs=(16,)), Pairs(interleaved=False, runs=(8, 8))


def on_axes(order: str, runs: list[Array]) -> Array:
    """Frequencies [axes, P] from runs of frequencies, one after the other, each for one axis."""
    matrix = np.zeros((len(order), sum(map(len, runs))))
    start = 0
    for axis, run in zip(order, runs, strict=True):
        matrix["xyt".index(axis), start : start + len(run)] = run
        start += len(run)
    return matrix


@pytest.mark.parametrize(
    ("order", "thetas", "pairs", "expected"),
    [
        ("xy", (100.0, 100.0), HALF, {"layout": "half-head", "theta": 100.0, "order": "xy"}),
        ("yx", (50.0, 70.0), HALF, {"layout": "half-head", "theta": 70.0, "theta_y": 50.0, "order": "yx"}),
        ("xy", (10.0, 10.0), PER_AXIS, {"layout": "half", "theta": 10.0, "order": "xy"}),
    ],
)
def test_two_axes(order: str, thetas: tuple[float, float], pairs: Pairs, expected: dict[str, Any]) -> None:
    runs = [theta ** (-np.arange(8) / 8) for theta in thetas]
    assert axes_parameters(on_axes(order, runs), 1.0, 1e-12, pairs) == {"name": "rope2d", **expected}
    runs[1][3] *= 1.001
    assert axes_parameters(on_axes(order, runs), 1.0, 1e-12, pairs) is None


def test_three_axes_of_one_list_are_sections_of_mrope() -> None:
    whole = 10_000.0 ** (-np.arange(16) / 16)
    runs = [whole[:8], whole[8:12], whole[12:]]
    found = axes_parameters(on_axes("tyx", runs), 1.0, 1e-12, HALF)
    assert found == {"name": "mrope", "layout": "half", "theta": 10_000.0, "mrope_section": [8, 4, 4]}
    restarted = [theta ** (-np.arange(count) / count) for theta, count in ((100.0, 8), (100.0, 4), (100.0, 4))]
    found = axes_parameters(on_axes("tyx", restarted), 1.0, 1e-12, HALF)
    assert found is not None and (found["name"], found["theta"], found["split"]) == ("rope3d", 100.0, [16, 8, 8])


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (14, 16)])
def test_centres_of_patches_on_a_grid(grid: tuple[int, int]) -> None:
    """The angles of DINOv3, computed as in its code. On small grids, neighbours differ by more than half a turn."""
    rows, columns = grid
    periods = 100.0 ** (2 * np.arange(4) / 8)
    centres = [2 * ((np.arange(size) + 0.5) / size) - 1 for size in grid]
    y, x = np.meshgrid(*centres, indexing="ij")
    angles = 2 * np.pi * np.stack([y, x], -1)[..., None] / periods
    turns = np.exp(1j * angles.reshape(rows * columns, 8).astype(np.float32).astype(float))
    found = grid_turning(np.concatenate([np.ones((3, 8)), turns]), 4)
    assert found is not None and (found.rows, found.columns, found.prefix) == (rows, columns, 3)
    assert dinov3_parameters(found) == {"name": "rope-dinov3", "theta": 100.0, "grid": [rows, columns]}
    shifted = grid_turning(turns * np.exp(0.01j), 0)
    assert shifted is None or dinov3_parameters(shifted) is None


def test_decay_of_xpos() -> None:
    pairs = np.arange(8)
    growth = np.log((pairs / 8 + 0.4) / 1.4) / 512
    assert xpos_decay(growth) == {"scale_base": 512, "gamma": 0.4}
    assert xpos_decay(growth + 1e-5) is None
    assert xpos_decay(-growth) is None


DISTANCES = np.arange(300)


def test_alibi_slopes() -> None:
    authors = np.array([2.0 ** (-2 * head) for head in range(1, 5)])
    behind = -authors[:, None] * DISTANCES
    assert distance_parameters(behind, behind[:, :1], []) == {"name": "alibi"}
    assert distance_parameters(behind, behind, []) == {"name": "alibi"}
    one = authors.copy()
    one[2] *= 1.001
    found = distance_parameters(-one[:, None] * DISTANCES, behind[:, :1], [])
    assert found == {"name": "alibi", "slopes": one.tolist()}
    found = distance_parameters(behind, -behind, [])
    assert found == {"name": "alibi", "slopes_ahead": (-authors).tolist()}


def t5_bias(num_buckets: int, max_distance: int, causal: bool) -> tuple[Array, Array]:
    """A T5 bias with the buckets of transformers."""
    from transformers.models.t5.modeling_t5 import T5Attention

    table = np.random.default_rng(0).standard_normal((num_buckets, 4))
    relative = torch.arange(-299, 300)  # key - query
    buckets = T5Attention._relative_position_bucket(relative, not causal, num_buckets, max_distance).numpy()
    bias = table[buckets].T
    bias = bias - bias[:, 299:300]
    return bias[:, 299::-1], bias[:, 299:300] if causal else bias[:, 299:]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 40), (32, 256), (64, 90)])
def test_buckets_of_t5(buckets: int, distance: int, causal: bool) -> None:
    behind, ahead = t5_bias(buckets, distance, causal)
    found = distance_parameters(behind, ahead, [])
    assert found == {"name": "t5", "num_buckets": buckets, "max_distance": distance}
    behind = behind.copy()
    behind[:, 200] += 1e-3
    assert (distance_parameters(behind, ahead, [buckets]) or {"name": "none"})["name"] != "t5"


def test_kerple_and_sandwich() -> None:
    r1, r2 = np.array([0.5, 1.0, 2.0]), np.array([0.3, 1.5, 4.0])
    log = -r1[:, None] * np.log1p(r2[:, None] * DISTANCES)
    power = -r1[:, None] * DISTANCES ** (r2[:, None] / 4)
    assert distance_parameters(log, log[:, :1], []) == {"name": "kerple"}
    assert distance_parameters(power, power[:, :1], []) == {"name": "kerple", "kernel": "power"}
    cosines = (np.cos(DISTANCES[:, None] * 10_000.0 ** (-np.arange(0, 64, 2) / 64)) - 1).sum(1)
    sums = np.array([4 / (8.0 * head) for head in range(1, 5)])[:, None] * cosines
    assert distance_parameters(sums, sums[:, :1], []) == {"name": "sandwich", "dim": 64}
    assert distance_parameters(log + power, log[:, :1], []) is None


@pytest.mark.parametrize(
    ("number", "tolerance", "expected"),
    [(499_999.97, 1e-6, 500_000.0), (500_050.0, 1e-6, 500_050.0), (0.09999999, 1e-6, 0.1), (1 / 3, 1e-9, 0.333333333)],
)
def test_the_number_with_the_fewest_digits(number: float, tolerance: float, expected: float) -> None:
    assert shortest(number, tolerance) == expected


@pytest.mark.parametrize("pairs", [4, 8, 32])
@pytest.mark.parametrize("change", [3e-5, -3e-5, 1e-3])
def test_a_change_of_one_frequency_is_no_scaling(pairs: int, change: float) -> None:
    """A scaling by 1.00003 has the form of yarn, but no model has it."""
    frequencies = 10_000.0 ** (-np.arange(pairs) / pairs)
    for pair in {1, pairs // 2, pairs - 1}:
        changed = np.where(np.arange(pairs) == pair, frequencies * (1 + change), frequencies)
        found = static_parameters(changed, 1.0, 1e-9)
        assert found is None
