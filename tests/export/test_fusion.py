"""Reasons why attention is not fused, and proof that their advice leads to a fused kernel."""

from __future__ import annotations

from typing import Any

import pytest
from trt_helpers import built, exported, needs_rtx

from posexport.artifact.manifest import PlanKernels
from posexport.artifact.onnx_artifact import read_onnx
from posexport.export.compile import BUILDER, FP32, HEAD_DIM, SCORES, SPLIT, unfused_reason
from posexport.models import read_spec
from posexport.spec.spec import Spec


def spec_of(encoding: str = "rope", **fields: Any) -> Spec:
    data = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "dtype": "fp16", **fields}
    return read_spec({**data, "encoding": {"name": encoding}})


def kernels_of(fused: int, layers: int = 1) -> PlanKernels:
    counts = {"count": fused + 1, "attention_kernels": fused, "attention_layers": layers, "host_steps": 0}
    return PlanKernels(**counts, fused_attention=fused == layers, rows=())


@pytest.mark.parametrize(
    ("fields", "form", "fused", "code", "advice"),
    [
        ({"dtype": "fp32"}, "decomposed", 0, FP32, "export with --dtype fp16 or bf16"),
        ({"head_dim": 8}, "native", 0, HEAD_DIM, "head_dim is 8, and fused attention kernels take 16 to 256"),
        ({"head_dim": 264}, "decomposed", 0, HEAD_DIM, "head_dim is 264"),
        ({"encoding": "shaw"}, "decomposed", 0, SCORES, "shaw computes scores from positions and content"),
        ({"encoding": "cope", "causal": True}, "function", 0, SCORES, "export with --form native"),
        ({"encoding": "shaw", "softcap": 30.0}, "decomposed", 0, SCORES, "no other form can carry this block"),
        ({"encoding": "shaw"}, "native", 0, BUILDER, "compare forms"),
        ({}, "decomposed", 0, BUILDER, "compare forms"),
        ({"layers": 2}, "decomposed", 3, SPLIT, "3 attention kernels of 2 layers"),
    ],
)
def test_each_cause_has_its_reason(fields: dict[str, Any], form: str, fused: int, code: str, advice: str) -> None:
    spec = spec_of(**fields)
    reason = unfused_reason(spec, form, kernels_of(fused, spec.layers))
    assert reason is not None
    assert reason.code == code
    assert advice in reason.text


def test_fused_and_unknown_have_none() -> None:
    assert unfused_reason(spec_of(dtype="fp32"), "decomposed", kernels_of(1)) is None
    assert unfused_reason(spec_of(dtype="fp32"), "decomposed", PlanKernels.unlisted(1, "no table")) is None


@pytest.mark.sampled(2)
@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize(
    ("before", "after"),
    [({"encoding": "rope", "head_dim": 8}, {"head_dim": 16}), ({"encoding": "shaw"}, {"form": "native"})],
    ids=["head_dim", "form"],
)
def test_the_advice_fuses(before: dict[str, Any], after: dict[str, Any]) -> None:
    """The builder does not fuse for a known cause, and fuses after the change that the reason names."""
    unfused, fused = exported(**before), exported(**{**before, **after})
    kernels = built(unfused).kernels
    assert kernels.fused_attention is False
    reason = unfused_reason(read_onnx(unfused).spec, "decomposed", kernels)
    assert reason is not None
    assert reason.code in (SCORES, HEAD_DIM)
    assert built(fused).kernels.fused_attention is True
