"""Each known kind of fault is caught on every runtime that runs the graph, and the reason names its place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import attrs
import mutants as to
import numpy as np
import pytest
from helpers import case
from onnx import TensorProto
from verify_helpers import on_each_engine, plant

from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.result import FAILED, PASSED, Verdict

pytestmark = pytest.mark.few_inputs


@attrs.frozen
class Fault:
    """A case of helpers.CASES in a form, its change, and texts that the reason and the place must contain."""

    block: str
    form: str
    mutate: to.Mutate
    reason: str
    place: str
    dtype: str = "fp32"


DEC, FUN = "decomposed", "function"
OFF = "off by"
PLANTED, ONE, ORDER = "'Constant planted", "'Constant one", "'Constant order"  # inlining appends a number to a name


def _steeper(slopes: to.Array) -> to.Array:
    """2^-k, the slopes of 8 heads, for any number of heads."""
    return np.float32(2.0) ** -np.arange(1, slopes.size + 1, dtype=np.float32)


def _a_thousandth_more(values: to.Array) -> to.Array:
    return values * values.dtype.type(1.001)


def _one_bucket(buckets: to.Array) -> to.Array:
    buckets[buckets.size // 2 + 3] += 1
    return buckets


FAULTS: dict[str, Fault] = {
    "slopes 2^-k": Fault("alibi", DEC, to.initializer("encoding.slopes", _steeper), OFF, "slopes"),
    "slope a thousandth off": Fault("alibi", DEC, to.initializer("encoding.slopes", _a_thousandth_more), OFF, "slopes"),
    "slopes' sign": Fault("alibi", FUN, to.initializer("encoding.slopes", np.negative), OFF, "slopes"),
    "frequency": Fault("rope", DEC, to.initializer("encoding.frequencies", _a_thousandth_more), OFF, "frequencies"),
    "layout not interleaved": Fault(
        "rope-half", DEC, to.other_spec(case("rope-half", layout="interleaved")), OFF, "fresh export"
    ),
    "layout not half": Fault("rope", FUN, to.other_spec(case("rope", layout="half")), OFF, "fresh export"),
    "theta": Fault("sinusoidal", FUN, to.other_spec(case("sinusoidal", theta=500.0)), OFF, "frequencies"),
    "x for y in the table": Fault(
        "rope2d", DEC, to.initializer("encoding.frequencies", lambda v: v[::-1]), OFF, "frequencies"
    ),
    "x for y in positions": Fault("rope2d", DEC, to.before("Cast", 0, to.columns_for_rows, "position_ids"), OFF, ORDER),
    "positions one off": Fault("sinusoidal", DEC, to.before("Cast", 0, to.later, "position_ids"), OFF, ONE),
    "positions past the table": Fault("learned", DEC, to.before("Gather", 1, to.later, "encoding.weight"), "", ONE),
    "keys one off": Fault("alibi", DEC, to.before("Unsqueeze", 0, to.later, "position_ids", 1), OFF, ONE),
    "keys one off in a function": Fault("alibi", FUN, to.before("Unsqueeze", 0, to.later, "k_positions"), OFF, ONE),
    "baked length": Fault("none", DEC, to.constant_read("Reshape", 1, [0, 7, -1], nth=-1), "", PLANTED),
    "baked batch": Fault("none", FUN, to.constant_read("Reshape", 1, [2, 7, -1], nth=-1), "", PLANTED),
    "baked range": Fault("rope-gqa-window", DEC, to.constant_read("Range", 1, np.int64(7), nth=1), "", PLANTED),
    "NaN in a constant": Fault(
        "rope", DEC, to.initializer("encoding.frequencies", to.nan_at), "not finite", "frequencies"
    ),
    "NaN in a weight": Fault(
        "none", DEC, to.initializer("k_proj.weight", to.nan_at), "the float64 reference", "not finite"
    ),
    "causal one off": Fault("t5-causal", DEC, to.constant_read("GreaterOrEqual", 1, np.int64(-1)), OFF, PLANTED),
    "causal one off in a function": Fault("t5-causal", FUN, to.operator("GreaterOrEqual", "Greater"), OFF, "Greater"),
    "not causal": Fault("alibi", DEC, to.other_spec(case("alibi", causal=True)), OFF, "fresh export"),
    "window one off": Fault("rope-gqa-window", DEC, to.constant_read("Less", 1, np.int64(4)), OFF, PLANTED),
    "window one off in a function": Fault(
        "rope-gqa-window", FUN, to.operator("Less", "LessOrEqual"), OFF, "LessOrEqual"
    ),
    "window not there": Fault("rope", DEC, to.other_spec(case("rope", window=10)), OFF, "fresh export"),
    "bias after softmax": Fault("alibi", DEC, to.bias_after_softmax, OFF, "Softmax"),
    "bias after softmax in a function": Fault("t5", FUN, to.bias_after_softmax, OFF, "Softmax"),
    "no scale": Fault("none", DEC, to.bypassed("Mul", 0, "linear"), OFF, "Mul"),
    "no scale in a function": Fault("rope", FUN, to.bypassed("Mul", 0, "q"), OFF, "Mul"),
    "bucket": Fault("t5", DEC, to.initializer("encoding.buckets", _one_bucket), OFF, "buckets"),
    "direction": Fault("t5", DEC, to.swapped("Sub"), OFF, "Sub"),
    "direction in a function": Fault("t5", FUN, to.swapped("Sub"), OFF, "Sub"),
    "no relative term": Fault("relative", DEC, to.bypassed("Add", 0, "v_MatMul_12"), OFF, "Add"),
    "no relative term in a function": Fault("relative", FUN, to.bypassed("Add", 0, "v_MatMul_12"), OFF, "Add"),
    "no output": Fault("none", DEC, to.no_output, "lacks the output 'output'", "outputs are none"),
    "output twice": Fault("none", DEC, to.second_output, "has the output 'again'", "again"),
    "output renamed": Fault("none", DEC, to.output_under("result"), "lacks the output 'output'", "result"),
    "input renamed": Fault("none", DEC, to.input_under("x"), "lacks the input 'hidden_states'", "node_linear"),
    "output's dtype": Fault("none", DEC, to.last(to.cast_to(10), 10), "'output' is fp16", "result"),
    "output turned": Fault("none", DEC, to.last(to.transposed), "", "result"),
    "output pooled": Fault("none", FUN, to.last(to.pooled), "[", "result"),
    "output zero": Fault("rope2d", FUN, to.last(to.zeroed), OFF, "result"),
    "angles in half precision": Fault(
        "rope", DEC, to.before("Unsqueeze", 0, to.through(TensorProto.FLOAT16), "v_Cast_0"), "", "to half", "fp16"
    ),
}

SAME = [("alibi", DEC), ("rope-gqa-window", FUN), ("rope2d", FUN)]
"""Blocks whose inner names are all changed, which is not a fault."""

ENGINES, USUAL = ("ort-cpu", "onnx-reference"), ("torch", "ort-cpu")


SAME_NAMES = {f"same {block}": (block, form) for block, form in SAME}
FEW = (*list(FAULTS)[::8], *list(SAME_NAMES)[:1])
"""The cases of the usual run. The others belong to the slow sweep."""

VerdictOf = Callable[[str, str], Verdict]


@pytest.fixture(scope="module")
def verdict_of(tmp_path_factory: pytest.TempPathFactory) -> VerdictOf:
    """A function that returns the verdict on a planted file on a runtime. All files of the usual run are verified
    together, and so are the others."""
    planted = {name: (fault.block, fault.form, fault.mutate, fault.dtype) for name, fault in FAULTS.items()}
    planted |= {name: (block, form, to.inner_names, "fp32") for name, (block, form) in SAME_NAMES.items()}

    @functools.cache
    def verified(engines: tuple[str, ...], few: bool) -> dict[tuple[str, str], Verdict]:
        folder = tmp_path_factory.mktemp("mutants")
        names = {}
        for index, (name, (block, form, mutate, dtype)) in enumerate(planted.items()):
            if few == (name in FEW):
                path = plant(folder, f"{block}-{form}-{index}", case(block, dtype=dtype), mutate, form)
                names[path.name] = name
        report = verify([folder], runtimes={name: RUNTIMES[name] for name in engines}, reach={"seq": 64})
        assert report.unreadable == ()
        assert report.exit_code() == 1
        return {(names[Path(each.artifact).name], each.runtime): each for each in report.verdicts}

    def verdict(name: str, engine: str) -> Verdict:
        return verified(USUAL if engine in USUAL else (engine,), name in FEW)[name, engine]

    return verdict


@pytest.mark.parametrize(("name", "engine"), on_each_engine(FAULTS, ENGINES, FEW))
def test_a_fault_fails_and_its_place_is_named(verdict_of: VerdictOf, name: str, engine: str) -> None:
    found, fault = verdict_of(name, engine), FAULTS[name]
    assert found.state == FAILED
    assert fault.reason in (found.reason or ""), found.reason
    assert fault.place in (found.where or ""), found.where


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FAULTS])
def test_the_torch_block_of_the_same_file_passes_unless_its_own_numbers_are_wrong(
    verdict_of: VerdictOf, name: str
) -> None:
    contract = "'" in FAULTS[name].reason  # a graph that breaks the contract fails everywhere
    wrong = contract or name == "NaN in a weight"
    assert verdict_of(name, "torch").state == (FAILED if wrong else PASSED)


@pytest.mark.parametrize(("name", "engine"), on_each_engine(SAME_NAMES, ENGINES, FEW))
def test_other_names_inside_are_no_fault(verdict_of: VerdictOf, name: str, engine: str) -> None:
    assert verdict_of(name, engine).state == PASSED
