"""Every operator's signature and docstring: they state the arguments of a call, and calls accept exactly these."""

from __future__ import annotations

import doctest
import inspect
import pydoc
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import run_ort
from operator_calls import CALLS, B, H, N, S, T, normal, whole
from torch import Tensor

from posexport import custom_ops
from posexport.custom_ops.arguments import CallError, related_sizes
from posexport.custom_ops.operator import Operator
from posexport.errors import RequestError
from posexport.export import export_module

OPERATORS: dict[str, Operator[..., Any]] = {operator.name: operator for operator in custom_ops.operators()}

named = pytest.mark.parametrize("name", OPERATORS)


def documented(operator: Operator[..., Any]) -> list[str]:
    """The parameters that a docstring names, in its order."""
    arguments = inspect.cleandoc(operator.__doc__ or "").split("\nArgs:\n")[1].split("\n\nReturns:\n")[0]
    return [name for line in re.findall(r"^ {4}([\w, ]+): ", arguments, re.MULTILINE) for name in line.split(", ")]


@named
def test_a_docstring_names_each_parameter_once(name: str) -> None:
    operator = OPERATORS[name]
    assert sorted(documented(operator)) == sorted(inspect.signature(operator).parameters)
    assert operator.__name__ == name


@named
def test_the_shape_and_dtype_of_each_tensor_are_known(name: str) -> None:
    """Frequencies of any shape are the only exception."""
    arguments = OPERATORS[name]._arguments
    ruled = {rule.name for rule in arguments._rules}
    assert {*arguments.tensors} - ruled == ({"short", "long"} if name == "length_frequencies" else set())


@named
def test_the_example_of_a_docstring_gives_what_it_shows(name: str) -> None:
    docstring = OPERATORS[name].__doc__ or ""
    example = doctest.DocTestParser().get_doctest(docstring, {"torch": torch, **OPERATORS}, name, None, 0)
    assert example.examples[-1].want
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0


@named
def test_help_shows_signature_and_docstring(name: str) -> None:
    text = pydoc.render_doc(OPERATORS[name], renderer=pydoc.plaintext)
    assert f"\n{name}{inspect.signature(OPERATORS[name])}\n" in text
    assert "Args:" in text


def test_defaults() -> None:
    shown = str(inspect.signature(custom_ops.attend)).replace("torch.", "")
    assert shown == (
        "(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, "
        "sinks: Tensor | None = None, num_heads: int = <required>, num_kv_heads: int = num_heads, "
        "scale: float = head_dim**-0.5, causal: bool = False, window: int = 0, chunk: int = 0, softcap: float = 0.0)"
        " -> Tensor"
    )


def as_list(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, tuple) else [made]


@pytest.mark.parametrize("call", CALLS)
def test_arguments_by_name_are_those_by_position(call: str) -> None:
    operator, arguments, _ = CALLS[call]
    by_name = dict(zip(inspect.signature(operator).parameters, arguments, strict=True))
    for one, other in zip(as_list(operator(*arguments)), as_list(operator(**by_name)), strict=True):
        assert torch.equal(one, other)


AT, SLOPES = whole(0, 9, B, S), torch.rand(N)
QS, KS, GROUPED = normal(B, S, N * H), normal(B, T, N * H), normal(B, T, 2 * H)
COS, PAST = normal(B, S, 3), normal(B, 2, T, H)
NEW = normal(B, S, 2 * H)
ops = custom_ops

LEFT_OUT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "attend": (
        lambda: ops.attend(QS, KS, KS, num_heads=N),
        lambda: ops.attend(QS, KS, KS, None, None, None, N, N, H**-0.5, False, 0, 0, 0.0),
    ),
    "attend, scale as torch's": (
        lambda: ops.attend(QS, GROUPED, GROUPED, num_heads=N, num_kv_heads=2, scale=None),  # type: ignore[arg-type]
        lambda: ops.attend(QS, GROUPED, GROUPED, None, None, None, N, 2, H**-0.5, False, 0, 0, 0.0),
    ),
    "attend_cached": (
        lambda: ops.attend_cached(QS, NEW, NEW, PAST, PAST, num_heads=N, num_kv_heads=2),
        lambda: ops.attend_cached(QS, NEW, NEW, PAST, PAST, None, None, None, N, 2, H**-0.5, False, 0, 0, 0.0),
    ),
    "cached_keys": (lambda: ops.cached_keys(PAST, NEW), lambda: ops.cached_keys(PAST, NEW, None, 2)),
    "key_positions": (lambda: ops.key_positions(AT, PAST), lambda: ops.key_positions(AT, PAST, None, None)),
    "rotate": (lambda: ops.rotate(QS, COS, COS, H), lambda: ops.rotate(QS, COS, COS, H, False, [3])),
    "linear_attention": (
        lambda: ops.linear_attention(QS, QS, QS, normal(B, N, H, H)),
        lambda: ops.linear_attention(QS, QS, QS, normal(B, N, H, H), None, None),
    ),
    "head_norm": (lambda: ops.head_norm(QS, normal(H)), lambda: ops.head_norm(QS, normal(H), H, 1e-6)),
    "cosine_heads": (lambda: ops.cosine_heads(QS, head_dim=H), lambda: ops.cosine_heads(QS, None, H)),
    "sinusoids": (lambda: ops.sinusoids(AT, COS[0, 0]), lambda: ops.sinusoids(AT, COS[0, 0], 1.0)),
    "ntk_frequencies": (
        lambda: ops.ntk_frequencies(AT, COS[0, 0], 100.0, 4.0, 4),
        lambda: ops.ntk_frequencies(AT, COS[0, 0], 100.0, 4.0, 4, 6),
    ),
    "grid_sinusoids": (
        lambda: ops.grid_sinusoids(whole(0, 9, B, S, 2), normal(2, 3)),
        lambda: ops.grid_sinusoids(whole(0, 9, B, S, 2), normal(2, 3), [], 0),
    ),
    "pair_features": (lambda: ops.pair_features(COS, COS), lambda: ops.pair_features(COS, COS, False)),
    "alibi_bias": (lambda: ops.alibi_bias(AT, AT, SLOPES), lambda: ops.alibi_bias(AT, AT, SLOPES, SLOPES)),
    "relative_score": (
        lambda: ops.relative_score(QS, AT, AT, normal(N, H), normal(N * H, 6), COS[0, 0]),
        lambda: ops.relative_score(QS, AT, AT, normal(N, H), normal(N * H, 6), COS[0, 0], None, H**-0.5),
    ),
    "offset_score": (
        lambda: ops.offset_score(QS, AT, AT, normal(6, H), 2, 3),
        lambda: ops.offset_score(QS, AT, AT, normal(6, H), 2, 3, H**-0.5),
    ),
    "contextual_score": (
        lambda: ops.contextual_score(QS, KS, pos_emb=normal(H, 4), num_heads=N),
        lambda: ops.contextual_score(QS, KS, None, None, normal(H, 4), N, N, H**-0.5, False, 0, 0),
    ),
}
"""A call with defaults, and the same call with all arguments."""


@pytest.mark.parametrize("call", LEFT_OUT)
def test_what_is_left_out_is_the_default(call: str) -> None:
    short, whole_call = (as_list(make()) for make in LEFT_OUT[call])
    for one, other in zip(short, whole_call, strict=True):
        torch.testing.assert_close(one, other)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (
        lambda: ops.attend(QS.unflatten(-1, (N, H)), KS, KS, num_heads=N),
        "attend: q has shape [2, 5, 4, 6]: it must be [B, S, num_heads*head_dim].",
    ),
    "heads": (
        lambda: ops.attend(QS, KS, KS, num_heads=5),
        "attend: q has shape [2, 5, 24]: it must be [B, S, num_heads*head_dim], and num_heads is 5, which doesn't "
        "divide 24.",
    ),
    "key heads": (
        lambda: ops.attend(QS, KS, KS, num_heads=N, num_kv_heads=2),
        "attend: k has shape [2, 8, 24]: it must be [B, T, num_kv_heads*head_dim], and num_kv_heads*head_dim is 12.",
    ),
    "groups": (
        lambda: ops.attend(QS, *(normal(B, T, 3 * H),) * 2, num_heads=N, num_kv_heads=3),
        "num_heads is 4 and num_kv_heads 3: each key head serves the same number of query heads, so give a "
        "num_kv_heads that divides num_heads.",
    ),
    "no heads": (
        lambda: ops.attend(QS, KS, KS, num_heads=0),
        "attend: q has shape [2, 5, 24]: it must be [B, S, num_heads*head_dim], and num_heads is 0, which doesn't "
        "divide 24.",
    ),
    "window": (
        lambda: ops.attend(QS, KS, KS, num_heads=N, window=-1),
        "window is -1 and chunk 0: each is 0 for none, or more.",
    ),
    "length": (
        lambda: ops.attend(QS, KS, KS[:, 1:], num_heads=N),
        "attend: v has shape [2, 7, 24]: it must be [B, T, num_kv_heads*head_dim], and T is 8.",
    ),
    "batch": (
        lambda: ops.rotate(QS, COS[:1], COS[:1], H),
        "rotate: cos has shape [1, 5, 3]: it must be [B, S, P] or [B, S, heads, P], and B is 2.",
    ),
    "one of two shapes": (
        lambda: ops.sinusoids(whole(0, 9, B, S, 2), normal(3)),
        "sinusoids: frequencies has shape [3]: of [P] or [axes, P], it must be the one that the other tensors have.",
    ),
    "mask of truth values": (
        lambda: ops.attend(QS, KS, KS, mask=torch.ones(B, T, dtype=torch.bool), num_heads=N),
        "attend: mask is torch.bool: it must be torch.int64, so convert it.",
    ),
    "mixed dtypes": (
        lambda: ops.attend(QS, KS.half(), KS, num_heads=N),
        "attend: k is torch.float16 beside torch.float32: both must have the same dtype, so convert one.",
    ),
    "bias in half precision": (
        lambda: ops.attend(*(t.half() for t in (QS, KS, KS, normal(1, N, S, T))), num_heads=N),
        "attend: bias is torch.float16: it must be torch.float32, so convert it.",
    ),
    "angles in half precision": (
        lambda: ops.sinusoids(AT, COS[0, 0].half()),
        "sinusoids: frequencies is torch.float16: it must be torch.float32, so convert it.",
    ),
    "features that are whole numbers": (
        lambda: ops.head_norm(AT[..., None], head_dim=1),
        "head_norm: x is torch.int64: it must be floating-point, so convert it.",
    ),
    "no tensor": (
        lambda: ops.head_norm(QS, 1.5),  # type: ignore[arg-type]
        "head_norm: weight is 1.5: it must be a tensor [head_dim].",
    ),
    "rates": (
        lambda: ops.linear_attention(QS, QS, QS, normal(B, N, H, H), normal(B, S, 3)),
        f"linear_attention: decay has 3 rates: give one for each of {N} heads, or of {N * H} features of keys.",
    ),
    "no number": (
        lambda: ops.attend(QS, KS, KS, num_heads="4"),  # type: ignore[arg-type]
        "attend: num_heads is '4': it must be a whole number.",
    ),
    "runs": (
        lambda: ops.rotate(QS, COS, COS, H, False, [1, 1]),
        "rotate: runs are [1, 1], whose sum must be the number of pairs, 3.",
    ),
    "pairs": (lambda: ops.rotate(QS, COS, COS, 4), "rotate: 3 pairs don't fit into a head_dim of 4."),
    "rows of a table": (
        lambda: ops.offset_score(QS, AT, AT, normal(5, H), 2, 3),
        "offset_score: table has shape [5, 6]: it must be [behind + ahead + 1, head_dim], and behind + ahead + 1 is 6.",
    ),
    "norm of other heads": (
        lambda: ops.head_norm(QS, normal(5)),
        "head_norm: x has shape [2, 5, 24]: it must be [B, S, heads*head_dim], and head_dim is 5, which doesn't divide "
        "24.",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_call_is_refused_in_one_sentence(mistake: str) -> None:
    make, sentence = WRONG[mistake]
    for kind in (CallError, RequestError, ValueError, TypeError):
        with pytest.raises(kind) as caught:
            make()
        assert str(caught.value) == sentence


def test_missing_and_unknown_arguments_are_those_of_any_function() -> None:
    for make, said in (
        (lambda: ops.attend(QS, KS, KS), "attend() needs num_heads"),
        (lambda: ops.rotate(QS, COS, COS), "rotate() needs head_dim"),
        (lambda: ops.head_norm(QS), "head_norm() needs head_dim"),
        (lambda: ops.offset_values(QS, KS, table=normal(6, H), num_heads=N), "offset_values() needs q_positions"),
        (lambda: ops.attend(QS, KS, KS, heads=N), "got an unexpected keyword argument 'heads'"),
        (lambda: ops.attend(QS, KS, KS, q=QS), "multiple values for argument 'q'"),
        (lambda: ops.add_head_bias(QS, QS, QS), "too many positional arguments"),
    ):
        with pytest.raises(TypeError, match=re.escape(said)):
            make()


def test_the_docstring_decides() -> None:
    """A planted fault: with another docstring, the same calls are accepted or refused differently."""

    def body(x: Tensor, table: Tensor, heads: int = 2) -> Tensor:
        """x.

        Args:
            x: [B, S, heads*width].
            table: int64 [2*heads + 1, width].
        """
        return x

    sound = Operator(body, "Planted", ("y",), None)
    sound(normal(1, 3, 8), whole(0, 1, 5, 4))
    for x, table, said in (
        (normal(1, 3, 7), whole(0, 1, 5, 4), "doesn't divide 7"),
        (normal(1, 3, 8), whole(0, 1, 4, 4), "2*heads + 1 is 5"),
        (normal(1, 3, 8), whole(0, 1, 5, 3), "width is 4"),
        (normal(1, 3, 8), normal(5, 4), "torch.int64"),
    ):
        with pytest.raises(CallError, match=re.escape(said)):
            sound(x, table)
    body.__name__, body.__doc__ = "body_without_shapes", "Nothing."
    Operator(body, "Planted", ("y",), None)(normal(1, 3, 7), normal(5, 4))


class Model(torch.nn.Module):
    """Attention with RoPE and ALiBi, 2 heads of 8, called with names and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** (-torch.arange(4.0) / 4))
        self.register_buffer("slopes", torch.tensor([0.5, 0.1]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        cos, sin = ops.sinusoids(positions=positions, frequencies=self.frequencies)
        q, k = (ops.rotate(x, cos=cos, sin=sin, head_dim=8) for x in (q, k))
        bias = ops.alibi_bias(positions, k_positions=positions, slopes=self.slopes)
        return ops.attend(q, k, v, bias=bias, num_heads=2, causal=True)


def tokens(batch: int, seq: int) -> tuple[Tensor, ...]:
    return *(normal(batch, seq, 16) for _ in "qkv"), torch.arange(seq).expand(batch, seq)


@pytest.mark.parametrize("strict", [False, True])
def test_calls_by_name_in_an_exported_program(strict: bool) -> None:
    """Every argument is in the graph. If torch chooses the dynamic dimensions, batch and length are dynamic, each as
    one size."""
    auto = torch.export.Dim.AUTO if not strict else None
    named_dims = torch.export.Dim("batch"), torch.export.Dim("seq")
    dims = [({0: auto, 1: auto, 2: auto},) * 3 + ({0: auto, 1: auto},), ({0: named_dims[0], 1: named_dims[1]},) * 4]
    with nullcontext() if strict else related_sizes():
        program = torch.export.export(Model(), tokens(2, 5), dynamic_shapes=dims[strict], strict=strict)
    calls = [node for node in program.graph.nodes if "posexport" in str(node.target)]
    assert [str(node.target).split(".")[1] for node in calls] == [
        "sinusoids",
        "rotate",
        "rotate",
        "alibi_bias",
        "attend",
    ]
    assert calls[-1].args[6:] == (2, 2, 8**-0.5, True, 0, 0, 0.0)
    assert not any(node.kwargs for node in calls)
    shapes = {node.name: node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"}
    assert shapes["q"] == shapes["v"]
    assert shapes["positions"] == shapes["q"][:2]
    assert [str(size).isdigit() for size in shapes["q"]] == [False, False, True]
    given = tokens(3, 9)
    torch.testing.assert_close(program.module()(*given), Model()(*given))


@pytest.mark.slow
def test_calls_by_name_in_an_onnx_graph_and_in_a_compiled_module() -> None:
    module, given = Model().eval(), tokens(2, 5)
    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    names = ("q", "k", "v", "positions")
    model = export_module(module, given, ({0: batch, 1: seq},) * 4, input_names=names, output_names=("y",))
    more = tokens(3, 9)
    made = run_ort(model, dict(zip(names, (tensor.numpy() for tensor in more), strict=True)))["y"]
    torch.testing.assert_close(torch.from_numpy(made), module(*more), atol=1e-5, rtol=0)
    for dynamic in (False, True):
        compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="eager")
        for inputs in (given, more):
            assert torch.equal(compiled(*inputs), module(*inputs))


def test_a_mistake_in_an_export_is_refused_in_the_same_words() -> None:
    class Wrong(Model):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
            return ops.attend(q, k, v, num_heads=3)

    names = ("q", "k", "v", "positions")
    with pytest.raises(RequestError, match=r"^attend: q has shape .*, and num_heads is 3, which doesn't divide 16\.$"):
        export_module(Wrong(), tokens(2, 5), ({},) * 4, input_names=names, output_names=("y",))


@pytest.mark.parametrize(("form", "target"), [("decomposed", "portable"), ("native", "portable"), ("contrib", "ort")])
def test_a_bias_without_batch_or_heads(form: str, target: str) -> None:
    """A bias `[1, 1, S, T]`, as distances give it."""

    class Biased(torch.nn.Module):
        def forward(self, q: Tensor, bias: Tensor) -> Tensor:
            return ops.attend(q, q, q, bias=bias, num_heads=2, causal=True)

    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    example = (normal(2, 5, 16), normal(1, 1, 5, 5))
    dims = ({0: batch, 1: seq}, {2: seq, 3: seq})
    options = {"input_names": ("q", "bias"), "output_names": ("y",), "form": form, "target": target}
    model = export_module(Biased(), example, dims, **options)  # type: ignore[arg-type]
    given = (normal(3, 9, 16), normal(1, 1, 9, 9))
    made = run_ort(model, {"q": given[0].numpy(), "bias": given[1].numpy()})["y"]
    torch.testing.assert_close(torch.from_numpy(made), Biased()(*given), atol=1e-5, rtol=0)
