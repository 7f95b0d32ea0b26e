"""Each operator alone: its torch body, its fake and its ONNX body are one function with a name of its own."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import oracles
import pytest
import torch
from helpers import run_ort
from operator_calls import CALLS, DYNAMIC, MASKS, B, H, N, S, T, normal
from traces import same_program

from posexport import custom_ops
from posexport.custom_ops.unsupported import AttentionCall, unsupported_reason
from posexport.errors import RequestError
from posexport.export.modules import export_module
from posexport.graphs.function_bodies import DOMAIN


class Call(torch.nn.Module):
    """One call of an operator, with its tensors as inputs."""

    def __init__(self, operator: Callable[..., Any], arguments: list[Any]) -> None:
        super().__init__()
        self.operator, self.arguments = operator, arguments

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = list(tensors)
        out = self.operator(*(left.pop(0) if isinstance(a, torch.Tensor) else a for a in self.arguments))
        return out if isinstance(out, tuple) else (out,)


def tensors(arguments: list[Any]) -> list[torch.Tensor]:
    return [argument for argument in arguments if isinstance(argument, torch.Tensor)]


def written(name: str, form: str, target: str = "portable") -> ir.Model:
    """A call by its name as a graph in which all lengths are dynamic."""
    opset = 24 if form == "native" else None  # the first opset with TensorScatter
    with same_program("operator", name, opset):
        return graph_of(*CALLS[name], form, target, opset)


def graph_of(
    operator: Any,
    arguments: list[Any],
    dims: list[dict[int, str]],
    form: str,
    target: str = "portable",
    opset: int | None = None,
) -> ir.Model:
    """A call as a graph whose tensors have the dynamic axes of `dims`."""
    given = tensors(arguments)
    return export_module(
        Call(operator, arguments).eval(),
        tuple(given),
        (tuple({axis: DYNAMIC[dim] for axis, dim in each.items()} for each in dims[: len(given)]),),  # type: ignore[arg-type]
        input_names=tuple(f"in{index}" for index in range(len(given))),
        output_names=tuple(f"out{index}" for index in range(len(operator.outputs))),
        form=form,
        target=target,
        opset=opset,
    )


def outputs_on_ort(model: ir.Model, arguments: list[Any]) -> list[Any]:
    """The outputs of a call's graph for its tensors."""
    given = enumerate(tensors(arguments))
    return list(run_ort(model, {f"in{index}": tensor.numpy() for index, tensor in given}).values())


def check_on_ort(name: str, model: ir.Model) -> None:
    """Check that the graph of a call gives the outputs of its torch body."""
    check_outputs(name, outputs_on_ort(model, CALLS[name][1]))


def check_outputs(name: str, made: list[Any]) -> None:
    """Check that outputs of a call equal those of its torch body, with the shapes and dtypes of its fake."""
    operator, arguments, _ = CALLS[name]
    given = tensors(arguments)
    wanted = Call(operator, arguments)(*given)
    fake = Call(operator.fake, arguments)(*given)
    for output, tensor, shaped in zip(made, wanted, fake, strict=True):
        assert (tensor.shape, tensor.dtype) == (shaped.shape, shaped.dtype)
        np.testing.assert_allclose(output, tensor.numpy(), atol=2e-6 * max(1.0, float(tensor.abs().max())), rtol=0)


TOGETHER = (
    *("by-heads", "rotate-runs", "rotate-own", "rotate-features", "exact", "exact-2-axes", "by-length", "ntk", "grid"),
    *("grid-given", "powers", "temperature", "prefix", "alibi_bias", "alibi-ahead", "grid-bias", "kerple", "cosine"),
    *("fire", "window", "window-table", "cosine-heads", "offset-score", "disentangled", "contextual"),
)
"""Calls that share one graph, because an export takes longer than the calls."""


class Calls(torch.nn.Module):
    """Several calls side by side, with the tensors of all of them as inputs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.calls = torch.nn.ModuleList([Call(*CALLS[name][:2]) for name in names])

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, out = list(tensors), []
        for call in self.calls:
            count = sum(isinstance(each, torch.Tensor) for each in call.arguments)  # type: ignore[attr-defined]
            out += call(*(left.pop(0) for _ in range(count)))
        return tuple(out)


@functools.cache
def together() -> tuple[dict[str, list[Any]], dict[str, str]]:
    """The outputs of each call, and the name of its function in the graph."""
    given, dims, outputs, operators = [], [], [], {}
    for name in TOGETHER:
        operator, arguments, its = CALLS[name]
        own = tensors(arguments)
        given += own
        dims += its[: len(own)]
        outputs += [f"{name}/{output}" for output in operator.outputs]
        operators[name] = operator.function
    names = tuple(f"in{index}" for index in range(len(given)))
    model = export_module(
        Calls(TOGETHER).eval(),
        tuple(given),
        (tuple({axis: DYNAMIC[dim] for axis, dim in each.items()} for each in dims),),  # type: ignore[arg-type]
        input_names=names,
        output_names=tuple(outputs),
        form="function",
    )
    found = run_ort(model, dict(zip(names, (tensor.numpy() for tensor in given), strict=True)))
    by_call = {name: [made for key, made in found.items() if key.split("/")[0] == name] for name in TOGETHER}
    assert {node.op_type.partition("_")[0] for node in model.graph if node.domain == DOMAIN} == set(operators.values())
    return by_call, operators


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", TOGETHER)
def test_onnx_body_of_a_small_operator_equals_torch_body(name: str) -> None:
    check_outputs(name, together()[0][name])


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in TOGETHER])
def test_onnx_body_equals_torch_body(name: str) -> None:
    model = written(name, "function")
    assert [node.op_type for node in model.graph if node.domain == DOMAIN] == [CALLS[name][0].function]
    check_on_ort(name, model)


HOWS = [(form, target) for form in ("native", "contrib") for target in ("portable", "ort")]
WITH_FORMS = [
    (name, *how)
    for at, name in enumerate(name for name, (operator, _, _) in CALLS.items() if operator.forms)
    for how in (HOWS[(at + at // 4) % 4],)
]
"""Calls of operators that have other bodies in some forms. Each call runs in one form; the forms alternate."""


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "form", "target"), dict.fromkeys(WITH_FORMS))
def test_body_of_a_form_equals_torch_body(name: str, form: str, target: str) -> None:
    operator, arguments, _ = CALLS[name]
    attributes = dict(
        zip(reversed(list(inspect.signature(operator.eager).parameters)), reversed(arguments), strict=False)
    )
    why, attends = None, operator in (custom_ops.attend, custom_ops.attend_cached, custom_ops.attend_shared)
    if attends:
        cache = {"attend": None, "attend_cached": "concat", "attend_shared": "shared"}[operator.name]
        why = unsupported_reason(form, target, AttentionCall(cache, attributes["softcap"] > 0, H, S == T))
    if why is not None:
        with pytest.raises(RequestError, match=re.escape(why.text)):
            written(name, form, target)
        return
    model = written(name, form, target)
    assert not model.functions
    assert not attends or "Softmax" not in {node.op_type for node in model.graph}
    check_on_ort(name, model)


OF_MANY = [
    name
    for name in CALLS
    if name.startswith(("difference", "contextual", "disentangled", "fire", "offset", "relative"))
]
"""Calls of operators with another implementation for many queries on ONNX Runtime."""


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", OF_MANY)
def test_the_way_for_many_queries_equals_torch_body(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posexport.custom_ops.operator.FEW", 1)
    check_on_ort(name, written(name, "decomposed", "ort"))


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("attend-", "relative", "alibi"))])
def test_a_cache_of_earlier_keys_changes_no_query(name: str) -> None:
    """The last queries with all keys give the last rows of the whole output. Caches rely on this."""
    operator, arguments, dims = CALLS[name]
    position = {id(argument): each for argument, each in zip(tensors(arguments), dims, strict=False)}
    full = []
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            full.append(argument)
            continue
        axis = next((axis for axis, dim in position[id(argument)].items() if dim == "seq"), None)
        full.append(argument if axis is None else torch.cat([argument.narrow(axis, 0, T - S), argument], axis))
    whole_made, cut = operator(*full), operator(*arguments)
    axis = 1 if operator is custom_ops.attend else 2
    torch.testing.assert_close(whole_made.narrow(axis, T - S, S), cut, atol=1e-5, rtol=0)


@pytest.mark.parametrize("queries", [1, 2])
def test_relative_is_as_exact_far_out_as_near(queries: int) -> None:
    """One query uses angles of distances. Several queries use angles of positions, which alone would be wrong by 0.06
    rad at 2^20. Both, and torch, are compared with the formula of the paper in float64."""
    keys, width = 40, 8
    at_keys = np.arange(2**20 - keys, 2**20)[None]
    frequencies = 10_000.0 ** (-np.arange(0, 1, 2 / width))
    given = [
        normal(1, queries, N * H),
        torch.from_numpy(at_keys[:, -queries:].copy()),
        torch.from_numpy(at_keys),
        normal(N, H),
        normal(N * H, width),
        torch.from_numpy(frequencies).float(),
    ]
    q, of_q, of_k, bias, proj, _ = (tensor.numpy().astype(np.float64) for tensor in given)
    angles = (of_q[0, :, None] - of_k[0])[..., None] * frequencies
    table = np.concatenate((np.sin(angles), np.cos(angles)), -1)
    heads = q.reshape(queries, N, H) + bias
    truth = np.einsum("snh,nhd,std->nst", heads, proj.reshape(N, H, width), table)[None] * 0.3
    np.testing.assert_allclose(custom_ops.relative_score(*given, scale=0.3).numpy(), truth, atol=2e-4)
    arguments, of_queries = [*given, None, 0.3], {1: "seq"} if queries > 1 else {}
    dims: list[dict[int, str]] = [of_queries, of_queries, {1: "total"}, {}, {}, {}]
    (made,) = outputs_on_ort(graph_of(custom_ops.relative_score, arguments, dims, "decomposed", "ort"), arguments)
    np.testing.assert_allclose(made, truth, atol=2e-4)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("ahead", [0, 9], ids=["keys behind", "a key ahead"])
def test_cosine_bias_is_that_of_the_paper(queries: int, ahead: int) -> None:
    """In float64, from the formula of the paper. On ONNX Runtime, one query with near keys uses angles of distances."""
    at_keys = np.arange(2**20 - 300, 2**20)[None]
    at_keys[:, 7] += ahead * 300
    frequencies = 10_000.0 ** (-np.arange(0, 1, 0.25))
    of_q, of_k = torch.from_numpy(at_keys[:, -queries:].copy()), torch.from_numpy(at_keys)
    given = [of_q, of_k, torch.tensor([0.5, 0.25]), torch.from_numpy(frequencies).float()]
    apart = at_keys[0, -queries:, None] - at_keys[0]
    truth = np.cos(apart[..., None] * frequencies).sum(-1) * np.array([0.5, 0.25])[:, None, None]
    np.testing.assert_allclose(custom_ops.cosine_bias(*given).numpy()[0], truth, atol=2e-4)
    of_queries = {1: "seq"} if queries > 1 else {}
    graph = graph_of(
        custom_ops.cosine_bias, [*given, None, False], [of_queries, {1: "total"}, {}, {}], "decomposed", "ort"
    )
    (made,) = outputs_on_ort(graph, [*given, None, False])
    np.testing.assert_allclose(made[0], truth, atol=2e-4)


LINEAR = [name for name in CALLS if name.startswith("linear")]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_is_that_of_the_papers(name: str) -> None:
    """In float64, from the formulas: S_t = S_{t-1} diag(a_t) (I - b_t k_t k_t^T) + b_t k_t v_t^T, o_t = S_t q_t."""
    operator, arguments, _ = CALLS[name]
    q, k, v, state, decay, beta = (None if a is None else a.double().numpy() for a in arguments)
    kept = np.ones((B, S, N)) if decay is None else np.exp(decay)
    kept = np.broadcast_to(kept.reshape(B, S, N, -1), (B, S, N, H))
    read = np.zeros((B, S, N, 3))
    for row, head in np.ndindex(B, N):
        known = state[row, head].T  # [value_dim, head_dim], as in the papers
        for at in range(S):
            query, key, value = (x.reshape(B, S, N, -1)[row, at, head] for x in (q, k, v))
            known = known @ np.diag(kept[row, at, head])
            if beta is None:
                known = known + np.outer(value, key)
            else:
                share = beta[row, at, head]
                known = known @ (np.eye(H) - share * np.outer(key, key)) + share * np.outer(value, key)
            read[row, at, head] = known @ query
        state[row, head] = known.T
    attended, present = operator(*arguments)
    np.testing.assert_allclose(attended.numpy(), read.reshape(B, S, -1), atol=1e-5)
    np.testing.assert_allclose(present.numpy(), state, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("form", ["decomposed", "contrib"])
def test_linear_attention_takes_one_token_and_many(name: str, form: str) -> None:
    operator, arguments, dims = CALLS[name]
    model = graph_of(operator, arguments, dims, form)
    expected = {"Scan"} if form == "decomposed" else {"LinearAttention"}
    assert {node.op_type for node in model.graph} & {"Scan", "LinearAttention"} == expected
    for count in (1, 70):
        more = [
            torch.cat([x] * count, 1)[:, :count] if isinstance(x, torch.Tensor) and x.dim() == 3 else x
            for x in arguments
        ]
        for output, tensor in zip(outputs_on_ort(model, more), operator(*more), strict=True):
            np.testing.assert_allclose(output, tensor.numpy(), atol=2e-5 * max(1.0, float(tensor.abs().max())), rtol=0)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_which_keys_a_query_sees(causal: bool, window: int) -> None:
    """Uniform weights over one-hot values show the mask itself."""
    zeros = torch.zeros(1, T, T)
    for bias in (None, torch.zeros(1, 1, T, T)):
        seen = (
            custom_ops.attend(zeros, zeros, torch.eye(T)[None], bias, None, None, 1, 1, 1.0, causal, window, 0, 0.0)[0]
            > 0
        )
        assert np.array_equal(seen.numpy(), oracles.visible(T, causal, window or None))


def test_no_function_is_named_like_an_operator_of_onnx() -> None:
    """A runtime may use its own operator of that name, whatever the domain (TensorRT does)."""
    standard = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    taken = standard | {
        "MultiHeadAttention",
        "GroupQueryAttention",
        "RelativePositionBias",
        "GatedRelativePositionBias",
    }
    names = [operator.function for operator in custom_ops.operators()]
    assert len(set(names)) == len(names)
    assert not taken & set(names)


def test_operators_are_registered_with_torch() -> None:
    for operator in custom_ops.operators():
        overload = operator.overload
        assert overload.name() == f"posexport::{operator.name}"
        assert getattr(custom_ops, operator.name) is operator
    with pytest.raises(AttributeError, match="no attribute 'rotat'"):
        custom_ops.rotat  # noqa: B018


def test_one_function_for_equal_calls_and_another_for_others() -> None:
    """Bodies are specialised for attributes: equal ones are shared, others get a number."""

    class Twice(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pairs = custom_ops.pair_features
            return pairs(a, b, True), pairs(b, a, True), pairs(a, b, False)

    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    made: ir.Model = export_module(
        Twice(),
        (normal(B, S, 3), normal(B, S, 4)[..., :3]),
        ({0: batch, 1: seq}, {0: batch, 1: seq}),
        input_names=("a", "b"),
        output_names=("x", "y", "z"),
        form="function",
    )
    assert [node.op_type for node in made.graph] == ["PairFeatures", "PairFeatures", "PairFeatures_2"]
    assert len(made.functions) == 2
