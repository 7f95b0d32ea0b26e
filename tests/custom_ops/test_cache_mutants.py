"""Faults of caches and masks, planted in sound graphs. They fail on each runtime, and the verdict names their place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import attrs
import mutants as to
import numpy as np
import onnx
import pytest
from helpers import small_spec
from onnx import helper
from verify_helpers import on_each_engine, plant, write

from posexport.runtimes import RUNTIMES
from posexport.verify import verify
from posexport.verify.result import FAILED, PASSED, Verdict

pytestmark = pytest.mark.few_inputs

SPECS = {
    "grown": small_spec("alibi", kv_cache="concat", padding_mask=True, causal=True),
    "shared": small_spec("rope", kv_cache="shared", padding_mask=True, causal=True),
    "shared both ways": small_spec("none", kv_cache="shared"),
    "encoder": small_spec("learned", cross=True, padding_mask=True),
}
ENGINES = ("ort-cpu", "onnx-reference")


def without_the_last(model: onnx.ModelProto) -> None:
    """present_key lacks the newest token, although attention uses it."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["whole" if name == "present_key" else name for name in names]
    ends = [to._constant(f"end {at}", np.array([value])) for at, value in enumerate((0, -1, 2))]
    cut = helper.make_node("Slice", ["whole", "end 0", "end 1", "end 2"], ["present_key"], name="cut")
    model.graph.node.extend([*ends, cut])


def upper_left(model: onnx.ModelProto) -> None:
    """The first query gets the position of the first key. Correct is the last query at the last key."""
    _, _, first = to.find(model, "Sub", "v_Add_10_2")
    _, _, queries = to.find(model, "Range", first.output[0])
    queries.input[0], queries.input[1] = "const_0_i64", first.input[1]


def unwritten(model: onnx.ModelProto) -> None:
    """The new values are not written into the buffer."""
    _, _, node = to.find(model, "Where", "past_value")
    node.input[1] = node.input[2]


def wiped(model: onnx.ModelProto) -> None:
    """The buffer of values is zeroed after the newest token."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["whole" if name == "present_value" else name for name in names]
    made = {"zero": np.int64(0), "one": np.int64(1), "nothing": np.float32(0)}
    made |= {"second": np.array([1]), "heads": np.array([1]), "last": np.array([3])}
    model.graph.node.extend(to._constant(name, value) for name, value in made.items())
    model.graph.node.extend(
        helper.make_node(op, inputs, [output], name=f"wiped {output}", **attributes)
        for op, inputs, output, attributes in (
            ("Shape", ["past_value"], "length", {"start": 2, "end": 3}),
            ("Squeeze", ["length"], "places", {}),
            ("Range", ["zero", "places", "one"], "keys", {}),
            ("Shape", ["hidden_states"], "seq", {"start": 1, "end": 2}),
            ("Unsqueeze", ["write_indices", "second"], "first", {}),
            ("Add", ["first", "seq"], "end", {}),
            ("Less", ["keys", "end"], "before", {}),
            ("Unsqueeze", ["before", "heads"], "by heads", {}),
            ("Unsqueeze", ["by heads", "last"], "kept", {}),
            ("Where", ["kept", "whole", "nothing"], "present_value", {}),
        )
    )


def inverted(name: str) -> list[onnx.NodeProto]:
    """A mask that shows what it should hide."""
    return [helper.make_node("Not", [name], ["planted"], name="inverted")]


def uncounted(name: str) -> list[onnx.NodeProto]:
    """Padding is counted as positions, like any token."""
    same = helper.make_node("Equal", [name, name], ["same"], name="uncounted")
    return [same, helper.make_node("Cast", ["same"], ["planted"], name="to ones", to=onnx.TensorProto.INT64)]


@attrs.frozen
class Fault:
    """One of SPECS, the change to it, and the expected reason and place."""

    spec: str
    mutate: to.Mutate
    reason: str
    place: str


OFF = "off by"
FAULTS: dict[str, Fault] = {
    "present without the last token": Fault("grown", without_the_last, "'present_key' has shape", "whole"),
    "new before old": Fault("grown", to.swapped("Concat", "past_key"), OFF, "Concat"),
    "values in another order than keys": Fault("grown", to.swapped("Concat", "past_value"), OFF, "Concat"),
    "causal from the upper left": Fault("grown", upper_left, OFF, "Range"),
    "mask inverted": Fault("grown", to.before("Unsqueeze", 0, inverted, "v_Cast_6"), OFF, "inverted"),
    "mean for what sees nothing": Fault("grown", to.bypassed("Mul", 0, "v_MatMul_32"), OFF, "Mul"),
    "NaN for what sees nothing": Fault(
        "grown", to.constant_read("Where", 2, np.float32(-np.inf), "v_And_26"), "not finite", "planted"
    ),
    "cached keys one later": Fault("grown", to.before("Where", 1, to.later, "v_Less_28"), OFF, "'Constant one"),
    "padding takes up positions": Fault("grown", to.before("CumSum", 0, uncounted), OFF, "uncounted"),
    "written one later": Fault("shared", to.before("Unsqueeze", 0, to.later, "write_indices"), OFF, "'Constant one"),
    "seen one later": Fault("shared", to.before("Unsqueeze", 0, to.later, "write_indices", 1), OFF, "'Constant one"),
    "what lies behind is wiped": Fault("shared", wiped, "'present_value' is off by", "wiped"),
    "nothing written": Fault("shared", unwritten, OFF, "Where"),
    "mask not read": Fault("shared", to.bypassed("And", 0, "v_GreaterOrEqual", 1), OFF, "And"),
    "what lies behind is seen": Fault("shared both ways", to.operator("Less", "LessOrEqual"), OFF, "LessOrEqual"),
    "encoder's mask inverted": Fault("encoder", to.before("Unsqueeze", 0, inverted, "v_Cast"), OFF, "inverted"),
}  # fmt: skip


FEW = (
    "present without the last token",
    "NaN for what sees nothing",
    "what lies behind is wiped",
    "what lies behind is seen",
    "encoder's mask inverted",
    *SPECS,
)
"""The faults of the usual run: every spec and every kind of reason."""

VerdictOf = Callable[[str, str], Verdict]


@pytest.fixture(scope="module")
def verdict_of(tmp_path_factory: pytest.TempPathFactory) -> VerdictOf:
    """The verdict on a fault or a sound graph on a runtime. Graphs of one run are verified in a single call."""

    @functools.cache
    def verified(engine: str, few: bool) -> dict[str, Verdict]:
        folder = tmp_path_factory.mktemp("caches")
        names = {}
        for index, name in enumerate([*SPECS, *FAULTS]):
            if few != (name in FEW):
                continue
            if name in SPECS:
                path = write(folder, f"sound-{index}", SPECS[name])
            else:
                path = plant(folder, f"fault-{index}", SPECS[FAULTS[name].spec], FAULTS[name].mutate)
            names[path.name] = name
        report = verify([folder], runtimes={engine: RUNTIMES[engine]}, reach={"seq": 64})
        assert report.unreadable == ()
        return {names[Path(each.artifact).name]: each for each in report.verdicts}

    return lambda name, engine: verified(engine, name in FEW)[name]


@pytest.mark.parametrize(("name", "engine"), on_each_engine(FAULTS, ENGINES, FEW))
def test_a_fault_fails_and_its_place_is_named(verdict_of: VerdictOf, name: str, engine: str) -> None:
    found, fault = verdict_of(name, engine), FAULTS[name]
    assert found.state == FAILED
    assert fault.reason in (found.reason or ""), found.reason
    assert fault.place in (found.where or ""), found.where


@pytest.mark.parametrize(("name", "engine"), on_each_engine(SPECS, ENGINES, FEW))
def test_the_sound_graphs_pass(verdict_of: VerdictOf, name: str, engine: str) -> None:
    assert verdict_of(name, engine).state == PASSED
