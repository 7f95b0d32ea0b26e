"""Numbers that exceed the range of a type: masks that add up, distant positions, and logits of 100,000, in every
form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import oracles
import pytest
from form_helpers import HOWS, errors, small_cases
from helpers import Array, as_float64, open_ort, run_block, small_spec, weights_for

from posexport.export import export
from posexport.runtimes import onnx_reference
from posexport.spec.spec import Spec
from posexport.verify.cases import Case

EVERYTHING = {"padding_mask": True, "causal": True, "num_kv_heads": 2}


def _every_value(model: ir.Model) -> onnx.ModelProto:
    """The graph with every value of its nodes as an output."""
    proto = onnx.inliner.inline_local_functions(ir.to_proto(model))
    known = {value.name for value in proto.graph.output}
    for node in proto.graph.node:
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name and name not in known)
    return proto


def _infinite(proto: onnx.ModelProto, values: dict[str, Array]) -> list[str]:
    """The operators whose values contain NaN or an infinity although their inputs do not."""
    bad = {name for name, array in values.items() if array.dtype.kind in "fV" and not np.isfinite(array).all()}
    return [node.op_type for node in proto.graph.node if bad & set(node.output) and not bad & set(node.input)]


MASKS: list[tuple[str, str, dict[str, Any]]] = [
    ("decomposed", "portable", {"encoding": "alibi", "dtype": "fp16"}),
    ("decomposed", "portable", {"encoding": "none", "sinks": True, "window": 2}),
    ("function", "portable", {"encoding": "t5", "kv_cache": "shared", "dtype": "fp16"}),
    ("native", "portable", {"encoding": "alibi", "dtype": "fp16"}),
    ("native", "portable", {"encoding": "none", "dtype": "fp16", "sinks": True, "kv_cache": "shared"}),
    ("native", "ort", {"encoding": "alibi", "kv_cache": "concat", "window": 3}),
    ("contrib", "portable", {"encoding": "alibi", "dtype": "fp16"}),
    ("contrib", "ort", {"encoding": "alibi", "dtype": "fp16", "kv_cache": "shared"}),
    ("contrib", "ort", {"encoding": "none", "kv_cache": "concat", "sinks": True}),
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("form", "target", "over"), MASKS)
def test_nothing_on_the_way_is_infinite(form: str, target: str, over: dict[str, Any]) -> None:
    """With rows that are only padding, hidden keys, and positions up to 100,000."""
    spec = small_spec(**{**EVERYTHING, **over})
    proto = _every_value(export(spec, weights_for(spec), form=form, target=target))
    run = open_ort(proto)
    for each in small_cases(spec, form, ("scattered", "far out", "prefill", "step")):
        assert _infinite(proto, run(each.arrays)) == [], each.name


def test_an_infinity_would_be_seen() -> None:
    spec = small_spec("none", **EVERYTHING)
    proto = _every_value(export(spec, weights_for(spec)))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.t.float_data[:1] == [] and attribute.t.data_type == 1:
                value = onnx.numpy_helper.to_array(attribute.t)
                if value.size == 1 and value.min() < -1e38:
                    attribute.t.CopyFrom(onnx.numpy_helper.from_array(np.full_like(value, -np.inf)))
    (each,) = small_cases(spec, "decomposed", ("scattered",))
    assert _infinite(proto, open_ort(proto)(each.arrays)) == ["Constant"]


def _far(spec: Spec, positions: Array, mask: Array | None = None) -> Case:
    random = np.random.default_rng(0)
    dtype = np.float16 if spec.dtype == "fp16" else np.float32
    arrays: dict[str, Array] = {"hidden_states": random.standard_normal((*positions.shape, 32)).astype(dtype)}
    arrays["position_ids"] = positions
    if mask is not None:
        arrays["attention_mask"] = mask
    return Case(name="far", arrays=arrays, sizes={})


FAR = np.array([65_530 + np.arange(9), [0, 1, 65_536, 65_537, 70_000, 131_072, 131_073, 1_000_000, 999_998]])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(("form", "target"), HOWS)
@pytest.mark.parametrize(("dtype", "bound"), [pytest.param("fp32", 1e-5, marks=pytest.mark.slow), ("fp16", 1e-2)])
def test_alibi_far_out(form: str, target: str, dtype: str, bound: float) -> None:
    spec = small_spec("alibi", dtype=dtype, causal=dtype == "fp32")
    run = open_ort(export(spec, weights_for(spec), form=form, target=target))
    assert errors(spec, run, [_far(spec, FAR)])["far"] < bound


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "target"), HOWS)
def test_keys_out_of_sight_stay_so_beside_far_ones(form: str, target: str) -> None:
    """In fp16 a bias of -100,000 and a mask are both at the lower limit of the type. Hidden keys must still have no
    weight."""
    spec = small_spec("alibi", dtype="fp16", padding_mask=True, num_kv_heads=2)
    run = open_ort(export(spec, weights_for(spec), form=form, target=target))
    positions, mask = np.array([[0, 400_000, 500_000, 600_000, 1, 2]]), np.array([[0, 1, 1, 1, 0, 0]])
    inputs = dict(_far(spec, positions, mask).arrays)
    hidden, seen = (_changed(inputs, tokens) for tokens in (slice(4, None), slice(1, 4)))
    right = run(inputs)["output"][:, :4]
    np.testing.assert_array_equal(run(hidden)["output"][:, :4], right)
    assert np.abs(run(seen)["output"][:, :1] - right[:, :1]).max() > 0.1


def _changed(inputs: dict[str, Array], tokens: slice) -> dict[str, Array]:
    states = inputs["hidden_states"].copy()
    states[:, tokens] *= -3
    return {**inputs, "hidden_states": states}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["decomposed", "native"])
def test_alibi_far_out_in_bf16(form: str, tmp_path: Path) -> None:
    """In torch, and on onnx's evaluator, which cannot widen the type."""
    spec = small_spec("alibi", dtype="bf16", causal=True)
    inputs = {**_far(attrs.evolve(spec, dtype="fp32"), FAR).arrays}
    inputs["hidden_states"] = inputs["hidden_states"].astype(ml_dtypes.bfloat16)
    truth = oracles.outputs(spec, as_float64(weights_for(spec)), inputs)["output"]
    onnx.save(ir.to_proto(export(spec, weights_for(spec), form=form)), tmp_path / "block.onnx")
    found = onnx_reference.load(tmp_path / "block.onnx", {}).run(inputs)["output"].astype(np.float64)
    in_torch = run_block(
        spec, weights_for(spec), {**inputs, "hidden_states": inputs["hidden_states"].astype(np.float32)}, "bf16"
    )
    for made in (found, in_torch):
        assert np.abs(made - truth).max() / max(1.0, np.abs(truth).max()) < 4e-2


LOUD: list[tuple[str, str, dict[str, Any]]] = [
    ("decomposed", "portable", {}),
    ("function", "portable", {"kv_cache": "concat"}),
    ("native", "portable", {"kv_cache": "shared"}),
    ("native", "ort", {"kv_cache": "concat"}),
    ("contrib", "portable", {}),
    ("contrib", "ort", {"kv_cache": "shared"}),
    ("decomposed", "portable", {"softcap": 30.0}),
    ("native", "ort", {"softcap": 30.0}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("form", "target", "over"), LOUD)
def test_logits_of_a_hundred_thousand(form: str, target: str, over: dict[str, Any]) -> None:
    """fp32 represents such logits to 0.01, so weights are right unless two logits are as close as that."""
    spec = small_spec("rope", **{**EVERYTHING, "scale": 40_000.0, **over})
    run = open_ort(export(spec, weights_for(spec), form=form, target=target))
    cases = small_cases(spec, form, ("offset", "scattered", "prefill"))
    assert _loudest(spec, cases) > 1e5
    assert max(errors(spec, run, cases).values()) < (2e-3 if spec.softcap is None else 2e-2)


def _loudest(spec: Spec, cases: list[Case]) -> float:
    """The largest logit of a query with the key of its own token: an estimate of the size of all logits."""
    weights = as_float64(weights_for(spec))
    found = 0.0
    for each in cases:
        x = each.arrays["hidden_states"].astype(np.float64)
        q = oracles.linear(x, weights, "q_proj").reshape(*x.shape[:2], spec.num_heads, -1)
        k = oracles.linear(x, weights, "k_proj").reshape(*x.shape[:2], spec.num_kv_heads, -1)
        k = np.repeat(k, spec.num_heads // spec.num_kv_heads, 2)
        found = max(found, float(np.abs(np.einsum("bihd,bihd->bih", q, k)).max()) * spec.scale)
    return found
