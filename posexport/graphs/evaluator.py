"""The evaluator of graphs (posexport.graphs.runner), described like a runtime: it runs in a worker of a pool."""

from __future__ import annotations

from posexport.runtimes import Runtime

EVALUATOR = Runtime("float64", "posexport's evaluator", "posexport.graphs.runner", "torch", "torch")
"""The evaluator of graphs. It is not one of the runtimes that are judged."""
