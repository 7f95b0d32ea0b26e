"""The evaluator of graphs (posexport.graphs.runner) as a row of runtimes: it runs in a worker of a pool."""

from __future__ import annotations

from posexport.runtimes import Runtime

EVALUATOR = Runtime("float64", "posexport's evaluator", "posexport.graphs.runner", "torch", "torch")
"""What evaluates graphs; not among the runtimes that are judged."""
