"""The checks of a project's files apart from parity, on files that were never run. A fault is planted for each
check."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import pytest
from manifest_data import kernels, onnx_manifest, plan_manifest

from posexport.files import sha256_of
from posexport.verify.result import Report, Verdict, VerifyOverrides
from posexport.workflows.project.file import find_project
from posexport.workflows.project.products import Product, out_of_date, products, stamp
from posexport.workflows.project.verify import check, without_parity

pytestmark = pytest.mark.few_inputs

ONNX = {"form": "decomposed", "spec": {"hidden_size": 64, "window": None}, "weights": {"seed": 0}}
PLAN = {"runtime": "tensorrt-rtx", "profile": [], "tf32": False}
TEXT = """
[[artifact]]
name = "one"
encoding = "rope"
compile = {}
budget = {size = "1 kB", plan-size = "2 kB", kernels = 8, fused-attention = true}
"""


def make(folder: Path) -> tuple[Product, Product]:
    """An ONNX file and its plan that consist mainly of manifests, up to date and within their budget."""
    (folder / "posexport.toml").write_text(TEXT)
    onnx, plan = products(find_project(str(folder / "posexport.toml")))
    onnx, plan = attrs.evolve(onnx, made_from=ONNX, facts={}), attrs.evolve(plan, made_from=PLAN, facts={})
    onnx.path.parent.mkdir()
    tools = {name: metadata.version(name) for name in ("torch", "onnx", "onnxscript", "onnx-ir")}
    tools["torch"] = tools["torch"].partition("+")[0] + "+else"  # another build of the same version
    rtx = next((metadata.version(name) for name in ("tensorrt-rtx",) if _installed(name)), "1.0")
    for product, size, more in (
        (onnx, 1000, {"tools": tools}),
        (plan, 2000, {"tools": {"onnx": tools["onnx"], "tensorrt-rtx": rtx}}),
    ):
        product.path.write_bytes(b"x" * size)
        plan_data = plan_manifest(product.path, onnx.path, **more)
        write(product, plan_data if product.plan else onnx_manifest(product.path, **more))
        stamp(product)
    return onnx, plan


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def write(product: Product, manifest: dict[str, Any]) -> None:
    product.path.with_name(product.path.name + ".json").write_text(json.dumps(manifest))


def change(product: Product, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads(product.path.with_name(product.path.name + ".json").read_text())
    edit(manifest)
    write(product, manifest)


def add_data(onnx: Product, data: bytes = b"x") -> dict[str, str]:
    """Give an ONNX file external data, and write their sha256 into its manifest."""
    file = onnx.path.with_name("one.onnx.data")
    file.write_bytes(data)
    named = {file.name: sha256_of(file)}
    change(onnx, lambda manifest: manifest.update(external_data=named))
    return named


def test_a_plan_is_stale_with_the_weights_beside_its_onnx_file(tmp_path: Path) -> None:
    onnx, plan = make(tmp_path)
    named = add_data(onnx)
    assert "other weights" in str(out_of_date(plan))
    change(plan, lambda manifest: manifest["onnx"].update(external_data=named))
    assert out_of_date(plan) is None
    add_data(onnx, b"other")
    assert out_of_date(onnx) is None
    assert "other weights" in str(out_of_date(plan))


def test_every_file_that_is_there_gets_a_verdict_of_parity(tmp_path: Path) -> None:
    onnx, plan = make(tmp_path)
    checks = {onnx.path: check(onnx), plan.path: check(attrs.evolve(plan, made_from={**PLAN, "profile": ["seq=8"]}))}
    rows = without_parity([onnx, plan], {}, checks, Report(verdicts=(), unreadable=(), seed=0))
    assert {(Path(each.artifact).name, each.state) for each in rows} == {
        ("one.onnx", "not run"),
        ("one.plan", "not run"),
    }
    assert {each.reason for each in rows} == {"the runtime was not asked for", "it is out of date"}
    link = attrs.evolve(onnx, path=onnx.path.with_name("two.onnx"))
    link.path.symlink_to(onnx.path)
    terms = {each.path: VerifyOverrides(runtimes=("ort-cpu",)) for each in (onnx, link)}
    told = Verdict(artifact=str(onnx.path), runtime="ort-cpu", state="passed")
    (row,) = without_parity([onnx, link], terms, checks, Report(verdicts=(told,), unreadable=(), seed=0))
    assert (row.artifact, row.runtime, row.state) == (str(link.path), "ort-cpu", "not run")
    assert "the same file" in str(row.reason)


def test_what_is_as_it_must_be_passes(tmp_path: Path) -> None:
    onnx, plan = make(tmp_path)
    onnx.path.with_name("one.onnx.data").write_bytes(b"x" * 9000)  # left over: no manifest names it
    found = [*check(onnx), *check(plan)]
    assert [(Path(each.artifact).name, each.check, each.state) for each in found] == [
        ("one.onnx", "up to date", "passed"),
        ("one.onnx", "size", "passed"),
        ("one.plan", "up to date", "passed"),
        ("one.plan", "size", "passed"),
        ("one.plan", "kernels", "passed"),
        ("one.plan", "fused attention", "passed"),
    ]
    assert {each.runtime for each in found} == {"project"}
    assert [(each.measured, each.limit_text) for each in found] == [
        (None, None),
        ("1 kB", "1 kB"),
        (None, None),
        ("2 kB", "2 kB"),
        ("8 kernels", "8"),
        ("one kernel in each layer", "one kernel in each layer"),
    ]


STALE: dict[str, tuple[Callable[[Product], object], str]] = {
    "gone": (lambda one: one.path.unlink(), "not there"),
    "no manifest": (lambda one: one.path.with_name("one.onnx.json").unlink(), "manifest"),
    "a broken manifest": (lambda one: one.path.with_name("one.onnx.json").write_text("{"), "JSON"),
    "other bytes": (lambda one: one.path.write_bytes(b"y"), "sha256 differ"),
    "another spec": (
        lambda one: change(one, lambda data: data["request"]["spec"].update(hidden_size=32)),
        "its spec hidden_size is 32, asked for is 64",
    ),
    "other weights": (
        lambda one: change(one, lambda data: data["request"].update(weights={"file_sha256": "0"})),
        "weights",
    ),
    "more in the request": (lambda one: change(one, lambda data: data["request"].update(opset=20)), "opset"),
    "made by export": (lambda one: change(one, lambda data: data.pop("request")), "posexport build"),
    "another posexport": (lambda one: change(one, lambda data: data.update(version="0.0.0")), "posexport 0.0.0"),
    "another torch": (lambda one: change(one, lambda data: data["tools"].update(torch="1.0")), "torch 1.0"),
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_file_fails_and_the_reason_names_the_fault(name: str, tmp_path: Path) -> None:
    onnx, _ = make(tmp_path)
    fault, said = STALE[name]
    fault(onnx)
    verdict = check(onnx)[0]
    assert (verdict.check, verdict.state) == ("up to date", "failed")
    assert said in str(verdict.reason)
    assert "posexport build" in str(verdict.reason)


FACTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "the form": (lambda data: data.update(form="native"), "its form is native, asked for is decomposed"),
    "the opset": (lambda data: data.update(opset=23), "its opset is 23, asked for is 18"),
    "the spec": (lambda data: data["spec"].update(window=5), "its spec window is 5, asked for is None"),
    "a fixed size": (lambda data: data["inputs"][0].update(shape=[3, "seq", 256]), "its inputs hidden_states is [3, "),
    "no spec": (lambda data: data.pop("spec"), "its spec"),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_manifest_of_another_file_with_the_right_request_is_noticed(name: str, tmp_path: Path) -> None:
    onnx, _ = make(tmp_path)
    data = onnx_manifest(onnx.path)
    facts = {"form": "decomposed", "target": "portable", "opset": 18, "spec": data["spec"]}
    onnx = attrs.evolve(onnx, facts={**facts, "inputs": {"hidden_states": ["batch", "seq", 256]}})
    assert out_of_date(onnx) is None
    fault, said = FACTS[name]
    change(onnx, fault)
    assert said in str(out_of_date(onnx))


PLAN_FACTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "the builder": (
        lambda data: data["runtime"].update(name="tensorrt"),
        "its runtime name is tensorrt, asked for is tensorrt-rtx",
    ),
    "tf32": (lambda data: data.update(tf32=True), "its tf32 is True, asked for is False"),
    "the memory": (lambda data: data.update(memory_limit=1), "its memory_limit is 1, asked for is None"),
    "the GPUs": (
        lambda data: data.update(target_gpus=["8.9"]),
        "its target_gpus is ['8.9'], asked for is ['portable']",
    ),
    "the profile": (
        lambda data: data["profiles"]["hidden_states"].update(max=[2, 8, 256]),
        "its profiles hidden_states max is [2, 8, 256], asked for is [2, 9, 256]",
    ),
}


@pytest.mark.parametrize("name", PLAN_FACTS)
def test_a_plan_of_another_build_with_the_right_request_is_noticed(name: str, tmp_path: Path) -> None:
    _, plan = make(tmp_path)
    facts = {"runtime": {"name": "tensorrt-rtx"}, "tf32": False, "memory_limit": None, "target_gpus": ["portable"]}
    plan = attrs.evolve(plan, facts={**facts, "profiles": plan_manifest(plan.path, plan.source)["profiles"]})
    assert out_of_date(plan) is None
    fault, said = PLAN_FACTS[name]
    change(plan, fault)
    assert said in str(out_of_date(plan))


def test_a_plan_is_stale_with_its_onnx_file_its_options_or_its_builder(tmp_path: Path) -> None:
    onnx, plan = make(tmp_path)
    assert out_of_date(plan) is None
    assert "its profile is [], asked for is ['seq=8']" in str(
        out_of_date(attrs.evolve(plan, made_from={**PLAN, "profile": ["seq=8"]}))
    )
    if _installed("tensorrt-rtx"):
        before = plan.path.with_name("one.plan.json").read_text()
        change(plan, lambda data: data["tools"].update({"tensorrt-rtx": "0.1"}))
        assert "tensorrt-rtx 0.1" in str(out_of_date(plan))
        plan.path.with_name("one.plan.json").write_text(before)
    onnx.path.write_bytes(b"another")
    assert "another one.onnx" in str(out_of_date(plan))


OVER: dict[str, tuple[Callable[[Product, Product], object], tuple[str, str, str]]] = {
    "size": (lambda onnx, plan: onnx.path.write_bytes(b"x" * 1001), ("size", "failed", "1.001 kB, limit 1 kB")),
    "external data": (lambda onnx, plan: add_data(onnx), ("size", "failed", "1.001 kB, limit 1 kB")),
    "the plan's size": (
        lambda onnx, plan: plan.path.write_bytes(b"x" * 2001),
        ("size", "failed", "2.001 kB, limit 2 kB"),
    ),
    "kernels": (
        lambda onnx, plan: change(plan, lambda data: data["kernels"].update(count=9)),
        ("kernels", "failed", "9 kernels, limit 8"),
    ),
    "unknown kernels": (
        lambda onnx, plan: change(plan, lambda data: data.update(kernels=kernels(None, None, unknown="no table"))),
        ("kernels", "failed", "no table"),
    ),
    "fusion": (
        lambda onnx, plan: change(plan, lambda data: data["kernels"].update(fused_attention=False)),
        ("fused attention", "failed", "not one kernel"),
    ),
}


@pytest.mark.parametrize("name", OVER)
def test_what_is_over_its_budget_fails(name: str, tmp_path: Path) -> None:
    onnx, plan = make(tmp_path)
    fault, (what, state, said) = OVER[name]
    fault(onnx, plan)
    found = [*check(onnx), *check(plan)]
    (verdict,) = [each for each in found if (each.check, each.state) == (what, state)]
    assert said in str(verdict.reason)
    if name != "unknown kernels":
        assert verdict.reason == f"{verdict.measured}, limit {verdict.limit_text}"


def test_a_plan_that_nothing_here_can_build_is_not_run_while_one_that_can_be_built_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plan = make(tmp_path)
    plan.path.unlink()
    for missing, state in (("not installed", "not run"), (None, "failed")):
        monkeypatch.setattr("posexport.workflows.project.verify.can_build", lambda name, missing=missing: missing)
        (verdict,) = check(plan)
        assert verdict.state == state
