"""The near misses are what they claim: they run, they change the function, and the same seed gives the same fault."""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx_ir as ir
import pytest
from near_miss_models import MODELS, Feeds
from near_misses import NEAR_MISSES, difference, drawn, near_miss

SEEDS = range(6)


@functools.cache
def made(name: str) -> tuple[ir.Model, list[Feeds]]:
    return MODELS[name]()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("fault", NEAR_MISSES)
def test_every_fault_changes_some_model(fault: str) -> None:
    assert any(_changes(name, fault, seed) for name in MODELS for seed in SEEDS)


def _changes(name: str, fault: str, seed: int) -> bool:
    model, feeds = made(name)
    changed = near_miss(model, fault, seed)
    return changed is not None and difference(model, changed, feeds) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_without_a_fault_does_not_differ(name: str) -> None:
    model, feeds = made(name)
    assert difference(model, model.clone(), feeds) == 0


@pytest.mark.slow
def test_the_model_itself_is_left_alone() -> None:
    model, _ = made("decoder")
    before = ir.to_proto(model).SerializeToString()
    for fault in NEAR_MISSES:
        near_miss(model, fault, 0)
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.slow
def test_the_same_seed_gives_the_same_fault() -> None:
    def draw(seed: int) -> list[tuple[str, str, int, bytes]]:
        models = {name: made(name)[0] for name in ("decoder", "biased")}
        made_here = drawn(models, 8, seed)
        return [(*draw[:3], ir.to_proto(draw[3]).SerializeToString()) for draw in made_here]

    first = draw(1)
    assert first == draw(1) != draw(2)
    assert len(first) == 8


def test_no_place_is_no_fault() -> None:
    model, _ = made("biased")
    without: list[Callable[[], ir.Model | None]] = [
        functools.partial(near_miss, model, fault, 0) for fault in ("rotation_missing", "past_smaller", "cap_missing")
    ]
    assert [make() for make in without] == [None, None, None]
