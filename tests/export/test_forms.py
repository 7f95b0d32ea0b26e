"""Every form for every target: refusals in one sentence, results of all others, and the differences between targets.

Graphs run on ONNX Runtime and are compared with the oracle in numpy float64.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from form_helpers import BOUNDS, OPTIONS, ROWS, carried, check_form, small_cases, spec_of
from helpers import Array, as_float64, cli, refused, small_spec, tree, weights_for
from pairs import Row

from posexport import custom_ops
from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.artifact.onnx_file import skeleton
from posexport.custom_ops.unsupported import REFUSALS
from posexport.errors import Reason, RequestError
from posexport.export import export
from posexport.export.modules import export_module
from posexport.export.support import checked_opset, default_opset, unsupported_reason
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.spec import Spec

REFUSED: list[tuple[str, tuple[str, ...], str, dict[str, Any]]] = [
    ("native", ("portable", "tensorrt"), "softcap", {"softcap": 5.0}),
    (
        "contrib",
        ("portable", "tensorrt", "ort"),
        "softcap or shared caches, and a head_dim that is no multiple of 8",
        {"kv_cache": "shared", "head_dim": 12},
    ),
    ("contrib", ("portable", "tensorrt", "ort"), "softcap with an encoder's keys", {"softcap": 5.0, "cross": True}),
    ("contrib", ("portable", "tensorrt"), "softcap", {"softcap": 5.0, "causal": True}),
    ("contrib", ("portable", "tensorrt"), "shared caches", {"kv_cache": "shared", "padding_mask": True}),
]
"""Form, targets, an unsupported option, and fields of a spec with it."""
WHY = {(row.form, row.targets, row.feature): row.reason for row in REFUSALS}
CASES = [(form, target, what, over) for form, targets, what, over in REFUSED for target in targets]


def test_every_refusal_has_an_example() -> None:
    assert [(form, targets, what) for form, targets, what, _ in REFUSED] == list(WHY)


def _why(form: str, target: str, what: str) -> Reason:
    return next(why for (at, targets, named), why in WHY.items() if (at, named) == (form, what) and target in targets)


def _options(over: dict[str, Any]) -> list[str]:
    given = [(f"--{key.replace('_', '-')}", value) for key, value in over.items()]
    return [part for key, value in given for part in ([key] if value is True else [key, str(value)])]


@pytest.mark.parametrize(("form", "target", "what", "over"), CASES)
def test_a_spec_that_a_form_cannot_carry_is_refused(
    form: str, target: str, what: str, over: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, why = small_spec("none", **over), _why(form, target, what)
    assert unsupported_reason(spec, form, target) == why
    with pytest.raises(RequestError, match=f"^{re.escape(why.text)}[.]$"):
        export(spec, weights_for(spec), form=form, target=target)
    sizes = ("--hidden-size", "32", "--num-heads", "4")
    result = cli("export", "--encoding", "none", *sizes, *_options(over), "--form", form, "--target", target)
    refused(result, f"Error: {why}.")
    assert tree(tmp_path) == {}


class _Attention(torch.nn.Module):
    """A module with one call of the attention of a spec."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> Any:
        operators: dict[str | None, Any] = {
            None: custom_ops.attend,
            "concat": custom_ops.attend_cached,
            "shared": custom_ops.attend_shared,
        }
        spec, cap = self.spec, self.spec.softcap or 0.0
        more = (None, None, None, spec.num_heads, spec.num_kv_heads, spec.scale, spec.causal, spec.window or 0, 0, cap)
        return operators[spec.kv_cache](q, k, v, *rest, *more)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("form", "target", "what", "over"), CASES)
def test_a_module_of_ones_own_is_refused_too(form: str, target: str, what: str, over: dict[str, Any]) -> None:
    """The operator's body raises the same message."""
    spec = small_spec("none", **over)
    width = spec.num_heads * spec.head_dim
    caches = [torch.zeros(2, spec.num_heads, 5, spec.head_dim)] * 2 if spec.kv_cache else []
    writes = [torch.zeros(2, dtype=torch.int64)] if spec.kv_cache == "shared" else []
    tokens = [torch.zeros(2, 3, width), *(torch.zeros(2, 4 if spec.cross else 3, width) for _ in range(2))]
    args = (*tokens, *caches, *writes)
    with pytest.raises(RequestError, match=f"^{re.escape(_why(form, target, what).text)}[.]$"):
        export_module(
            _Attention(spec),
            args,
            ({}, {}, {}, ({},) * len(args[3:])) if args[3:] else ({}, {}, {}),  # type: ignore[arg-type]
            input_names=tuple("abcdef"[: len(args)]),
            output_names=("x", "y", "z")[: 3 if caches else 1],
            form=form,
            target=target,
        )


OPSETS: list[tuple[dict[str, str], str]] = [
    ({"opset": "25", "target": "tensorrt"}, "opset is 25: TensorRT takes 24 at most, so give a lower one"),
    ({"opset": "25", "form": "contrib", "target": "tensorrt"}, "opset is 25: TensorRT takes 24 at most"),
    ({"opset": "25", "form": "native"}, "opset is 25: native is written in opsets 23 to 24"),
    ({"opset": "22", "form": "native"}, "opset is 22: native is written in opsets 23 to 24"),
    (
        {"opset": "23", "form": "native", "kv-cache": "shared"},
        "native with shared caches is written in opset 24, which has TensorScatter: give opset 24, or none.",
    ),
    ({"form": "natives"}, "unknown form 'natives': did you mean 'native'?"),
    ({"target": "tensort"}, "unknown target 'tensort': did you mean 'tensorrt'?"),
    ({"target": "onnx"}, "unknown target 'onnx': allowed: portable, ort, tensorrt."),
]


@pytest.mark.parametrize(("given", "said"), OPSETS)
def test_opsets_forms_and_targets_that_are_not_there(
    given: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(cli("export", "--encoding", "none", *_options(given)), said)
    assert tree(tmp_path) == {}


def test_the_opset_of_a_form_is_the_lowest_that_has_its_operators() -> None:
    plain, shared = small_spec("none"), small_spec("none", kv_cache="shared")
    found = {form: (default_opset(form, plain), default_opset(form, shared)) for form in FORMS}
    assert found == {"decomposed": (18, 18), "function": (18, 18), "native": (23, 24), "contrib": (18, 18)}
    assert export(plain, weights_for(plain), form="native", target="tensorrt", opset=24).opset_imports[""] == 24


def test_buffers_of_any_length_are_scattered_for_ort_only() -> None:
    """Whole models have no spec. An opset without TensorScatter gives an error message, not an invalid file."""
    found = {target: checked_opset(None, "native", target, None, shared=True) for target in TARGETS}
    assert found == {"portable": 23, "ort": 24, "tensorrt": 23}
    assert checked_opset(None, "native", "ort", None) == 23
    with pytest.raises(RequestError, match="is 23: native with shared caches for ort is written in opset 24"):
        checked_opset(None, "native", "ort", 23, shared=True)


def _name(row: Row) -> str:
    named = [key if value is True else str(value) for key, value in row.items() if value not in (None, False)]
    return "-".join("-".join(row["how"]) if part == str(row["how"]) else part for part in named)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_every_form_is_the_formula(row: Row) -> None:
    check_form(spec_of(row), *row["how"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_every_form_is_the_formula_at_random(seed: int) -> None:
    rng = random.Random(seed)
    rows = ({name: rng.choice(values) for name, values in OPTIONS.items()} for _ in range(400))
    chosen = [row for row in rows if carried(row)]
    assert len(chosen) > 40
    for row in chosen:
        check_form(spec_of(row), *row["how"])


def _bytes(spec: Spec, form: str, target: str, **fixed: Any) -> tuple[bytes, str | None]:
    """The bytes of the graph without weights and target name, and the target name."""
    model = export(spec, weights_for(spec), form=form, target=target, **fixed)
    named = model.metadata_props.pop("posexport.target", None)
    whole: bytes = skeleton(model).SerializeToString(deterministic=True)
    return whole, named


DIFFERS: list[tuple[str, dict[str, Any], bool]] = [
    ("decomposed", {"kv_cache": "concat", "softcap": 2.0, "padding_mask": True}, False),
    ("decomposed", {"kv_cache": "shared"}, True),  # a scatter, which needs ten kernels in TensorRT
    ("function", {"kv_cache": "shared"}, True),
    ("function", {"kv_cache": "concat", "sinks": True}, False),
    ("native", {"causal": True, "padding_mask": True, "sinks": True}, False),
    ("native", {"dtype": "fp16"}, True),  # the precision of softmax; TensorRT does not support the attribute
    ("native", {"kv_cache": "concat", "causal": True}, True),  # the cache as an input of Attention
    (
        "native",
        {"kv_cache": "shared"},
        True,
    ),  # TensorScatter, which TensorRT supports only for buffers of a fixed length
    ("native", {"kv_cache": "shared", "max_seq": 16}, False),
    ("contrib", {"window": 3, "qk_norm": True}, False),
    ("contrib", {"cross": True, "padding_mask": True, "num_kv_heads": 2}, False),
    ("contrib", {"causal": True}, True),  # GroupQueryAttention
    ("contrib", {"causal": True, "head_dim": 12}, False),  # GroupQueryAttention does not support this head size
    ("contrib", {"kv_cache": "concat"}, True),  # cached keys, split into heads
]
"""Form, fields of a spec, and whether the graph for ONNX Runtime differs from the portable one."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "over", "differs"), DIFFERS)
def test_a_target_changes_the_graph_only_where_it_takes_more(form: str, over: dict[str, Any], differs: bool) -> None:
    fixed = {key: over[key] for key in ("max_seq",) if key in over}
    spec = small_spec("none", **{key: value for key, value in over.items() if key not in fixed})
    portable, ort = (_bytes(spec, form, target, **fixed) for target in ("portable", "ort"))
    assert portable[1] is None
    assert ort[1] == ("ort" if differs else None)
    assert (portable[0] != ort[0]) == differs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", [1, 5, 7, 11])
def test_what_all_targets_take_is_what_tensorrt_takes(row: int) -> None:
    form, over, _ = DIFFERS[row]
    spec = small_spec("rope", **over)
    assert _bytes(spec, form, "tensorrt") == _bytes(spec, form, "portable")


@pytest.mark.slow
def test_the_target_of_an_artifact_is_read_back(tmp_path: Path) -> None:
    spec = small_spec("alibi", softcap=3.0)
    for target, found in (("ort", "ort"), ("tensorrt", None), ("portable", None)):
        form = "native" if found else "decomposed"
        manifest = write_onnx(export(spec, weights_for(spec), form=form, target=target), tmp_path / "a.onnx")
        artifact = read_onnx(tmp_path / "a.onnx")
        assert (artifact.form, artifact.target) == (form, found or "portable")
        assert manifest.target == found
    assert set(TARGETS) == {"portable", "ort", "tensorrt"}


def test_a_wrong_graph_is_far_off() -> None:
    """A wrong option exceeds the bounds above, so the tests notice it."""
    right = {"encoding": "none", "kv_cache": "concat", "padding_mask": True, "causal": True, "window": 3, "sinks": True}
    right |= {"softcap": 1.5, "num_kv_heads": 2, "qk_norm": True, "head_dim": 8}
    spec = small_spec(**right)
    weights = as_float64(weights_for(spec))
    inputs = small_cases(spec, "native", ["scattered"])[0].arrays
    truth = oracles.outputs(spec, weights, inputs)["output"]
    wrong: Array
    for over in ({"causal": False}, {"window": 4}, {"sinks": False}, {"softcap": 2.0}, {"qk_norm": False}):
        wrong = oracles.outputs(small_spec(**{**right, **over}), weights, inputs)["output"]
        assert np.abs(wrong - truth).max() > 2 * BOUNDS["fp16"], over
