"""The lower bound of a run's time: only its matrix products, or only reading its bytes, whichever takes longer.

On the CPU, both are run (posexport.bench.bare_products). Products have all operands ready and nothing between them.
They run in torch (all heads at once, or one after the other) or in ONNX Runtime, in the graph's dtype or in fp32. The
first runs show which method is the fastest. Scores are written to memory between the two products of attention. A
kernel that skips masked keys, or keeps scores in registers, can be faster. Each byte is read once, which bounds
decoding.

On a GPU, it is the roofline (Williams, Waterman, Patterson, 2009). This is the larger of operations over the rate of
one large product and bytes over the rate of one large read. Both rates are measured in every run.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping
from functools import partial

import torch

from posexport.bench.bare_products import Timed, by_ort, by_sum, by_torch, by_vector, roofline
from posexport.bench.work import Work, work_on
from posexport.models.weights import TORCH_DTYPES
from posexport.runtimes.base import Arrays
from posexport.spec.spec import Spec

SCORES = 2**30
"""The largest buffer of scores, in bytes. With larger scores, heads are computed one by one."""

_TRIALS, _SLOW = 5, 0.5
"""The runs that find the fastest method, and the seconds from which one run is enough."""


class LowerBoundRunner:
    """The lower bound of one file on one device.

    `work_on` returns what must be computed in `dtype` for inputs of `sizes`. `method` is the method that an earlier
    process chose, if any. The fastest method differs between processes, but a ratio to the lower bound must always mean
    the same.
    """

    def __init__(
        self, work_on: Callable[[Arrays, Mapping[str, int]], Work], dtype: str, device: str, threads: int | None
    ) -> None:
        self.method: str | None = None
        self.sizes: Mapping[str, int] = {}
        self._work_on, self._device, self._threads = work_on, torch.device(device), threads
        self._dtype = getattr(torch, TORCH_DTYPES[dtype])
        self._method = "not yet known"

    def run(self, inputs: Arrays) -> Arrays:
        raise NotImplementedError("the lower bound has no meaningful outputs")

    def prepare(self, inputs: Arrays) -> Timed:
        todo, dtype = self._work_on(inputs, self.sizes), self._dtype
        if self._device.type == "cuda":
            self._method = "roofline"
            return roofline(todo, dtype, self._device)
        makers: dict[str, Callable[[], Timed]] = {}
        for kind in dict.fromkeys((dtype, torch.float32)):
            name = str(kind).removeprefix("torch.")
            makers[f"products by torch, {name}"] = partial(by_torch, todo, kind, False)
            makers[f"products by torch, {name}, a head at a time"] = partial(by_torch, todo, kind, True)
            if kind in (torch.float32, torch.float16):  # onnxruntime has no product of bf16 on the CPU
                makers[f"products by onnxruntime, {name}"] = partial(by_ort, todo, kind, self._threads)
        scores = max((one.heads * one.rows * one.keys for one in todo.attentions), default=0)
        if scores * dtype.itemsize > SCORES:
            makers = {name: make for name, make in makers.items() if name.endswith("a head at a time")}
        readers = {"bytes by a sum": partial(by_sum, todo), "bytes by a product": partial(by_vector, todo)}
        made = None if self.method is None else (makers | readers).get(self.method)
        if made is not None:
            with contextlib.suppress(Exception):  # if this method can't run here, all methods are tried
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


def of_spec(spec: Spec, device: str, threads: int | None) -> LowerBoundRunner:
    """The lower bound of a block of posexport."""
    return LowerBoundRunner(lambda inputs, _: work_on(spec, inputs), spec.dtype, device, threads)


def _fastest(makers: Mapping[str, Callable[[], Timed]]) -> tuple[float, str, Timed]:
    """(seconds, name, call) of the fastest method. The others are released. Raises only if no method can run here."""
    best: tuple[float, str, Timed] | None = None
    error = Exception("there is no method")
    for name, make in makers.items():
        try:
            call = make()
            seconds = call()
            if seconds < _SLOW:
                seconds = min(call() for _ in range(_TRIALS))
        except Exception as failure:  # such as a missing fp16 product: another method is the lower bound then
            error = failure
        else:
            if best is None or seconds < best[0]:
                best = (seconds, name, call)
    if best is None:
        raise error
    return best
