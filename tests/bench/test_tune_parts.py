"""The parts of tuning that do not need an engine: search space, cache, identities of graphs, merit of kernel tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import small_spec
from onnx import TensorProto, helper, numpy_helper

from posexport.bench.scenarios import Scenario
from posexport.bench.tune.fact_cache import Store
from posexport.bench.tune.facts import fits
from posexport.bench.tune.ranking import METHOD, merit, planned, unknown
from posexport.bench.tune.result import Row
from posexport.bench.tune.space import Limits, Program, Request, options_of, other_opsets, programs
from posexport.bench.tune.worker import identity
from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import DTYPES, Spec


def test_every_form_target_and_dtype_once_in_its_lowest_opset() -> None:
    specs = {dtype: small_spec("rope", dtype=dtype) for dtype in DTYPES}
    names = [str(each) for each in programs("ort-cpu", specs, Limits())]
    assert len(names) == len(set(names)) == 4 * 2 * 3
    assert {"decomposed/fp32/18", "native/fp16/23/ort", "contrib/bf16/18"} <= set(names)
    held = programs("tensorrt-rtx", specs, Limits(forms=("native",), targets=("portable",), opsets=(23, 24)))
    assert [str(each) for each in held][:2] == ["native/fp32/23", "native/fp32/24"]


def test_consecutive_positions_are_tried_where_they_are_allowed_and_not_otherwise() -> None:
    spec, promised = small_spec("alibi"), small_spec("alibi", positions="consecutive")

    def modes(spec: Spec, **limits: Any) -> list[str]:
        given = Limits(forms=("native",), targets=("portable",), **limits)
        return [str(each) for each in programs("ort-cpu", {"fp32": spec}, given)]

    assert modes(spec) == ["native/fp32/23"]
    assert modes(spec, allow=("consecutive",)) == ["native/fp32/23", "native/fp32/23/consecutive"]
    assert modes(promised) == modes(promised, allow=("consecutive",)) == ["native/fp32/23/consecutive"]
    assert modes(small_spec("alibi2d"), allow=("consecutive",)) == ["native/fp32/23"]
    both = Limits(forms=("native",), targets=("portable",), allow=("consecutive",))
    data, other = (Row.of(each, {}) for each in programs("ort-cpu", {"fp32": spec}, both))
    assert (other.program.positions, other.plainness > data.plainness) == ("consecutive", True)


def test_other_opsets_are_those_that_the_form_and_target_take() -> None:
    native = Program(form="native", dtype="fp32", opset=23)
    assert [each.opset for each in other_opsets(native, Limits())] == [24]
    assert other_opsets(native, Limits(opsets=(23,))) == []
    plan = Program(form="decomposed", dtype="fp16", opset=18, target="tensorrt")
    assert [each.opset for each in other_opsets(plan, Limits())] == list(range(19, 25))


def test_options_start_with_the_runtimes_own_choice() -> None:
    two = options_of("ort-cpu", gpu=False, cpus=2)
    assert two[0] == {} and len(two) == len({str(options) for options in two}) == 3 * 2 * 2
    assert [each.get("threads") for each in options_of("ort-cpu", False, cpus=8)][::2][:3] == [None, 4, 1]
    assert {each.get("threads") for each in options_of("ort-cpu", False, cpus=1)} == {None}
    assert options_of("tensorrt-rtx", gpu=False) == [{}, {"profile": "scenario"}]
    allowed = options_of("ort-cpu", gpu=False, cpus=2, allow=["denormal-as-zero"])
    assert allowed[0] == {} and len(allowed) == 2 * len(two)
    assert [one for one in allowed if "denormal_as_zero" not in one] == two


def test_the_plainest_has_fewest_options_then_the_most_portable_program() -> None:
    native, plain = (Program(form=form, dtype="fp32", opset=23) for form in ("native", "decomposed"))
    threads = Row.of(plain, {"threads": 1})
    assert threads.name == "decomposed/fp32/23 threads=1"
    assert Row.of(native, {}).plainness < threads.plainness
    assert Row.of(plain, {}).plainness < Row.of(native, {}).plainness
    own = Program(form="decomposed", dtype="fp32", opset=18, target="ort")
    assert Row.of(native, {}).plainness < Row.of(own, {}).plainness


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(RequestError, match=r"unknown form 'nativ': did you mean 'native'\?"):
        Limits(forms=("nativ",))
    with pytest.raises(RequestError, match="unknown allow 'gaps': allowed: consecutive"):
        Limits(allow=("gaps",))
    with pytest.raises(RequestError, match="opset is 17: it must be"):
        Limits(opsets=(17,))
    with pytest.raises(RequestError, match="unknown runtime in --for 'torch'"):
        Request(scenario=Scenario("prefill", 8), runtime="torch")
    with pytest.raises(RequestError, match="unknown objective 'speed'"):
        Request(scenario=Scenario("prefill", 8), objective="speed")
    assert list(RUNTIMES["ort-cpu"].unsupported_dtypes) == ["bf16"]


def test_facts_are_found_once_and_again_after_what_they_depend_on_changed(tmp_path: Path) -> None:
    asked: list[int] = []

    def find() -> dict[str, Any]:
        asked.append(1)
        return {"identity": str(len(asked))}

    store = Store(tmp_path / "cache")
    assert [store.get({"what": "identify", "sha256": "a"}, find)["identity"] for _ in range(2)] == ["1", "1"]
    assert store.get({"what": "identify", "sha256": "b"}, find)["identity"] == "2"
    assert store.reused == 0
    later = Store(tmp_path / "cache")
    assert (later.get({"what": "identify", "sha256": "a"}, find)["identity"], later.reused) == ("1", 1)
    assert Store(tmp_path / "cache", resume=False).get({"what": "identify", "sha256": "a"}, find)["identity"] == "3"
    assert (tmp_path / "cache/.posexport-tune/.gitignore").read_text() == "*\n"


def test_a_damaged_or_foreign_fact_is_found_anew(tmp_path: Path) -> None:
    Store(tmp_path).get({"what": "identify", "sha256": "a"}, lambda: {"identity": "1"})
    (file,) = tmp_path.glob(".posexport-tune/*.json")
    whole = json.loads(file.read_bytes())
    others: list[dict[str, Any]] = [
        {"key": {"what": "identify", "sha256": "b"}},
        {"fact": 3},
        {"fact": {}},
        {"fact": {"identity": "3"}},  # a valid entry, but of something else
        {"sha256": None},
    ]
    for text in ("", "[]", "{", *(json.dumps({**whole, **other}) for other in others)):
        file.write_text(text)
        assert Store(tmp_path).get({"what": "identify", "sha256": "a"}, lambda: {"identity": "2"}) == {"identity": "2"}


SHA = "0" * 64
FACTS: dict[str, dict[str, Any]] = {
    "export": {"sha256": SHA, "size": 5},
    "fit": {"sizes": {"batch": 1}, "profile": ["seq=1..8"], "spec": {}},
    "identify": {"identity": SHA},
    "verify": {"state": "passed", "reason": None},
    "rounds": {
        **{"rounds": [{"a": 0.1}, {"a": 0.2}], "failed": {}, "memory": {"a": 5}},
        **{"runs": 9, "turn": 2, "machine_load": 0.1, "seconds": 1.5},
    },
    "kernels": {
        "kernels": {
            **{"count": 3, "fused_attention": True, "attention_kernels": 1, "attention_layers": 1, "host_steps": 0},
            "rows": [],
        },
        **{"memory": {"scratch": 5, "weights": None}, "size": 7, "version": "1"},
    },
}


@pytest.mark.parametrize("what", FACTS)
def test_a_fact_of_another_kind_is_found_anew(what: str) -> None:
    key, whole = {"what": what, "rounds": 2, "entries": [["a", SHA]]}, FACTS[what]
    assert fits(key, whole)
    assert not fits(key, {})
    assert not fits({**key, "what": "another"}, whole)
    for name in whole:
        assert not fits(key, {other: value for other, value in whole.items() if other != name})
        assert not fits(key, {**whole, name: object()})
    assert fits(key, {"refused": "too long"}) == (what == "fit")


@pytest.mark.parametrize("wrong", [{"rounds": [{"a": time}, {"a": 0.2}]} for time in (0.0, -1.0, 1e-320, 1e99)])
def test_times_that_no_call_takes_are_timed_anew(wrong: dict[str, Any]) -> None:
    key = {"what": "rounds", "rounds": 2, "entries": [["a", SHA]]}
    assert not fits(key, {**FACTS["rounds"], **wrong})
    assert not fits(key, {**FACTS["rounds"], "machine_load": 1e99})


@pytest.mark.parametrize("rounds", [[], [{"a": 0.1}], [{"a": 0.1}, {"b": 0.1}], [{}, {}], [{"a": "x"}, {"a": 1}]])
def test_rounds_of_other_candidates_are_timed_anew(rounds: list[dict[str, Any]]) -> None:
    key = {"what": "rounds", "rounds": 2, "entries": [["a", SHA]]}
    assert not fits(key, {**FACTS["rounds"], "rounds": rounds})


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"can't write to the cache .*, or give another folder with --cache"):
        Store(tmp_path / "file" / "cache")


def graph(
    prefix: str = "", *, opset: int = 18, swap: bool = False, to: int = 10, factor: float = 2.0, **cast: Any
) -> Any:
    """y = cast(x * factor) + exp(x), with the given names, order and opset."""
    one = helper.make_node("Mul", ["x", f"{prefix}f"], [f"{prefix}m"], name=f"{prefix}n1")
    two = helper.make_node("Exp", ["x"], [f"{prefix}e"])
    nodes = [
        *([two, one] if swap else [one, two]),
        helper.make_node("Add", [f"{prefix}m", f"{prefix}e"], [f"{prefix}a"]),
        helper.make_node("Cast", [f"{prefix}a"], ["y"], to=to, **cast),
    ]
    value = numpy_helper.from_array(np.array(factor, np.float32), f"{prefix}f")
    ends = [helper.make_tensor_value_info(name, kind, ["n"]) for name, kind in (("x", TensorProto.FLOAT), ("y", to))]
    made = helper.make_graph(nodes, "g", ends[:1], ends[1:], [value])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])


def test_names_order_opset_and_defaults_do_not_make_another_graph() -> None:
    same = {identity(graph()), identity(graph("other")), identity(graph(swap=True)), identity(graph(opset=23))}
    same |= {identity(graph(opset=19, saturate=1)), identity(graph(opset=24, saturate=1, round_mode="up"))}
    assert len(same) == 1


def test_another_constant_attribute_or_wiring_does() -> None:
    swapped = graph()
    swapped.graph.node[2].input[0] = "e"
    found = [graph(), graph(factor=2.5), graph(to=11), graph(opset=19, saturate=0), swapped]
    for model in found[:-1]:
        onnx.checker.check_model(model)
    assert len({identity(model) for model in found}) == len(found)


def table(**over: Any) -> dict[str, Any]:
    kernels = {"fused_attention": True, "count": 5, "host_steps": 0, "attention_kernels": 1, "attention_layers": 1}
    given = {name: over.pop(name) for name in tuple(over) if name in kernels or name == "unknown"}
    return {"kernels": {**kernels, **given}, "memory": {"scratch": 10, "activation": None}, "size": 100, **over}


def test_fused_attention_comes_before_kernels_and_kernels_before_memory() -> None:
    ranked = [
        table(count=4),
        table(count=5, memory={"scratch": 1}),
        table(count=5),
        table(count=4, host_steps=2),
        table(fused_attention=False, count=2),
    ]
    for first in range(len(ranked)):  # The order does not matter.
        turned = ranked[first:] + ranked[:first]
        assert sorted(turned, key=lambda fact: merit(fact, "latency")) == ranked
    least = min(ranked, key=lambda fact: merit(fact, "memory"))
    assert planned(least) == 1
    assert min([table(size=90, count=9), table()], key=lambda fact: merit(fact, "size"))["size"] == 90


def test_a_table_that_is_not_known_is_no_merit() -> None:
    assert unknown(table()) is None
    assert unknown({"error": "no kernel"}) == "no kernel"
    assert unknown(table(unknown="the builder logged no table")) == "the builder logged no table"
    assert "no GPU" in METHOD
