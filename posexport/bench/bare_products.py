"""Run only the matrix products of a run (posexport.bench.work), by torch or ONNX Runtime, or only read its bytes.

Each function returns a call that does the work once and returns its seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import torch

from posexport.bench.work import Work
from posexport.runtimes.torch_eager import timed

DISTINCT = 2**29
"""Bytes of weights above which layers share them. No cache holds so many, and a stack needn't fit into memory twice."""

PEAK_SIDE, PEAK_BYTES = 4096, 2**30
"""The side of the square product, and the bytes of the read, that measure a GPU's rates."""

Timed = Callable[[], float]
"""A call that does the work once and returns its seconds."""

T = TypeVar("T")


class _Operands(Generic[T]):
    """Second operands by shape. Each has its own memory until all take DISTINCT bytes. Then they are reused in turn."""

    def __init__(self, make: Callable[[tuple[int, ...]], T], itemsize: int) -> None:
        self._make, self._itemsize, self._taken = make, itemsize, 0
        self._made: dict[tuple[int, ...], list[T]] = {}
        self._asked = Counter[tuple[int, ...]]()

    def next(self, *shape: int) -> T:
        """Return the next operand of this shape."""
        made = self._made.setdefault(shape, [])
        self._asked[shape] += 1
        if made and self._taken >= DISTINCT:
            return made[self._asked[shape] % len(made)]
        self._taken += self._itemsize * math.prod(shape)
        made.append(self._make(shape))
        return made[-1]


def by_torch(todo: Work, dtype: torch.dtype, one_by_one: bool) -> Timed:
    """Products in torch, written into existing buffers. With `one_by_one`, heads are computed one after the other."""

    def some(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).to(dtype)

    buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def shared(what: str, *shape: int) -> torch.Tensor:
        return buffers.setdefault((what, *shape), some(shape))

    def turned(shape: tuple[int, ...]) -> torch.Tensor:  # stored like the weights of Linear
        return some((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)

    weights, cached = _Operands(turned, dtype.itemsize), _Operands(some, dtype.itemsize)
    calls: list[Callable[[], object]] = []
    for layer in todo.layers:
        for one in layer.products:
            many = () if one.count == 1 else (one.count,)
            calls.append(
                _product(
                    shared("x", *many, one.rows, one.inner),
                    weights.next(*many, one.inner, one.columns),
                    shared("y", *many, one.rows, one.columns),
                )
            )
        if (heads := layer.attention) is not None:
            count, step = heads.heads, 1 if one_by_one else heads.heads
            key = cached.next(count, heads.keys, heads.head_dim).transpose(1, 2)
            value = cached.next(count, heads.keys, heads.value_dim)
            query = shared("x", count, heads.rows, heads.head_dim)
            context = shared("y", count, heads.rows, heads.value_dim)
            scores = shared("p", step, heads.rows, heads.keys)
            for at in range(0, count, step):
                part = slice(at, at + step)
                calls.append(_product(query[part], key[part], scores))
                calls.append(_product(scores, value[part], context[part]))

    def call() -> None:
        for one in calls:
            one()

    return timed(call, torch.device("cpu"))


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    product = torch.mm if left.dim() == 2 else torch.bmm
    return lambda: product(left, right, out=out)


def by_ort(todo: Work, dtype: torch.dtype, threads: int | None) -> Timed:
    """The same products as MatMul nodes of a graph. Weights are initializers, and values are bound to memory."""
    import onnxruntime
    from onnx import numpy_helper, parser

    from posexport.runtimes import ort

    factors: dict[str, tuple[int, ...]] = {}
    products: list[tuple[str, str]] = []

    def named(kind: str) -> Callable[[tuple[int, ...]], str]:
        def name(shape: tuple[int, ...]) -> str:
            name = f"{kind}{len(factors)}"
            factors[name] = shape
            return name

        return name

    def shared(kind: str, *shape: int) -> str:
        name = f"{kind}{'x'.join(map(str, shape))}"
        factors[name] = shape
        return name

    weights, cached = _Operands(named("w"), dtype.itemsize), _Operands(named("k"), dtype.itemsize)
    for layer in todo.layers:
        for one in layer.products:
            many = () if one.count == 1 else (one.count,)
            products.append((shared("x", *many, one.rows, one.inner), weights.next(*many, one.inner, one.columns)))
        if (heads := layer.attention) is not None:
            count, rows, keys = heads.heads, heads.rows, heads.keys
            products.append((shared("x", count, rows, heads.head_dim), cached.next(count, heads.head_dim, keys)))
            products.append((shared("p", count, rows, keys), cached.next(count, keys, heads.value_dim)))
    inputs = [name for name in factors if not name.startswith("w")]
    outputs = {f"y{at}": (*factors[one][:-1], factors[other][-1]) for at, (one, other) in enumerate(products)}
    kind, random = np.dtype("float16" if dtype == torch.float16 else "float32"), np.random.default_rng(0)
    onnx_kind = "float16" if dtype == torch.float16 else "float"

    def made(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
        return random.standard_normal(factors[name], dtype=np.float32).astype(kind)

    def declared(names: Iterable[str]) -> str:
        shapes = {name: ",".join(map(str, (factors | outputs)[name])) for name in names}
        return ", ".join(f"{onnx_kind}[{shape}] {name}" for name, shape in shapes.items())

    nodes = [f"{name} = MatMul({one}, {other})" for name, (one, other) in zip(outputs, products, strict=True)]
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]>'
        f"lower_bound ({declared(inputs)}) => ({declared(outputs)}) {{{' '.join(nodes)}}}"
    )
    model.graph.initializer.extend(numpy_helper.from_array(made(name), name) for name in factors if name[0] == "w")
    data, providers = model.SerializeToString(), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(data, ort.session_options(threads), providers=providers)
    binding, value = session.io_binding(), onnxruntime.OrtValue
    for name in inputs:
        binding.bind_ortvalue_input(name, value.ortvalue_from_numpy(made(name)))
    places = {shape: value.ortvalue_from_shape_and_type(shape, kind.type) for shape in outputs.values()}
    for name, shape in outputs.items():  # outputs of the same shape share memory
        binding.bind_ortvalue_output(name, places[shape])
    return timed(lambda: session.run_with_iobinding(binding), torch.device("cpu"))


def by_sum(todo: Work) -> Timed:
    """Read the bytes of a run again and again. They come from a cache if they fit into one, as in the block."""
    buffer = torch.ones(max(todo.bytes // 4, 1))
    return timed(lambda: buffer.sum(), torch.device("cpu"))


def by_vector(todo: Work) -> Timed:
    """Read the same bytes by a product with a vector."""
    columns = 4096
    matrix, vector = torch.ones(max(todo.bytes // 4 // columns, 1), columns), torch.ones(columns)
    out = torch.empty(len(matrix))
    return timed(lambda: torch.mv(matrix, vector, out=out), torch.device("cpu"))


def roofline(todo: Work, dtype: torch.dtype, device: torch.device) -> Timed:
    """Seconds of the roofline, from one large product and one large read that each call measures."""
    side, size = PEAK_SIDE, PEAK_BYTES
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out, buffer = torch.empty_like(one), torch.ones(size // 4, device=device)
    product = timed(lambda: torch.mm(one, other, out=out), device)
    read = timed(lambda: buffer.sum(), device)

    def once() -> float:
        compute = todo.operations * product() / (2 * side**3)
        return max(compute, todo.bytes * read() / size)

    return once
