"""verify on deep stacks: inputs that leave differences between tokens, and messages if there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
import torch
from helpers import small_spec, weights_for
from onnx import helper
from verify_helpers import write

from posexport.models.block import Streamed
from posexport.runtimes import RUNTIMES
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.spec import Spec
from posexport.verify.cases import make_cases
from posexport.verify.coverage import lost_in_layers
from posexport.verify.locate import Graphs, values
from posexport.verify.parity import TOLERANCES, inconclusive_reason
from posexport.verify.result import FAILED, Comparison
from posexport.verify.values import LOUD, LOUD_LAYERS
from posexport.verify.verifier import verify


def loud(spec: Spec) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs of the case "loud"."""
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), {}))
    return dict(next(each.arrays for each in cases if each.name.startswith("loud")))


@pytest.mark.slow
@pytest.mark.parametrize("over", [{}, {"kv_cache": "concat", "causal": True, "window": 4}], ids=["bare", "cache"])
def test_rounding_does_not_grow_through_a_deep_stack(over: dict[str, Any]) -> None:
    spec = small_spec("rope", layers=24, **over)
    inputs = [torch.from_numpy(each) for each in loud(spec).values()]
    wide = [each.double() if each.is_floating_point() else each for each in inputs]
    (truth,), (eager,) = (
        Streamed(spec, weights_for(spec), dtype).run([given])
        for dtype, given in ((torch.float64, wide), (torch.float32, inputs))
    )
    for name, exact in truth.items():
        rms = float(exact.square().mean().sqrt())
        assert float((eager[name] - exact).abs().max()) < 0.02 * TOLERANCES["fp32"].ceiling * rms, name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOUD)
def test_few_layers_get_the_loudest_inputs(dtype: str) -> None:
    few, many = (loud(small_spec("rope", dtype=dtype, layers=layers, kv_cache="concat")) for layers in (LOUD_LAYERS, 8))
    for name in ("hidden_states", "past_key.0", "past_key.2"):
        assert few[name].astype(np.float64).std() == pytest.approx(LOUD[dtype], rel=0.1)
        assert many[name].astype(np.float64).std() == pytest.approx(min(LOUD[dtype], 2.0), rel=0.1)
    assert many["past_value.0"].astype(np.float64).std() == pytest.approx(1.0, rel=0.1)


def test_it_is_said_where_all_tokens_are_alike() -> None:
    spec = small_spec("rope", layers=9)
    apart = np.random.default_rng(0).standard_normal((2, 5, 32))
    alike = apart[:, :1] + 1e-6 * apart
    said = "after 9 layers of bare attention all tokens of a row are alike (to "
    assert [clause[: len(said)] for clause in lost_in_layers(spec, [{"output": alike}])] == [said]
    assert lost_in_layers(spec, [{"output": alike}, {"output": apart}]) == ()
    assert lost_in_layers(spec, [{"output": alike[:, :1]}]) == ()  # A single token tells nothing.
    assert lost_in_layers(small_spec("rope"), [{"output": alike}]) == ()


def test_a_stack_whose_tokens_are_alike_is_inconclusive(tmp_path: Path) -> None:
    path = write(tmp_path, "stack", small_spec("rope", layers=16))
    hidden = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    np.savez(tmp_path / "own.npz", hidden_states=hidden, position_ids=np.tile(np.arange(5), (2, 1)))
    runtimes = {"ort-cpu": RUNTIMES["ort-cpu"]}
    (verdict,) = verify([path], runtimes=runtimes, inputs=tmp_path / "own.npz").verdicts
    assert verdict.inconclusive
    assert "all tokens of a row are alike" in verdict.not_shown[-1]


def test_what_torch_itself_is_too_far_off_for_tells_nothing_of_a_runtime() -> None:
    worst = Comparison(
        case="c", output="o", state=FAILED, max_error=2.0, torch_error=1.7, reference_rms=1.0, limit=0.06
    )
    said = inconclusive_reason(worst, TOLERANCES["fp32"])
    assert said is not None
    assert said.startswith("inconclusive: torch eager itself is off by 1.7 in 'o', above the ceiling of 0.06:")
    near = Comparison(
        case="c", output="o", state=FAILED, max_error=2.0, torch_error=0.05, reference_rms=1.0, limit=0.06
    )
    assert inconclusive_reason(near, TOLERANCES["fp32"]) is None
    assert inconclusive_reason(Comparison(case="c", output="o", state=FAILED), TOLERANCES["fp32"]) is None
    far = attrs.evolve(worst, max_error=1000 * (worst.torch_error or 0.0))
    assert (
        inconclusive_reason(far, TOLERANCES["fp32"]) is None
    )  # The error of torch eager does not explain such an error.


def test_values_that_were_not_seen_are_not_called_right(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"], name="n")], "g", [value], [onnx.ValueInfoProto()])
    model = helper.make_model(graph)
    both = Graphs(mine=model, fresh=model, weights=frozenset(), dtype="fp32")
    seen = {"y": np.ones(1, np.float32)}
    assert values(both, tmp_path, lambda _: "no\nroom.", lambda _: seen) == (
        None,
        "with its values as outputs it does not run: no room",
    )
    assert "has none" in values(both, tmp_path, lambda _: seen, lambda _: "it has no such operator.")[1]
    assert "each of its values is right" in values(both, tmp_path, lambda _: seen, lambda _: seen)[1]
    found, _ = values(both, tmp_path, lambda _: seen, lambda _: {"y": -seen["y"]})
    assert found == "Neg 'n' is the first whose output differs: 'y' is off by 2 of 1 from what onnx's reference " + (
        "evaluator computes"
    )
