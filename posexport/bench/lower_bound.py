"""The lower bound of a block's time: its matrix products bare, or the bytes that it must read, whichever takes longer.

On the CPU both are run. The products, with every operand at hand and nothing between them:

    X [rows, hidden] W_q, W_k, W_v;  C [rows, num_heads*head_dim] W_o;  the MLP's, in a transformer block
    Q K^T and P V for each key head: [group*seq, head_dim] [head_dim, keys] and [group*seq, keys] [keys, head_dim]

by torch (all heads at once, or one after another) or by ONNX Runtime, in the graph's dtype or in fp32, whichever is
fastest here, as warming up shows. Scores are whole rectangles, of as many keys as a query sees where a layer has a
window or chunks, and are written to memory between the two products: a kernel that skips masked keys, or keeps scores
in its registers, can be faster. The bytes are the weights and what is cached (of a layer with a window or chunks, what
is seen of it), in the graph's dtype, each read once; they bound decoding.

On a GPU it is the roofline (Williams, Waterman, Patterson, 2009): the larger of operations over the rate of one large
product and bytes over the rate of one large read, both measured in every run. What an encoding computes counts nowhere.
"""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, cycle, islice

import attrs
import numpy as np
import torch

from posexport.models.weights import TORCH_DTYPES
from posexport.runtimes.base import Arrays
from posexport.runtimes.torch_eager import timed
from posexport.spec.contract import graph_inputs, sizes_of
from posexport.spec.spec import Spec

DISTINCT = 2**29
"""Bytes of weights from which on layers share theirs: no cache holds so many, and a stack need not fit twice."""

SCORES = 2**30
"""The largest buffer of scores, in bytes; beyond, heads are taken one by one."""

PEAK_SIDE, PEAK_BYTES = 4096, 2**30
"""The side of the square product, and the size of the read, that tell a GPU's rates."""

_TRIALS, _SLOW = 5, 0.5
"""Runs by which the fastest method is found, and the seconds from which on one is enough."""

Timed = Callable[[], float]
"""A call that does the work once and returns its seconds."""


@attrs.frozen(kw_only=True)
class Work:
    """The products of one run: (rows, inner, columns) of the projections, which are those of every layer, and (heads,
    rows, head_dim, keys) of the attention of each layer; `bytes` is what must be read."""

    projections: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    bytes: int

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        projections = len(self.attention) * sum(map(math.prod, self.projections))
        return 2 * (projections + 2 * sum(map(math.prod, self.attention)))


def work(spec: Spec, sizes: Mapping[str, int]) -> Work:
    """What a block of `spec` must compute and read for inputs of `sizes`."""
    batch, seq, past = sizes["batch"], sizes["seq"], sizes.get("past_seq", 0)
    keys = sizes["encoder_seq"] if spec.cross else past + seq
    rows, key_rows = batch * seq, batch * sizes.get("encoder_seq", seq)
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = [(rows, spec.hidden_size, wide), *[(key_rows, spec.hidden_size, narrow)] * 2]
    projections.append((rows, wide, spec.hidden_size))
    if spec.mlp is not None:
        inner = spec.intermediate_size or 4 * spec.hidden_size
        up = len([name for name in spec.projections() if name.startswith("mlp.")]) - 1
        projections += [*[(rows, spec.hidden_size, inner)] * up, (rows, inner, spec.hidden_size)]
    weights = sum(inner * columns for _, inner, columns in projections)
    layers = list(islice(cycle(spec.distinct_layers()), spec.layers))
    heads, group = batch * spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    cached = 2 * heads * spec.head_dim * sum(_seen(layer, past) for layer in layers)
    return Work(
        projections=tuple(projections),
        attention=tuple((heads, group * seq, spec.head_dim, _keys(layer, keys, past, seq)) for layer in layers),
        bytes=getattr(torch, TORCH_DTYPES[spec.dtype]).itemsize * (spec.layers * weights + cached),
    )


def _seen(layer: Spec, past: int) -> int:
    """How many tokens of the cache the new ones see."""
    seen = past if layer.window is None else min(past, layer.window - 1)
    return seen if layer.attention_chunk_size is None else min(seen, past % layer.attention_chunk_size)


def _keys(layer: Spec, keys: int, past: int, seq: int) -> int:
    """The most keys that a query can see."""
    if layer.cross:
        return keys
    sides = 1 if layer.causal else 2
    window = keys if layer.window is None else sides * (layer.window - 1) + 1
    return min(keys, window, layer.attention_chunk_size or keys, _seen(layer, past) + seq)


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

    def prepare(self, inputs: Arrays) -> Timed:
        todo = work(self._spec, _sizes(self._spec, inputs))
        dtype = getattr(torch, TORCH_DTYPES[self._spec.dtype])
        if self._device.type == "cuda":
            self._method = "roofline"
            return _roofline(todo, dtype, self._device)
        makers: dict[str, Callable[[], Timed]] = {}
        for kind in dict.fromkeys((dtype, torch.float32)):
            name = str(kind).removeprefix("torch.")
            makers[f"products by torch, {name}"] = partial(_by_torch, todo, kind, False)
            makers[f"products by torch, {name}, a head at a time"] = partial(_by_torch, todo, kind, True)
            if kind != torch.bfloat16:  # onnxruntime has no such product on the CPU
                makers[f"products by onnxruntime, {name}"] = partial(_by_ort, todo, kind, self._threads)
        heads, rows, _, keys = max(todo.attention)
        if heads * rows * keys * dtype.itemsize > SCORES:
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


def _sizes(spec: Spec, inputs: Arrays) -> dict[str, int]:
    """The sizes of inputs by dimension; of a shared cache, what is in it before the run."""
    sizes = sizes_of(graph_inputs(spec), inputs)
    return sizes if spec.kv_cache != "shared" else {**sizes, "past_seq": int(inputs["write_indices"].max())}


def _fastest(makers: Mapping[str, Callable[[], Timed]]) -> tuple[float, str, Timed]:
    """(seconds, name, call) of the fastest, others forgotten; one that can't run here is left out while one can."""
    best: tuple[float, str, Timed] | None = None
    error = Exception("there is no method")
    for name, make in makers.items():
        try:
            call = make()
            seconds = call()
            if seconds < _SLOW:
                seconds = min(call() for _ in range(_TRIALS))
        except Exception as failure:  # such as no fp16 product: another method is the lower bound then
            error = failure
        else:
            if best is None or seconds < best[0]:
                best = (seconds, name, call)
    if best is None:
        raise error
    return best


def _layers(todo: Work, size: int) -> int:
    """How many layers have weights of their own."""
    one = size * sum(inner * columns for _, inner, columns in todo.projections)
    return max(1, min(len(todo.attention), DISTINCT // max(one, 1)))


def _by_torch(todo: Work, dtype: torch.dtype, one_by_one: bool) -> Timed:
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
        for layer, (*_, seen) in enumerate(todo.attention):
            for (m, k, n), weight in zip(todo.projections, weights[layer % count], strict=True):
                torch.mm(entries[m, k], weight, out=exits[m, n])
            key, value = (cache[:, :seen] for cache in caches[layer % count])
            for at in range(0, heads, step):
                part = slice(at, at + step)
                torch.bmm(query[part], key[part].transpose(1, 2), out=scores[seen])
                torch.bmm(scores[seen], value[part], out=context[part])

    return timed(call, torch.device("cpu"))


def _by_ort(todo: Work, dtype: torch.dtype, threads: int | None) -> Timed:
    """The same products as MatMul nodes of a graph, weights as initializers, values bound to memory."""
    import onnxruntime
    from onnx import numpy_helper, parser

    from posexport.runtimes import ort

    count = _layers(todo, dtype.itemsize)
    products: list[tuple[tuple[str, tuple[int, ...]], ...]] = []  # the name and the shape of both factors
    for layer, (heads, rows, width, keys) in enumerate(todo.attention):
        at = layer % count
        for index, (m, k, n) in enumerate(todo.projections):
            products.append(((f"x{m}x{k}", (m, k)), (f"w{at}_{index}", (k, n))))
        products.append((("q", (heads, rows, width)), (f"k{at}x{keys}", (heads, width, keys))))
        products.append(((f"p{keys}", (heads, rows, keys)), (f"v{at}x{keys}", (heads, keys, width))))
    factors = dict(chain.from_iterable(products))
    inputs = [name for name in factors if not name.startswith("w")]
    outputs = {f"y{index}": (*one[1][:-1], other[1][-1]) for index, (one, other) in enumerate(products)}
    kind, random = np.dtype("float16" if dtype == torch.float16 else "float32"), np.random.default_rng(0)
    onnx_kind = "float16" if dtype == torch.float16 else "float"

    def made(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
        return random.standard_normal(factors[name], dtype=np.float32).astype(kind)

    def declared(names: Iterable[str]) -> str:
        shapes = {name: ",".join(map(str, (factors | outputs)[name])) for name in names}
        return ", ".join(f"{onnx_kind}[{shape}] {name}" for name, shape in shapes.items())

    nodes = [f"{name} = MatMul({one[0]}, {other[0]})" for name, (one, other) in zip(outputs, products, strict=True)]
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
    for name, shape in outputs.items():  # outputs of one shape share one place
        binding.bind_ortvalue_output(name, places[shape])
    return timed(lambda: session.run_with_iobinding(binding), torch.device("cpu"))


def _by_sum(todo: Work) -> Timed:
    """Reading as many bytes as a run must, again and again: from a cache where they fit into one, as in the block."""
    buffer = torch.ones(max(todo.bytes // 4, 1))
    return timed(lambda: buffer.sum(), torch.device("cpu"))


def _by_vector(todo: Work) -> Timed:
    columns = 4096
    matrix, vector = torch.ones(max(todo.bytes // 4 // columns, 1), columns), torch.ones(columns)
    out = torch.empty(len(matrix))
    return timed(lambda: torch.mv(matrix, vector, out=out), torch.device("cpu"))


def _roofline(todo: Work, dtype: torch.dtype, device: torch.device) -> Timed:
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
