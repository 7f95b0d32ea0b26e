"""The lower bound of a block's time: its matrix products bare, or the bytes that it must read, whichever takes longer.

On the CPU both are run. The products, with every operand at hand and nothing between them:

    X [rows, hidden] W_q, W_k, W_v;  C [rows, num_heads*head_dim] W_o;  the MLP's, in a transformer block
    Q K^T and P V for each key head: [group*seq, head_dim] [head_dim, keys] and [group*seq, keys] [keys, head_dim]

by torch (all heads at once, or one after another) or by ONNX Runtime, in the graph's dtype or in fp32, whichever is
fastest here, as warming up shows. Scores are whole rectangles, of as many keys as a query
sees where a layer has a window or chunks, and are written to memory between the two products: a kernel that skips
masked keys, or keeps scores in its registers, can be faster. The bytes are the weights and what is cached (of a layer
with a window or chunks, what is seen of it), in the graph's dtype, each read once; they bound decoding.

On a GPU the lower bound is the roofline (Williams, Waterman, Patterson, 2009): the larger of operations over the rate
of one large product and bytes over the rate of one large read, both measured anew in every run. What an encoding itself
computes counts nowhere.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from posexport.artifact.onnx_artifact import read_onnx
from posexport.machine import kept_to
from posexport.models.weights import TORCH_DTYPES
from posexport.runtimes.base import Arrays
from posexport.runtimes.torch_eager import timed
from posexport.spec.spec import Spec

DISTINCT = 2**29
"""Bytes of weights from which on layers share theirs: no cache holds so many, and a stack need not fit twice."""

SCORES = 2**30
"""The largest buffer of scores, in bytes; beyond, heads are taken one by one."""

PEAK_SIDE, PEAK_BYTES = 4096, 2**30
"""The side of the square product, and the size of the read, that tell a GPU's rates."""

_TRIALS, _SLOW = 5, 0.5
"""Runs by which the fastest method is found, and the seconds from which on one is enough."""


@attrs.frozen(kw_only=True)
class Work:
    """The products of one run: (rows, inner, columns) of the projections of each layer, and (heads, rows, head_dim,
    keys) of its attention, those of the layers in turn; `bytes` is what must be read."""

    projections: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    layers: int
    bytes: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        scores = sum(2 * math.prod(self.attention_of(layer)) for layer in range(self.layers))
        return 2 * (self.layers * sum(m * k * n for m, k, n in self.projections) + scores)

    def attention_of(self, layer: int) -> tuple[int, int, int, int]:
        """The attention of one layer."""
        return self.attention[layer % len(self.attention)]


def work(spec: Spec, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> Work:
    """What a block of `spec` must compute and read for `inputs` (their shapes count) of `sizes`."""
    batch, seq, past = sizes["batch"], sizes["seq"], sizes.get("past_seq", 0)
    keys = sizes["encoder_seq"] if spec.cross else past + seq
    rows, key_rows = batch * seq, batch * (sizes["encoder_seq"] if spec.cross else seq)
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = [(rows, spec.hidden_size, wide), *[(key_rows, spec.hidden_size, narrow)] * 2]
    projections.append((rows, wide, spec.hidden_size))
    if spec.mlp is not None:
        inner = spec.intermediate_size or 4 * spec.hidden_size
        up = len([name for name in spec.projections() if name.startswith("mlp.")]) - 1
        projections += [*[(rows, spec.hidden_size, inner)] * up, (rows, inner, spec.hidden_size)]
    weights = sum(inner * columns for _, inner, columns in projections)
    kinds = spec.distinct_layers()
    seen = sum(_seen(kinds[layer % len(kinds)], past) for layer in range(spec.layers))
    cached = 2 * batch * spec.num_kv_heads * seen * spec.head_dim
    size = torch.finfo(getattr(torch, TORCH_DTYPES[spec.dtype])).bits // 8
    group = spec.num_heads // spec.num_kv_heads
    return Work(
        projections=tuple(projections),
        attention=tuple(
            (batch * spec.num_kv_heads, group * seq, spec.head_dim, _keys(kind, keys, past, seq)) for kind in kinds
        ),
        layers=spec.layers,
        bytes=size * (spec.layers * weights + cached),
    )


def _seen(kind: Spec, past: int) -> int:
    """How many tokens of the cache the new ones see."""
    seen = past if kind.window is None else min(past, kind.window - 1)
    return seen if kind.attention_chunk_size is None else min(seen, past % kind.attention_chunk_size)


def _keys(kind: Spec, keys: int, past: int, seq: int) -> int:
    """The most keys that a query can see."""
    if kind.cross:
        return keys
    sides = 1 if kind.causal else 2
    window = keys if kind.window is None else sides * (kind.window - 1) + 1
    return min(keys, window, kind.attention_chunk_size or keys, _seen(kind, past) + seq)


class LowerBoundRunner:
    """The lower bound of one block on one device.

    `method` is how it is run, where an earlier process chose one: processes differ in which method is the fastest, and
    a ratio to the lower bound is to mean one thing.
    """

    def __init__(self, spec: Spec, device: str, threads: int | None) -> None:
        self.method: str | None = None
        self._spec, self._device, self._threads = spec, torch.device(device), threads
        self._method = "not yet known"

    def run(self, inputs: Arrays) -> Arrays:
        raise NotImplementedError("the lower bound computes nothing of use")

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        todo = work(self._spec, inputs, _sizes(self._spec, inputs))
        dtype = getattr(torch, TORCH_DTYPES[self._spec.dtype])
        if self._device.type == "cuda":
            self._method = "roofline"
            return _roofline(todo, dtype, self._device)
        makers: dict[str, Callable[[], Callable[[], float]]] = {}
        for kind in dict.fromkeys((dtype, torch.float32)):
            name = str(kind).removeprefix("torch.")
            makers[f"products by torch, {name}"] = partial(_by_torch, todo, kind, False)
            makers[f"products by torch, {name}, a head at a time"] = partial(_by_torch, todo, kind, True)
            if kind != torch.bfloat16:  # onnxruntime has no such product on the CPU
                makers[f"products by onnxruntime, {name}"] = partial(_by_ort, todo, kind, self._threads)
        if _scores(todo, dtype) > SCORES:
            makers = {name: make for name, make in makers.items() if name.endswith("a head at a time")}
        readers = {"bytes by a sum": partial(_by_sum, todo), "bytes by a product": partial(_by_vector, todo)}
        made = None if self.method is None else (makers | readers).get(self.method)
        if made is not None:
            with contextlib.suppress(Exception):  # what can't run here is left out, as it is where all are tried
                call = made()
                call()
                self._method = str(self.method)
                return call
        _, self._method, call = max(_fastest(makers), _fastest(readers), key=lambda method: method[0])
        return call

    def describe(self) -> dict[str, str]:
        cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if cuda else f"CPU ({platform.machine()})"
        return {"engine": "lower_bound", "version": str(torch.__version__), "device": name, "method": self._method}


def load(path: Path, device: str, threads: int | None) -> LowerBoundRunner:
    """The lower bound of the block of the `.onnx` artifact at `path`; raises what reading it raises."""
    return LowerBoundRunner(read_onnx(path).spec, device, threads)


def _sizes(spec: Spec, inputs: Arrays) -> dict[str, int]:
    """The sizes of inputs by dimension; of a shared cache, what is in it before the run."""
    first = inputs["hidden_states" if spec.vocab_size is None else "input_ids"]
    sizes = {"batch": first.shape[0], "seq": first.shape[1]}
    if spec.cross:
        sizes["encoder_seq"] = inputs["encoder_hidden_states"].shape[1]
    if spec.kv_cache == "shared":
        sizes["past_seq"] = int(inputs["write_indices"].max())
    elif spec.kv_cache is not None:
        sizes["past_seq"] = next(array for name, array in inputs.items() if name.startswith("past_key")).shape[2]
    return sizes


def _fastest(makers: Mapping[str, Callable[[], Callable[[], float]]]) -> tuple[float, str, Callable[[], float]]:
    """(seconds, name, call) of the fastest, others forgotten; one that can't run here is left out while one can."""
    best: tuple[float, str, Callable[[], float]] | None = None
    error: Exception | None = None
    for name, make in makers.items():
        try:
            call = make()
            seconds = call()
            if seconds < _SLOW:
                seconds = min(call() for _ in range(_TRIALS))
        except Exception as failure:  # such as no fp16 product: another method is the lower bound then
            error = failure
            continue
        if best is None or seconds < best[0]:
            best = (seconds, name, call)
    if best is None:
        assert error is not None
        raise error
    return best


def _scores(todo: Work, dtype: torch.dtype) -> int:
    heads, rows, _, keys = max(todo.attention)
    return heads * rows * keys * torch.finfo(dtype).bits // 8


def _layers(todo: Work, size: int) -> int:
    """How many layers have weights of their own."""
    one = size * sum(inner * columns for _, inner, columns in todo.projections)
    return max(1, min(todo.layers, DISTINCT // max(one, 1)))


def _by_torch(todo: Work, dtype: torch.dtype, one_by_one: bool) -> Callable[[], float]:
    """Products in torch, into buffers that are there."""
    heads, rows, width, keys = max(todo.attention)
    step = 1 if one_by_one else heads

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).to(dtype)

    entries = {(m, k): some(m, k) for m, k, _ in todo.projections}
    exits = {(m, n): torch.empty(m, n, dtype=dtype) for m, _, n in todo.projections}
    count = _layers(todo, dtype.itemsize)
    weights = [[some(n, k).T for _, k, n in todo.projections] for _ in range(count)]  # as Linear holds them
    caches = [(some(heads, keys, width), some(heads, keys, width)) for _ in range(count)]
    query, context = some(heads, rows, width), torch.empty(heads, rows, width, dtype=dtype)
    scores = {keys: some(step, rows, keys) for *_, keys in todo.attention}

    def call() -> None:
        for layer in range(todo.layers):
            for (m, k, n), weight in zip(todo.projections, weights[layer % count], strict=True):
                torch.mm(entries[m, k], weight, out=exits[m, n])
            seen = todo.attention_of(layer)[-1]
            key, value = (cache[:, :seen] for cache in caches[layer % count])
            for at in range(0, heads, step):
                part = slice(at, at + step)
                torch.bmm(query[part], key[part].transpose(1, 2), out=scores[seen])
                torch.bmm(scores[seen], value[part], out=context[part])

    return timed(call, torch.device("cpu"))


def _by_ort(todo: Work, dtype: torch.dtype, threads: int | None) -> Callable[[], float]:
    """The same products as MatMul nodes of a graph, weights as initializers, values bound to memory."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    kind = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.FLOAT
    random = np.random.default_rng(0)
    bound: dict[str, Any] = {}
    nodes: list[Any] = []
    weights: list[Any] = []
    values: dict[str, list[Any]] = {"in": [], "out": []}

    def entry(name: str, *shape: int) -> str:
        if name not in bound:
            array = random.standard_normal(shape, dtype=np.float32).astype(helper.tensor_dtype_to_np_dtype(kind))
            bound[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            values["in"].append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def product(one: str, other: str, *shape: int) -> None:
        name = f"y{len(nodes)}"
        nodes.append(helper.make_node("MatMul", [one, other], [name]))
        values["out"].append(helper.make_tensor_value_info(name, kind, shape))
        same = str(shape)  # outputs of one shape share one place
        if same not in bound:
            bound[same] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                shape, np.float16 if kind == TensorProto.FLOAT16 else np.float32
            )
        bound[name] = bound[same]

    count = _layers(todo, dtype.itemsize)
    for layer in range(todo.layers):
        for index, (m, k, n) in enumerate(todo.projections):
            name = f"w{layer % count}.{index}"
            if layer < count:
                array = random.standard_normal((k, n), dtype=np.float32).astype(helper.tensor_dtype_to_np_dtype(kind))
                weights.append(numpy_helper.from_array(array, name))
            product(entry(f"x{m}x{k}", m, k), name, m, n)
        heads, rows, width, keys = todo.attention_of(layer)
        place = f"{layer % count}x{keys}"
        product(entry("q", heads, rows, width), entry(f"k{place}", heads, width, keys), heads, rows, keys)
        product(entry(f"p{keys}", heads, rows, keys), entry(f"v{place}", heads, keys, width), heads, rows, width)
    graph = helper.make_graph(nodes, "lower_bound", values["in"], values["out"], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = int(threads or kept_to())  # as posexport.runtimes.ort does
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, bound[value.name])
    for value in session.get_outputs():
        binding.bind_ortvalue_output(value.name, bound[value.name])

    def once() -> float:
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        return time.perf_counter() - start

    return once


def _by_sum(todo: Work) -> Callable[[], float]:
    """Reading as many bytes as a run must, again and again: from a cache where they fit into one, as in the block."""
    buffer = torch.ones(max(todo.bytes // 4, 1))
    return timed(lambda: buffer.sum(), torch.device("cpu"))


def _by_vector(todo: Work) -> Callable[[], float]:
    columns = 4096
    matrix, vector = torch.ones(max(todo.bytes // 4 // columns, 1), columns), torch.ones(columns)
    out = torch.empty(len(matrix))
    return timed(lambda: torch.mv(matrix, vector, out=out), torch.device("cpu"))


def _roofline(todo: Work, dtype: torch.dtype, device: torch.device) -> Callable[[], float]:
    """Seconds of the roofline, from one large product and one large read in the same run."""
    side, size = PEAK_SIDE, PEAK_BYTES
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out, buffer = torch.empty_like(one), torch.ones(size // 4, device=device)
    product = timed(lambda: torch.mm(one, other, out=out), device)
    read = timed(lambda: buffer.sum(), device)

    def once() -> float:
        compute = todo.operations * product() / (2 * side**3)
        return max(compute, todo.bytes * read() / size)

    return once
