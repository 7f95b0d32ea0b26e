"""500 drawn specs: the torch block in float64 and an exported form of each, against the papers' formulas in numpy."""

from __future__ import annotations

import attrs
import numpy as np
import oracles
import pytest
import torch
from drawn_specs import drawn_inputs, drawn_spec
from form_helpers import HOWS
from helpers import Array, as_float64, open_ort, weights_for

from posexport.custom_ops import bias
from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.export import export
from posexport.export.support import unsupported_reason
from posexport.models import ENCODINGS
from posexport.models.block import build_block
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

BLOCK_BOUND = 1e-9
"""The allowed error relative to the largest output, in float64."""

FORM_BOUND = 3e-4
"""The same for fp32 graphs."""


def difference(made: dict[str, Array], wanted: dict[str, Array]) -> float:
    """The largest error over all outputs, each relative to its largest value."""
    assert list(made) == list(wanted)
    worst = 0.0
    for name, right in wanted.items():
        assert made[name].shape == right.shape
        off = np.abs(made[name].astype(np.float64) - right).max(initial=0) / max(1.0, np.abs(right).max(initial=0))
        worst = max(worst, float(off) if np.isfinite(off) else np.inf)
    return worst


def by_block(spec: Spec, given: dict[str, Array], dtype: torch.dtype) -> dict[str, Array]:
    """The outputs of the torch block in a dtype."""
    block = build_block(spec, weights_for(spec), dtype)
    out = block(*(torch.from_numpy(given[name]) for name in graph_inputs(spec)))
    outputs = out if isinstance(out, tuple) else (out,)
    return {name: tensor.numpy() for name, tensor in zip(graph_outputs(spec), outputs, strict=True)}


def block_error(spec: Spec, seed: int) -> float:
    given = drawn_inputs(spec, seed)
    return difference(by_block(spec, given, torch.float64), oracles.outputs(spec, as_float64(weights_for(spec)), given))


def how_of(spec: Spec, seed: int) -> tuple[str, str]:
    """A form and target that support the spec; they take turns with the seed."""
    turn = seed % len(HOWS)
    for how in (*HOWS[turn:], *HOWS[:turn]):
        if unsupported_reason(spec, *how) is None:
            return how
    raise AssertionError(f"no form carries {spec}")


def tokens(given: dict[str, Array]) -> int:
    return int(given["hidden_states" if "hidden_states" in given else "input_ids"].shape[1])


def form_inputs(spec: Spec, how: tuple[str, str], seed: int) -> dict[str, Array]:
    """Drawn inputs in fp32, with one row if GroupQueryAttention accepts no more."""
    given = drawn_inputs(spec, seed)
    if how == ("contrib", "ort") and spec.kv_cache == "shared":
        first = given["write_indices"]
        if not fits_grouped_batch(len(first), tokens(given), int(first.max())):
            given = drawn_inputs(spec, seed, batch=1)
    return {name: t.astype(np.float32) if t.dtype == np.float64 else t for name, t in given.items()}


def with_its_keys(spec: Spec, outputs: dict[str, Array], given: dict[str, Array]) -> dict[str, Array]:
    """Outputs with zeros in the slots of a shared cache after the last query.

    These slots do not have keys, and operators may clear them.
    """
    if spec.kv_cache != "shared":
        return outputs
    found = {name: np.array(array) for name, array in outputs.items()}
    for row, first in enumerate(given["write_indices"]):
        for name in found.keys() - {"output"}:
            found[name][row, :, first + tokens(given) :] = 0
    return found


def form_share(spec: Spec, seed: int) -> float:
    """The largest error of an exported form over three draws of inputs, relative to the allowed error.

    The allowed error is FORM_BOUND, or three times torch's own fp32 error if that is larger, because angles and factors
    of far positions have larger rounding errors.
    """
    how, weights = how_of(spec, seed), weights_for(spec)
    run, worst = open_ort(export(spec, weights, form=how[0], target=how[1])), 0.0
    for draw in (3 * seed, 3 * seed + 1, 3 * seed + 2):
        given = form_inputs(spec, how, draw)
        wanted = with_its_keys(spec, oracles.outputs(spec, as_float64(weights), given), given)
        off = difference(with_its_keys(spec, run(given), given), wanted)
        if off >= FORM_BOUND:
            rounding = difference(with_its_keys(spec, by_block(spec, given, torch.float32), given), wanted)
            off /= max(1.0, 3 * rounding / FORM_BOUND)
        worst = max(worst, off / FORM_BOUND)
    return worst


def test_every_encoding_is_drawn() -> None:
    assert {drawn_spec(seed).encoding.name for seed in range(len(ENCODINGS))} == ENCODINGS.keys()
    specs = [drawn_spec(seed) for seed in range(120)]
    for field in ("causal", "window", "attention_chunk_size", "kv_cache", "padding_mask", "cross", "qk_norm", "sinks"):
        assert len({getattr(spec, field) for spec in specs}) > 1, field
    assert any(spec.layer_pattern for spec in specs)


@pytest.mark.parametrize("first", range(4))
def test_drawn_blocks_are_the_formulas(first: int) -> None:
    for seed in range(first, 96, 4):
        assert block_error(drawn_spec(seed), seed) < BLOCK_BOUND, (seed, drawn_spec(seed).to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8))
def test_500_drawn_blocks_are_the_formulas(first: int) -> None:
    for seed in range(100 + first, 600, 8):
        assert block_error(drawn_spec(seed), seed) < BLOCK_BOUND, (seed, drawn_spec(seed).to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20))
def test_500_drawn_forms_are_the_formulas(first: int) -> None:
    for seed in range(100 + first, 600, 20):
        assert form_share(drawn_spec(seed), seed) < 1, (seed, drawn_spec(seed).to_dict())


def test_a_wrong_formula_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: KERPLE's logarithm is that of 1 + 1.001 r2 d, in one drawn spec."""
    sound = bias.kerple_bias.eager

    def faulty(
        q_positions: torch.Tensor, k_positions: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, power: bool
    ) -> torch.Tensor:
        return sound(q_positions, k_positions, r1, r2 * 1.001, power)

    seed = next(
        seed for seed in range(600) if drawn_spec(seed).encoding.name == "kerple" and drawn_spec(seed).layers == 1
    )
    spec = attrs.evolve(drawn_spec(seed), kv_cache=None, padding_mask=False, window=None, attention_chunk_size=None)
    assert block_error(spec, 7) < BLOCK_BOUND
    monkeypatch.setattr(bias.kerple_bias, "eager", faulty)
    assert block_error(spec, 7) > 1000 * BLOCK_BOUND
