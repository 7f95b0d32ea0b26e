"""Our exports must not crash ONNX Runtime. Each is opened and run in a child process, over all options that change a
graph.

ONNX Runtime 1.31 segfaults on some fp16 graphs when it creates the session (in its NchwcTransformer, on Transformer-XL
as others write it). So a crash shows as the end of a process, not as an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import CASES, small_spec, weights_for

from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.export import export
from posexport.runtimes import RUNTIMES
from posexport.runtimes.pool import Answer, Pool
from posexport.spec.contract import bounds_of, graph_inputs
from posexport.spec.forms import FORMS, unsupported_opset
from posexport.spec.spec import Spec
from posexport.verify.cases import make_cases

pytestmark = pytest.mark.slow

OPSETS = (18, 20, 23, 24, 25)
HOWS = [(form, opset) for form in FORMS for opset in OPSETS if unsupported_opset(form, "portable", opset) is None]
BLOCKS: dict[str, dict[str, Any]] = {
    f"{norm}-{mlp}-{kind}": {"block": "transformer", "norm": norm, "mlp": mlp, "norm_type": kind}
    for norm in ("pre", "post")
    for mlp in ("gelu", "swiglu")
    for kind in ("layernorm", "rmsnorm")
}
MASKS: dict[str, dict[str, Any]] = {
    "gqa": {"num_kv_heads": 2},
    "causal": {"causal": True},
    "window": {"window": 5},
    "all": {"num_kv_heads": 1, "causal": True, "window": 5, "bias": True},
}
WIDE = {"hidden_size": 256, "num_heads": 4}
"""The width at which the crash was seen."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(time_limit=120) as workers:
        yield workers


def _runs(pool: Pool, folder: Path, name: str, spec: Spec, **how: Any) -> str | None:
    """Export a spec, and open and run the file in the child. Return how it failed, or None."""
    path = folder / "block.onnx"
    write_onnx(export(spec, weights_for(spec), **how), path)
    cases = make_cases(spec, 0, bounds_of(graph_inputs(spec), read_onnx(path).inputs()))[:3]
    answer: Answer = pool.submit(RUNTIMES["ort-cpu"], path, [case.arrays for case in cases], {"threads": 1}).result()
    return None if answer.failure is None else f"{name}: {answer.failure}"


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(("form", "opset"), HOWS)
class TestNoCrash:
    """Every export opens and runs. A failure lists all that don't."""

    def test_encodings(self, pool: Pool, tmp_path: Path, form: str, dtype: str, opset: int) -> None:
        found = [
            _runs(pool, tmp_path, name, small_spec(**{**over, "dtype": dtype}), form=form, opset=opset)
            for name, over in CASES.items()
        ]
        assert [each for each in found if each] == []

    def test_masks(self, pool: Pool, tmp_path: Path, form: str, dtype: str, opset: int) -> None:
        names = ("learned", "relative", "relative-table", "t5", "rope", "rope2d", "alibi")
        found = [
            _runs(pool, tmp_path, f"{name} {mask}", small_spec(**{**CASES[name], **over, "dtype": dtype}),
                  form=form, opset=opset)
            for name in names
            for mask, over in MASKS.items()
        ]  # fmt: skip
        assert [each for each in found if each] == []

    def test_blocks(self, pool: Pool, tmp_path: Path, form: str, dtype: str, opset: int) -> None:
        names = ("none", "sinusoidal", "relative", "relative-table", "t5", "rope-half", "rope2d", "alibi")
        found = [
            _runs(pool, tmp_path, f"{name} {kind}", small_spec(**{**CASES[name], **over, "dtype": dtype}),
                  form=form, opset=opset)
            for name, (kind, over) in zip(names, BLOCKS.items(), strict=True)
        ]  # fmt: skip
        assert [each for each in found if each] == []

    def test_wide_relative(self, pool: Pool, tmp_path: Path, form: str, dtype: str, opset: int) -> None:
        found = [
            _runs(pool, tmp_path, f"{name} {kind} {fixed}",
                  small_spec(**{**CASES[name], **WIDE, **over, "dtype": dtype}), form=form, opset=opset, **fixed)
            for name in ("relative", "relative-table")
            for kind, over in {"plain": {}, **BLOCKS}.items()
            if kind in ("plain", "pre-gelu-layernorm", "post-swiglu-rmsnorm")
            for fixed in ({}, {"batch": 1, "seq": 64})
        ]  # fmt: skip
        assert [each for each in found if each] == []
