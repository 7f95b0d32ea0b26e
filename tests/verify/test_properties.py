"""`verify --properties`: the properties that encodings promise hold on their artifacts, and each property can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from helpers import CASES, MORE_CASES, case, cli, exported, open_ort, small_spec, weights_for

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.models import ENCODINGS
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.properties import PROPERTIES, TOLERANCES, Probe, make_probe, promised
from posexport.verify.result import PARITY

pytestmark = pytest.mark.few_inputs

Run = Callable[[dict[str, Any]], dict[str, Any]]


def found_for(spec: Spec) -> Probe:
    made = make_probe(spec, bounds_of(graph_inputs(spec), {}), 0)
    assert isinstance(made, Probe), made
    return made


def errors(spec: Spec, run: Run, names: list[str] | None = None) -> dict[str, float]:
    """The error of each property that can be tested."""
    found = found_for(spec)
    chosen = promised(spec) if names is None else names
    tried = [name for name in chosen if PROPERTIES[name].untried(found) is None]
    return {
        name: PROPERTIES[name].rule(found, [run(inputs) for inputs in PROPERTIES[name].runs(found)]) for name in tried
    }


FAST = (
    "t5",
    "rope-exact",
    "rope-dynamic",
    "rope3d",
    "xpos",
    "alibi-slopes",
    "shaw",
    "deberta",
    "cope",
    "swinv2",
    "pattern",
)
VARIANTS = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in {**CASES, **MORE_CASES}
    if name not in ("none", "learned")
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_an_encoding_promises_holds(name: str) -> None:
    spec = case(name)
    if spec.causal and not spec.encoding.no_cache_reason:
        spec = case(name, kv_cache="concat")
    made = errors(spec, open_ort(exported(spec)))
    assert made
    assert {prop: error for prop, error in made.items() if error > TOLERANCES["fp32"]} == {}


def test_every_property_is_one_of_some_encoding_and_every_promise_is_known() -> None:
    held = {name for cls in ENCODINGS.values() for name in cls.base_properties}
    assert held | {"translate"} == set(PROPERTIES)


GROWN = {"kv_cache": "concat", "causal": True}
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "norms of xpos": ("norms", {"encoding": "xpos", **GROWN}),
    "norms of v-jepa": ("norms", {"encoding": "rope-vjepa2", "head_dim": 12, **GROWN}),
    "shift of sinusoids": ("shift", {"encoding": "sinusoidal"}),
    "shift of v-jepa": ("shift", {"encoding": "rope-vjepa2", "head_dim": 12}),
    "shift of a factor on queries": ("shift", {"encoding": "temperature", "floor_scale": 4}),
    "shift of fire": ("shift", {"encoding": "fire", "init_L": 6}),
    "prefix of frequencies by length": (
        "prefix",
        {"encoding": "rope", "scaling": "dynamic", "factor": 8, "original_max_position_embeddings": 8, "causal": True},
    ),
    "permutation under a causal mask": ("permutation", {"encoding": "rope", "causal": True}),
    "prefix without a causal mask": ("prefix", {"encoding": "rope"}),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", BROKEN)
def test_what_an_encoding_does_not_have_would_be_found_out(name: str) -> None:
    asked, over = BROKEN[name]
    spec = small_spec(**over)
    assert asked not in promised(spec)
    assert errors(spec, open_ort(exported(spec)), [asked])[asked] > 10 * TOLERANCES["fp32"]


@pytest.mark.slow
def test_windows_that_are_wider_than_promised_are_found_out() -> None:
    wide = open_ort(exported(small_spec("alibi", window=9)))
    assert errors(small_spec("alibi", window=4), wide)["translate"] > 10 * TOLERANCES["fp32"]


def test_windows_of_a_pattern_reach_as_far_as_their_layers_do() -> None:
    spec = small_spec("rope", pattern="rope:window=4,rope:window=8", layers=2, causal=True)
    assert errors(spec, open_ort(exported(spec)))["translate"] < TOLERANCES["fp32"]
    for other in (small_spec("rope", window=4, attention_chunk_size=8), small_spec("rope", window=2, prefix_tokens=6)):
        assert "translate" not in promised(other)


def test_buckets_in_disorder_are_found_out() -> None:
    spec = small_spec("t5", num_buckets=16, max_distance=20)
    model = export(spec, weights_for(spec))
    buckets = next(value for name, value in model.graph.initializers.items() if name.endswith("buckets"))
    rows = buckets.const_value.numpy().copy()  # type: ignore[union-attr]
    rows[20 - 2], rows[20 - 9] = rows[20 - 9], rows[20 - 2]
    buckets.const_value = ir.tensor(rows)
    assert errors(spec, open_ort(model))["buckets"] > 10 * TOLERANCES["fp32"]


def test_positions_that_overflow_are_found_out() -> None:
    spec = small_spec("rope")
    run = open_ort(exported(spec))

    def half(inputs: dict[str, Any]) -> dict[str, Any]:
        with np.errstate(over="ignore"):
            angles = inputs["position_ids"].astype(np.float16)
        out = run(inputs)["output"]
        return {"output": np.where(np.isinf(angles)[..., None], np.nan, out)}

    assert errors(spec, half)["finite"] == float("inf")


@pytest.mark.slow
def test_the_command_shows_each_property_and_fails_on_a_false_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rope.onnx"
    spec = small_spec("rope", **GROWN)
    write_onnx(exported(spec), path)
    report = verify([path], properties=True, reach={"seq": 64})
    states = {(each.runtime, each.check): each.state for each in report.verdicts if each.check != PARITY}
    for name in ("norms", "shift", "prefix", "finite"):
        assert states["ort-cpu", name] == "passed"
    assert ("torch", "shift") not in states
    result = cli("verify", path, "--properties", "--runtime", "ort-cpu")
    assert result.exit_code == 0
    assert "ort-cpu: shift" in result.stdout
    monkeypatch.setattr(ENCODINGS["sinusoidal"], "base_properties", ("shift",))
    wrong = tmp_path / "sinusoidal.onnx"
    write_onnx(exported(small_spec("sinusoidal")), wrong)
    result = cli("verify", wrong, "--properties", "--runtime", "ort-cpu")
    assert result.exit_code == 1
    assert "shift does not hold" in result.stdout


@pytest.mark.slow
def test_what_cannot_be_tried_is_not_run_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "short.onnx"
    write_onnx(export(small_spec("rope"), weights_for(small_spec("rope")), seq=3), path)
    report = verify([path], properties=True, reach={"seq": 64})
    found = {each.check: each for each in report.verdicts if each.runtime == "ort-cpu"}
    assert found[PARITY].state == found["shift"].state == "passed"
    assert (found["norms"].state, found["norms"].reason) == ("not run", "it gives no keys: export it with --kv-cache")
    assert "3 tokens" in (found["permutation"].reason or "")
    assert report.exit_code(["ort-cpu"]) == 0
