"""Latency: timing artifacts beside torch, comparing with earlier results, and tuning."""

from typing import TYPE_CHECKING

from posexport import public_names

if TYPE_CHECKING:
    from posexport.bench.benchmark import bench as bench
    from posexport.bench.result import Benchmark as Benchmark

__getattr__ = public_names(__name__, {"benchmark": ("bench",), "result": ("Benchmark",)})
