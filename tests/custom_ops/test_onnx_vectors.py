"""The vectors of ONNX's own tests of RotaryEmbedding and Attention, run through posexport's operators in torch and in
every form.

A vector is converted to the inputs of posexport's operators. Heads are placed side by side. A mask becomes padding or a
bias. `nonpad_kv_seqlen` becomes a buffer into which the last keys are still to be written. Causality and windows are
passed as attributes if the last query is at the last key, as in posexport. If ONNX counts from the first key, they
become a bias.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import onnx
import onnx.backend.test.case.node.attention
import onnx.backend.test.case.node.rotaryembedding
import onnx_ir as ir
import pytest
import torch
from helpers import Array, open_ort
from onnx.backend.test.case import node as made
from onnx.reference import ReferenceEvaluator

from posexport import custom_ops
from posexport.custom_ops.unsupported import AttentionCall, fits_grouped_batch, unsupported_reason
from posexport.export.modules import export_module

OUT_OF_SCOPE: dict[str, tuple[str, ...]] = {
    "values have heads of another width than keys, which no block here has": (
        *(f"test_attention_{rank}d_diff_heads_sizes{more}" for rank in (3, 4) for more in ("", "_scaled", "_causal")),
        *(f"test_attention_{rank}d_diff_heads_sizes_{more}" for rank in (3, 4) for more in ("attn_mask", "softcap")),
        *(f"test_attention_{rank}d_diff_heads_with_past_and_present" for rank in (3, 4)),
        "test_attention_4d_diff_heads_with_past_and_present_mask3d",
        "test_attention_4d_diff_heads_with_past_and_present_mask4d",
        "test_attention_4d_diff_heads_mask4d_padded_kv",
        "test_attention_3d_local_window",
        "test_attention_local_window_gqa_rank4_mask",
    ),
    "every key is hidden from one query and not from another, where padding hides keys from all queries": (
        "test_attention_causal_boolmask_nan_robustness",
        "test_attention_23_boolmask_fullymasked_row_nan_robustness",
        "test_attention_23_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_qk_matmul_output_mode3_softmax_precision",
    ),
    "there are fewer keys than queries, so that the first query stands before all of them": (
        "test_attention_4d_causal_padded_kv_bf16",
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
    ),
}
"""The reasons why some vectors are not calls of posexport's operators. For vectors with qk_matmul_output, an output for
debugging, all other outputs are compared."""
OUT = [name for names in OUT_OF_SCOPE.values() for name in names]

MASKED = -3.0e38
HOWS = {
    ("function", "portable"): 70,
    ("native", "portable"): 60,
    ("native", "ort"): 70,
    ("contrib", "portable"): 50,
    ("contrib", "ort"): 55,
}
"""Form and target, and the least number of vectors that they run. The others have no operator there
(unsupported_reason)."""
KINDS = ("RotaryEmbedding", "Attention")
VECTORS = {
    case.name: case
    for case in made._NodeTestCases
    if "_expanded" not in case.name and case.model.graph.node[0].op_type in KINDS
}
ROTARY = [name for name in VECTORS if name.startswith("test_rotary_embedding")]
ATTENTION = [name for name in VECTORS if name.startswith("test_attention")]
RUN = [name for name in (*ROTARY, *ATTENTION) if name not in OUT]
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


@attrs.frozen(kw_only=True, eq=False)
class Call:
    """One call of one of posexport's operators: tensors, None and attributes in its order, and the expected outputs."""

    operator: Any
    arguments: list[Any]
    outputs: list[Array]
    dtype: str
    keys: Array | None = None
    """The number of places in each row's buffer that contain keys, if there are buffers."""

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in self.arguments if isinstance(each, torch.Tensor)]

    def fits(self, form: str, target: str) -> bool:
        """Whether a form has operators for this call."""
        if self.operator is custom_ops.rotate:
            return True
        cache = {"attend": None, "attend_cached": "concat", "attend_shared": "shared"}[self.operator.name]
        q, k = self.arguments[:2]
        if (form, target, cache) == ("contrib", "ort", "shared") and not fits_grouped_batch(*q.shape[:2], past=1):
            return False
        num_heads, softcap = self.arguments[-7], self.arguments[-1]
        width, square = q.shape[-1] // num_heads, q.shape[1] == k.shape[1]
        return unsupported_reason(form, target, AttentionCall(cache, softcap > 0, width, square)) is None


def tensor(array: Array) -> torch.Tensor:
    """A torch tensor. Torch can read numpy's bfloat16 only as bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def array(found: torch.Tensor) -> Array:
    """The same numbers as an array, including bfloat16."""
    return found.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if found.dtype == torch.bfloat16 else found.numpy()


def flat(heads: Array) -> Array:
    """[B, heads, S, width] to [B, S, heads*width]. Arrays with three dimensions are unchanged."""
    if heads.ndim == 3:
        return heads
    batch, _, seq, _ = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(batch, seq, -1)


def rotary(inputs: dict[str, Array], given: dict[str, Any], outputs: list[Array]) -> Call:
    x, cos, sin = inputs["X"], inputs["cos_cache"], inputs["sin_cache"]
    heads = x.shape[1] if x.ndim == 4 else given["num_heads"]
    if "position_ids" in inputs:
        cos, sin = cos[inputs["position_ids"]], sin[inputs["position_ids"]]
    width = flat(x).shape[-1] // heads
    assert 2 * cos.shape[-1] == given.get("rotary_embedding_dim", width)
    arguments = [*map(tensor, (flat(x), cos, sin)), width, bool(given.get("interleaved", 0)), [cos.shape[-1]]]
    return Call(operator=custom_ops.rotate, arguments=arguments, outputs=[flat(outputs[0])], dtype=str(x.dtype))


@attrs.define
class Sight:
    """The keys that queries see, [B, N, S, T], apart from what mask and attributes tell the operator, and what is
    added."""

    seen: Array
    added: Array | None = None
    padding: Array | None = None
    causal: bool = False
    window: int = 0

    def bias(self) -> Array | None:
        """Both as one bias; None if no bias is needed."""
        if self.added is None and self.seen.all():
            return None
        added = np.zeros(1, np.float32) if self.added is None else self.added
        return np.where(self.seen, added, np.float32(MASKED)).astype(np.float32)


def sight(inputs: dict[str, Array], given: dict[str, Any], shape: tuple[int, ...], first: Array, ours: bool) -> Sight:
    """`shape` is [B, N, S, T], and `first` is the index of each row's first query. `ours` says whether the last query
    is then at the last key."""
    seq, total = shape[2:]
    found = Sight(np.ones(shape, bool))
    causal, left, right = (
        given.get("is_causal", 0),
        given.get("left_window_size", -1),
        given.get("right_window_size", -1),
    )
    if ours and (left < 0 or causal or left == right):
        found.causal, found.window = bool(causal), left + 1
    else:  # counted from the first key, or wider on one side
        ahead = first[:, None, None, None] + np.arange(seq)[:, None] - np.arange(total)
        for limit, far in ((0 if causal else -1, -ahead), (left, ahead), (right, -ahead)):
            found.seen = found.seen & ((far <= limit) | (limit < 0))
    mask = inputs.get("attn_mask")
    if mask is None:
        return found
    wide = [(0, 0)] * (mask.ndim - 1) + [(0, total - mask.shape[-1] if mask.shape[-1] > 1 else 0)]
    if mask.dtype == bool:
        mask = np.broadcast_to(np.pad(mask, wide), shape)
        if (mask == mask[:, :1, :1]).all():
            found.padding = mask[:, 0, 0].astype(np.int64)
        else:
            found.seen = found.seen & mask
    else:
        mask = np.pad(mask.astype(np.float32), wide, constant_values=-np.inf)
        found.added = np.broadcast_to(mask, shape)
        found.seen = found.seen & np.isfinite(found.added)
    return found


def attention(inputs: dict[str, Array], given: dict[str, Any], outputs: list[Array]) -> Call:
    q, k, v = (inputs[name] for name in "QKV")
    heads, kv = (q.shape[1], k.shape[1]) if q.ndim == 4 else (given["q_num_heads"], given["kv_num_heads"])
    dtype, (batch, seq) = str(q.dtype), flat(q).shape[:2]
    width = flat(q).shape[-1] // heads
    q, k, v = flat(q), flat(k), flat(v)
    assert k.shape == v.shape == (batch, k.shape[1], kv * width)
    total, first, ours = k.shape[1], np.zeros(batch, np.int64), seq == k.shape[1]
    operator, rest = custom_ops.attend, []
    if "past_key" in inputs:
        operator, rest = custom_ops.attend_cached, [inputs["past_key"], inputs["past_value"]]
        total, first = total + rest[0].shape[2], np.full(batch, rest[0].shape[2])
    keys = inputs.get("nonpad_kv_seqlen")
    if keys is not None and not given.get("is_causal") and "attn_mask" in inputs and min(keys) < seq:
        assert inputs["attn_mask"].dtype != bool
        inputs = {**inputs, "padding": (np.arange(total) < keys[:, None]).astype(np.int64)}
    elif keys is not None:  # the last keys are still to be written
        operator, first, ours = custom_ops.attend_shared, keys - seq, True
        assert (first >= 0).all()
        at = (first[:, None] + np.arange(seq))[..., None]
        buffers = []
        for whole in (k, v):
            cut = whole.copy()
            np.put_along_axis(cut, np.broadcast_to(at, (batch, seq, whole.shape[-1])), np.asarray(9, whole.dtype), 1)
            buffers.append(cut.reshape(batch, total, kv, width).transpose(0, 2, 1, 3))
            outputs = [*outputs, whole.reshape(batch, total, kv, width).transpose(0, 2, 1, 3)]
        k, v = (np.take_along_axis(whole, at, 1) for whole in (k, v))
        rest = [*buffers, first]
    view = sight(inputs, given, (batch, heads, seq, total), first, ours)
    bias = view.bias()
    added = [None if each is None else tensor(each) for each in (bias, inputs.get("padding", view.padding))]
    scale, cap = given.get("scale", width**-0.5), given.get("softcap", 0.0)
    arguments = [*map(tensor, (q, k, v, *rest)), *added, None, heads, kv, scale, view.causal, view.window, 0, cap]
    wanted = [flat(outputs[0]), *outputs[1 : len(operator.outputs)]]
    return Call(operator=operator, arguments=arguments, outputs=wanted, dtype=dtype, keys=keys)


@functools.cache
def call(name: str) -> Call:
    """A vector, converted to a call of posexport's operators."""
    model, ((inputs, outputs),) = VECTORS[name].model, VECTORS[name].data_sets
    (node,) = model.graph.node
    formal = [each.name for each in onnx.defs.get_schema(node.op_type, model.opset_import[0].version).inputs]
    present = [place for place, given in zip(formal, node.input, strict=False) if given]
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    bring = rotary if node.op_type == "RotaryEmbedding" else attention
    return bring(dict(zip(present, inputs, strict=True)), given, list(outputs))


def check(name: str, found: Iterable[Array], tails: bool = True) -> None:
    """Check every output. `tails` includes the ends of buffers, which no query sees."""
    wanted = call(name)
    for index, (output, truth) in enumerate(zip(found, wanted.outputs, strict=True)):
        assert output.shape == truth.shape
        if index and not tails and wanted.keys is not None:
            held = np.arange(truth.shape[2]) < wanted.keys[:, None]
            output, truth = (np.where(held[:, None, :, None], each, 0) for each in (output, truth))
        limit = TOLERANCE[wanted.dtype] * max(1.0, float(np.abs(truth.astype(np.float64)).max()))
        np.testing.assert_allclose(
            output.astype(np.float64), truth.astype(np.float64), atol=limit, rtol=0, err_msg=f"{name}, output {index}"
        )


def test_every_vector_runs_or_is_listed() -> None:
    assert len(ROTARY) == 8
    assert len(OUT) == len(set(OUT))
    assert set(OUT) < set(VECTORS)
    assert sorted([*RUN, *OUT]) == sorted(VECTORS)
    assert len(RUN) > 70


@pytest.mark.parametrize("name", RUN)
def test_in_torch(name: str) -> None:
    one = call(name)
    out = one.operator.eager(*one.arguments)
    check(name, map(array, out if isinstance(out, tuple) else (out,)))


class _All(torch.nn.Module):
    """Many calls in one module, so that they need only one export."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, found = list(tensors), []
        for each in self.calls:
            arguments = [left.pop(0) if isinstance(a, torch.Tensor) else a for a in each.arguments]
            out = each.operator(*arguments)
            found += out if isinstance(out, tuple) else [out]
        return tuple(found)


def _names(form: str, target: str, halves: bool) -> list[str]:
    """The vectors for which a form has operators. Those in bfloat16 are separate."""
    return [name for name in RUN if call(name).fits(form, target) and (call(name).dtype == "bfloat16") == halves]


@functools.cache
def written(form: str, target: str, halves: bool = False) -> ir.Model:
    """One graph with all vectors that the form supports."""
    calls = [call(name) for name in _names(form, target, halves)]
    given = tuple(one for each in calls for one in each.tensors())
    outputs = sum(len(each.outputs) for each in calls)
    return export_module(
        _All(calls),
        given,
        (({},) * len(given),),  # type: ignore[arg-type]
        input_names=tuple(f"in{index}" for index in range(len(given))),
        output_names=tuple(f"out{index}" for index in range(outputs)),
        form=form,
        target=target,
        opset=24,  # the first opset with TensorScatter
    )


def _by_vector(names: list[str], values: Iterable[Array]) -> dict[str, list[Array]]:
    left = iter(values)
    return {name: [next(left) for _ in call(name).outputs] for name in names}


def _inputs(names: list[str]) -> dict[str, Array]:
    arrays = [array(each) for name in names for each in call(name).tensors()]
    return {f"in{index}": each for index, each in enumerate(arrays)}


@functools.cache
def on_ort(form: str, target: str) -> dict[str, list[Array]]:
    names = _names(form, target, False)
    return _by_vector(names, open_ort(written(form, target))(_inputs(names)).values())


@functools.cache
def on_reference(form: str, target: str, halves: bool) -> dict[str, list[Array]]:
    names = _names(form, target, halves)
    evaluator = ReferenceEvaluator(ir.to_proto(written(form, target, halves)))
    with np.errstate(all="ignore"):
        return _by_vector(names, evaluator.run(None, _inputs(names)))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", HOWS, ids="-".join)
def test_on_onnx_runtime(how: tuple[str, str]) -> None:
    found = on_ort(*how)
    assert len(found) >= HOWS[how]
    for name, outputs in found.items():
        # GroupQueryAttention leaves zeros after the last key
        check(name, outputs, tails=how != ("contrib", "ort"))


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("how", list(HOWS)[:3], ids="-".join)
def test_on_the_reference(how: tuple[str, str], halves: bool) -> None:
    """It has no operators of com.microsoft. Unlike ONNX Runtime, it has the standard operators in bfloat16."""
    found = on_reference(*how, halves)
    assert len(found) >= (4 if halves else HOWS[how])
    for name, outputs in found.items():
        check(name, outputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["test_attention_4d_causal_with_past_and_present", "test_rotary_embedding_3d_input"])
def test_a_wrong_output_is_seen(name: str) -> None:
    outputs = on_ort(*next(iter(HOWS)))[name]
    check(name, outputs)
    for index in range(len(outputs)):
        wrong = [np.roll(each, 1, 1) if at == index else each for at, each in enumerate(outputs)]
        with pytest.raises(AssertionError, match=f"{name}, output {index}"):
            check(name, wrong)
