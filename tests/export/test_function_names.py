"""Names in function bodies: ONNX Runtime inlines functions, and then each name must be unique."""

from __future__ import annotations

import itertools
from collections import Counter

import onnx_ir as ir
import pytest
from helpers import open_ort, small_spec, weights_for

from posexport.export import export
from posexport.models import ENCODINGS
from posexport.spec.forms import TARGETS

OF_KEYS = [name for name, kind in ENCODINGS.items() if kind.axes < 2]


def names_of(function: ir.Function) -> Counter[str]:
    """How often a function assigns each name, including branches and loops."""
    nodes = [*function.all_nodes()]
    graphs = {id(node.graph): node.graph for node in nodes if node.graph is not None}
    inputs = {id(value): value for graph in graphs.values() for value in graph.inputs}
    inputs |= {id(value): value for value in function.inputs}
    made = (value for node in nodes for value in node.outputs)
    return Counter(str(value.name) for value in (*inputs.values(), *made))


@pytest.mark.sampled(21)
@pytest.mark.parametrize(("encoding", "cache", "target"), [*itertools.product(OF_KEYS, ["concat", "shared"], TARGETS)])
def test_a_name_is_given_once(encoding: str, cache: str, target: str) -> None:
    spec = small_spec(encoding, causal=True, kv_cache=cache)
    model = export(spec, weights_for(spec), form="function", target=target)
    for function in model.functions.values():
        assert {name for name, count in names_of(function).items() if count > 1} == set(), function.name


def test_a_name_in_a_branch_that_comes_again_behind_it() -> None:
    """A node after a branch must not assign a name of the branch again: ONNX Runtime refuses such a file."""
    spec = small_spec("deberta", kv_cache="concat")
    assert callable(open_ort(export(spec, weights_for(spec), form="function", target="ort")))
