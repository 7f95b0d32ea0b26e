"""When Triton may join the requests of several clients into one batch: the decision, and its proof on blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import CASES, MORE_CASES, Array, case, inputs_for, open_ort, run_block, small_spec, weights_for

from posexport.artifact.profiles import profiles_of
from posexport.errors import RequestError
from posexport.export import export
from posexport.export.triton.batching import MAX_BATCH, Batching, batching_of
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

SEVERAL = {"scaling": "dynamic", "factor": 4, "original_max_position_embeddings": 64}


def values(spec: Spec) -> Any:
    return {**graph_inputs(spec), **graph_outputs(spec)}


def decided(spec: Spec, **more: Any) -> Batching:
    return batching_of(spec, values(spec), **more)


def profiles(spec: Spec, *requests: str) -> Any:
    return profiles_of({name: shape for name, (shape, _) in graph_inputs(spec).items()}, requests)


@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_rows_come_out_as_they_would_alone_wherever_requests_are_joined(name: str) -> None:
    """Row 0 has near positions and row 1 far ones. If something depends on the largest position, row 0 changes."""
    spec = case(name)
    seq = 4 if "swin" in name else 6
    near, far = inputs_for(spec, 1, seq, "consecutive", 0), inputs_for(spec, 1, seq, "offset", 1)
    together = {key: np.concatenate([near[key], far[key]]) for key in near}
    weights = weights_for(spec)
    both = run_block(spec, weights, together)
    alone = np.concatenate([run_block(spec, weights, near), run_block(spec, weights, far)])
    assert (np.abs(both - alone).max() < 1e-9) == decided(spec).joined, decided(spec).reason


@pytest.mark.parametrize(
    ("spec", "more", "said"),
    [
        (small_spec("rope", kv_cache="concat"), {}, "caches grow"),
        (small_spec("rope", **SEVERAL), {}, "scaling dynamic"),
        (
            small_spec("rope", causal=True, kv_cache="shared"),
            {"operators": frozenset({"GroupQueryAttention"})},
            "in a batch of one only",
        ),
        (small_spec("none"), {"requested": 0}, "as requested"),
    ],
    ids=["grown", "by-length", "grouped-query", "asked"],
)
def test_requests_are_not_joined_where(spec: Spec, more: Any, said: str) -> None:
    found = decided(spec, **more)
    assert (found.max_batch_size, found.joined, found.preferred) == (0, False, ())
    assert said in found.reason


def test_a_fixed_batch_is_not_joined() -> None:
    spec = small_spec("none")
    fixed = {name: ((4, *shape[1:]), dtype) for name, (shape, dtype) in values(spec).items()}
    found = batching_of(spec, fixed)
    assert (found.max_batch_size, "hidden_states is fixed" in found.reason) == (0, True)


def test_requests_are_joined_up_to_the_default_or_what_is_asked_for() -> None:
    assert decided(small_spec("rope")).max_batch_size == MAX_BATCH
    assert decided(small_spec("rope"), requested=32).max_batch_size == 32
    assert decided(small_spec("rope", kv_cache="concat"), requested=4).max_batch_size == 4
    grouped = decided(
        small_spec("rope", causal=True, kv_cache="shared"), operators=frozenset({"GroupQueryAttention"}), requested=4
    )
    assert grouped.joined and "in a batch of one only" in grouped.reason
    assert "attention_mask" in decided(small_spec("rope", padding_mask=True)).reason
    assert "encoder_seq" in decided(small_spec("none", cross=True)).reason
    single = decided(small_spec("rope"), requested=1)
    assert (single.joined, single.reason) == (False, "max_batch_size is 1, as requested")


def test_a_plan_sets_the_largest_batch_and_the_preferred_ones() -> None:
    spec = small_spec("rope")
    found = decided(spec, profiles=profiles(spec, "batch=1:4:16"))
    assert (found.max_batch_size, found.preferred) == (16, (4, 16))
    found = decided(spec, profiles=profiles(spec, "batch=1:4:16"), requested=2)
    assert (found.max_batch_size, found.preferred) == (2, (2,))
    found = decided(spec, profiles=profiles(spec, "batch=1"))
    assert (found.max_batch_size, found.preferred, found.reason) == (1, (), "the plan takes a single row")
    assert "no fewer than 2 rows" in decided(spec, profiles=profiles(spec, "batch=2:4:4")).reason
    shared = small_spec("rope", kv_cache="shared")
    assert "of the shape [batch]" in decided(shared, profiles=profiles(shared)).reason


def test_what_would_be_wrong_is_refused() -> None:
    with pytest.raises(RequestError, match="scaling dynamic depends on the largest position"):
        decided(small_spec("rope", **SEVERAL), requested=4)
    spec = small_spec("rope")
    with pytest.raises(RequestError, match="the plan takes up to 8 rows"):
        decided(spec, profiles=profiles(spec), requested=9)


def test_one_layer_that_depends_on_the_batch_is_enough() -> None:
    spec = small_spec(
        "rope", pattern="none,rope:scaling=dynamic:factor=4:original_max_position_embeddings=64", layers=2
    )
    assert "scaling dynamic" in decided(spec).reason


def written(seq: int) -> dict[str, Array]:
    """Two rows over shared caches with 9 slots, of which 5 and 2 are written."""
    random = np.random.default_rng(0)
    starts = np.array([5, 2])
    inputs: dict[str, Array] = {
        "hidden_states": random.standard_normal((2, seq, 32)).astype(np.float32),
        "position_ids": starts[:, None] + np.arange(seq),
        "write_indices": starts,
    }
    return inputs | {
        name: random.standard_normal((2, 4, 9, 8)).astype(np.float32) for name in ("past_key", "past_value")
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", ["decomposed", "function", "native", "contrib"])
def test_rows_of_shared_caches_come_out_as_they_would_alone(form: str) -> None:
    spec = small_spec("rope", causal=True, kv_cache="shared")
    run = open_ort(export(spec, weights_for(spec), form=form, target="ort" if form == "contrib" else "portable"))
    for seq in (1, 3):
        inputs = written(seq)
        if form == "contrib" and seq > 1:
            with pytest.raises(Exception, match="batch_size must be 1"):  # This is why `_seldom` leaves it to the user.
                run(inputs)
            continue
        both = run(inputs)["output"]
        alone = [run({name: array[[row]] for name, array in inputs.items()})["output"] for row in (0, 1)]
        np.testing.assert_allclose(both, np.concatenate(alone), atol=1e-6)
