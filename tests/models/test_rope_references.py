"""Cosines and sines in float32 are bit for bit those of transformers, for every scaling and at far positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import small_spec
from hf_helpers import transformers

from posexport.models.attention import EncodingState
from posexport.models.rotary import Rope

POSITIONS = torch.tensor(
    [[0, 1, 2, 255, 256, 2047, 8191, 65_535, 131_072, 1_048_575], [7, 3, 3, 12, 500, 9, 4, 1, 0, 40]]
)
"""The second row stays within every trained length used below; the first row does not."""

HEAD_DIM = 64
TRAINED = {"original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "default-theta": {"theta": 500_000.0},
    "linear": {"scaling": "linear", "factor": 8.0},
    "dynamic": {"scaling": "dynamic", "factor": 4.0, **TRAINED},
    "yarn": {"scaling": "yarn", "factor": 32.0, **TRAINED},
    "yarn-gpt-oss": {
        **{"scaling": "yarn", "factor": 32.0, **TRAINED, "theta": 150_000.0},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "yarn-mscale": {"scaling": "yarn", "factor": 40.0, **TRAINED, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-attention": {"scaling": "yarn", "factor": 4.0, **TRAINED, "attention_factor": 1.5, "beta_fast": 24.0},
    "longrope": {
        **{"scaling": "longrope", "factor": 32.0, **TRAINED},
        **{"short_factor": [1 + i / 9 for i in range(32)], "long_factor": [1 + i * 1.7 for i in range(32)]},
    },
    "llama3": {"scaling": "llama3", "factor": 8.0, **TRAINED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"scaling": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0, "theta": 1e6},
}


def theirs(parameters: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of Llama's rotary embedding, [B, S, head_dim / 2] each."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {
        **parameters,
        "rope_theta": parameters.get("theta", 10_000.0),
        "rope_type": parameters.get("scaling") or "default",
    }
    rope = {key: value for key, value in rope.items() if key not in ("theta", "scaling")}
    rope = {key: list(value) if isinstance(value, list) else value for key, value in rope.items()}
    longest = 4096 if rope["rope_type"] == "dynamic" else 131_072
    if rope["rope_type"] == "dynamic":
        del rope["original_max_position_embeddings"]
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=longest, rope_parameters=rope
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    return cos[..., : HEAD_DIM // 2], sin[..., : HEAD_DIM // 2]


def ours(parameters: dict[str, Any], positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    spec = small_spec("rope", head_dim=HEAD_DIM, **parameters)
    assert isinstance(spec.encoding, Rope)
    return spec.encoding.cos_sin(EncodingState(spec, dtype), positions)


@pytest.mark.parametrize("name", SCALINGS)
def test_cosines_and_sines_are_theirs_bit_for_bit(name: str) -> None:
    for positions in (POSITIONS, POSITIONS[1:]):
        wanted = theirs(SCALINGS[name], positions)
        for half in (torch.float32, torch.float16, torch.bfloat16):
            made = ours(SCALINGS[name], positions, half)
            assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True)), half


def test_another_theta_or_factor_shows_in_the_bits() -> None:
    for name, change in (("default", {"theta": 10_000.01}), ("linear", {"factor": 8.00001})):
        made = ours({**SCALINGS[name], **change}, POSITIONS, torch.float32)
        assert not torch.equal(made[0], theirs(SCALINGS[name], POSITIONS)[0])


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "dynamic"])
def test_exact_angles_at_every_position_to_2_24(name: str) -> None:
    """Dynamic NTK is refused: it has no exact angles, because its frequencies depend on the length."""
    random = torch.Generator().manual_seed(0)
    positions = torch.cat((POSITIONS[:1], torch.randint(0, 2**24 + 1, (1, 4000), generator=random)), 1)
    positions = torch.cat((positions, torch.tensor([[2**24, 2**24 - 1]])), 1)
    exact, parity = SCALINGS[name] | {"angles": "exact"}, SCALINGS[name]
    truth = ours(parity, positions, torch.float64)
    largest = max(1.0, float(truth[0].abs().max()))
    for made, wanted in zip(ours(exact, positions, torch.float32), truth, strict=True):
        assert made.dtype == torch.float32
        assert float((made.double() - wanted).abs().max()) < 2.5e-7 * largest
    apart = ours(parity, positions, torch.float32)[0].double() - truth[0]
    assert float(apart.abs().max()) > 1e-3  # Exact angles avoid this error.


@pytest.mark.parametrize("start", [-30, -(2**24)])
def test_exact_angles_at_negative_positions(start: int) -> None:
    """Rows that are padded on the left begin below zero if positions are consecutive."""
    random = torch.Generator().manual_seed(0)
    positions = torch.randint(start, 0, (1, 4000), generator=random)
    exact, parity = SCALINGS["default"] | {"angles": "exact"}, SCALINGS["default"]
    truth = ours(parity, positions, torch.float64)
    for made, wanted in zip(ours(exact, positions, torch.float32), truth, strict=True):
        assert float((made.double() - wanted).abs().max()) < 1e-6
