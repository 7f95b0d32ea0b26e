"""Attention for ONNX Runtime only, which handles one head or some queries at a time with their bias logits. It is
compared with the same block for all targets, which handles everything at once. The contents of its graph are tested
too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from posexport.artifact.graph_file import read_graph
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.custom_ops.attention_by_head import LEAST
from posexport.custom_ops.by_head import Span
from posexport.export import export
from posexport.graphs.inspection import inspect_graph
from posexport.models import read_spec
from posexport.models.weights import seeded_weights
from posexport.rewrite.rewriter import rewrite_model
from posexport.runtimes import ort
from posexport.spec.spec import Spec

JOINED = [
    ("alibi", "data"),
    ("alibi", "consecutive"),
    ("alibi2d", "data"),
    ("kerple", "data"),
    ("sandwich", "data"),
    ("t5", "data"),
    ("t5", "consecutive"),
    ("swin", "data"),
    ("swin", "consecutive"),
    ("swinv2", "data"),
    ("relative", "data"),
    ("relative", "consecutive"),
    ("deberta", "data"),
    ("deberta", "consecutive"),
    ("cope", "data"),
    ("fire", "data"),
    ("fire", "consecutive"),
]
"""Encodings whose logits can be computed for one head at a time, or for some queries at a time, from their
positions."""

DIVIDED = [pair for pair in JOINED if pair[0] in ("alibi", "kerple", "sandwich", "t5", "cope", "fire", "relative")]
"""The encodings among these whose logits can be computed for some queries and only the keys visible to them."""

FEW, MANY = 5, 45


def block(encoding: str, positions: str = "data", **fields: Any) -> Spec:
    """A small block with an encoding."""
    grid = encoding in ("alibi2d", "swin", "swinv2")
    sizes = {"hidden_size": 32, "num_heads": 4, "causal": not grid, "positions": positions}
    return read_spec({"encoding": {"name": encoding}, **sizes, **fields})


def graphs(model: ir.Model) -> list[ir.Node]:
    return [*model.graph.all_nodes()]


def both(spec: Spec, folder: Path, other: str = "ort") -> list[Path]:
    """The file for all targets, and the file for ONNX Runtime (or TensorRT) only."""
    paths = []
    for target in ("portable", other):
        model = export(spec, seeded_weights(spec, 0), form="decomposed", target=target)
        assert ("Scan" in {node.op_type for node in graphs(model)}) == (target == "ort")
        paths.append(folder / f"{target}.onnx")
        write_onnx(model, paths[-1])
    return paths


def compared(spec: Spec, folder: Path, sizes: list[Sizes], other: str = "ort") -> None:
    runners = [ort.load(path, {"threads": 1}) for path in both(spec, folder, other)]
    for each in sizes:
        inputs = seeded_inputs(spec, each, 0)
        if "attention_mask" in inputs:  # hide the first keys of the last row, which hides all keys of a query
            inputs["attention_mask"][-1, :3] = 0
        expected, found = (runner.run(inputs) for runner in runners)
        for name, array in expected.items():
            wide, limit = array.astype(np.float64), 1e-2 if spec.dtype == "fp16" else 2e-6
            if spec.encoding.name in ("cope", "sandwich"):  # sums of hundreds of rounded gates, or of cosines
                limit *= 10
            assert found[name].shape == array.shape
            np.testing.assert_allclose(found[name], wide, atol=limit * max(1.0, float(np.abs(wide).max())), rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("encoding", "positions"), JOINED)
def test_one_head_after_the_other_is_the_same_as_all_at_once(encoding: str, positions: str, tmp_path: Path) -> None:
    lengths = [Sizes(batch=batch, seq=seq) for batch, seq in ((1, MANY), (3, 35), (2, FEW))]
    compared(block(encoding, positions), tmp_path, lengths)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache", ["concat", "shared"])
@pytest.mark.parametrize("encoding", ["alibi", "cope", "deberta", "fire", "relative", "t5"])
def test_behind_a_cache_with_padding(encoding: str, cache: str, tmp_path: Path) -> None:
    spec = block(encoding, kv_cache=cache, padding_mask=True)
    slots = {"max_seq": 64} if cache == "shared" else {}
    compared(spec, tmp_path, [Sizes(batch=2, seq=seq, past_seq=past, **slots) for seq, past in ((MANY, 7), (1, 20))])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "fields", [{"window": 9}, {"attention_chunk_size": 16}, {"num_kv_heads": 2}, {"dtype": "fp16"}]
)
@pytest.mark.parametrize("encoding", ["alibi", "cope", "fire"])
def test_other_masks_key_heads_and_dtypes(encoding: str, fields: dict[str, Any], tmp_path: Path) -> None:
    compared(block(encoding, **fields), tmp_path, [Sizes(batch=2, seq=MANY)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("encoding", "positions"), DIVIDED)
def test_blocks_of_queries_see_what_they_must(encoding: str, positions: str, tmp_path: Path) -> None:
    compared(block(encoding, positions), tmp_path, [Sizes(batch=1, seq=2 * LEAST + 9), Sizes(batch=2, seq=LEAST + 1)])


@pytest.mark.sampled(22)
@pytest.mark.parametrize("cache", ["concat", "shared"])
@pytest.mark.parametrize("fields", [{}, {"window": 70}, {"attention_chunk_size": 90}], ids=str)
@pytest.mark.parametrize(("encoding", "positions"), DIVIDED)
def test_blocks_of_queries_behind_a_cache(
    encoding: str, positions: str, fields: dict[str, Any], cache: str, tmp_path: Path
) -> None:
    spec = block(encoding, positions, kv_cache=cache, padding_mask=True, num_kv_heads=2, **fields)
    slots = {"max_seq": 400} if cache == "shared" else {}
    compared(spec, tmp_path, [Sizes(batch=2, seq=LEAST + 40, past_seq=33, **slots)])


def test_a_key_that_a_block_lacks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Span.of_keys

    def one_less(span: Span, op: Any, value: ir.Value, axis: int) -> ir.Value:
        made = taken(span, op, value, axis)
        return op.Concat(op.Slice(made, [0], [1], [axis]), op.Slice(made, [0], [-1], [axis]), axis=axis)

    monkeypatch.setattr(Span, "of_keys", one_less)
    with pytest.raises(AssertionError, match="Not equal"):
        compared(block("alibi", window=100), tmp_path, [Sizes(batch=1, seq=LEAST + 1)])


def _deepest(graph: ir.Graph, op_type: str, depth: int = 0) -> int:
    """The largest number of nested bodies around a node of this type; -1 if there is no such node."""
    found = [depth if any(node.op_type == op_type for node in graph) else -1]
    for node in graph:
        bodies = (each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH)
        found += [_deepest(body, op_type, depth + 1) for body in bodies]
    return max(found)


def test_a_query_without_keys_gets_zeros(tmp_path: Path) -> None:
    spec = block("alibi", padding_mask=True)
    _, path = both(spec, tmp_path)
    inputs = seeded_inputs(spec, Sizes(batch=2, seq=MANY), 0)
    inputs["attention_mask"][1, :4] = 0
    output = ort.load(path, {"threads": 1}).run(inputs)["output"]
    assert not output[1, :4].any()
    assert output[1, 4:].any(-1).all()
    assert np.isfinite(output).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("encoding", "positions"), JOINED)
def test_no_array_has_the_logits_of_all_heads_for_many_queries(encoding: str, positions: str) -> None:
    """All softmaxes are inside a body. One body handles few queries. The others handle one head or some queries at a
    time, in a Scan over rows. If blocks of queries lack keys, that Scan is inside a Scan over these blocks."""
    spec = block(encoding, positions)
    model = export(spec, seeded_weights(spec, 0), form="decomposed", target="ort")
    softmaxes = [node for node in graphs(model) if node.op_type == "Softmax"]
    assert len(softmaxes) == 2
    assert all(node.graph is not model.graph for node in softmaxes)
    divided = spec.causal and (encoding, positions) in DIVIDED
    assert _deepest(model.graph, "Softmax") == (4 if divided else 3)


@pytest.mark.parametrize("fields", [{"softcap": 30.0}, {"sinks": True}, {"layers": 2, "kv_cache": "concat"}])
def test_what_needs_all_heads_keeps_them(fields: dict[str, Any]) -> None:
    """Caps and sinks need all heads, and so does a bias that is computed once for several layers with caches."""
    spec = block("alibi", **fields)
    model = export(spec, seeded_weights(spec, 0), form="decomposed", target="ort")
    assert {node.graph for node in graphs(model) if node.op_type == "Softmax"} == {model.graph}


@pytest.mark.parametrize("encoding", ["cope", "alibi", "sandwich"])
def test_layers_without_caches_are_joined(encoding: str) -> None:
    """cope has logits of each layer. The others have one bias for all layers."""
    spec = block(encoding, layers=2)
    model = export(spec, seeded_weights(spec, 0), form="decomposed", target="ort")
    assert sum(node.op_type == "If" for node in model.graph) == 2
    assert all(node.graph is not model.graph for node in graphs(model) if node.op_type == "Softmax")


@pytest.mark.parametrize("encoding", ["alibi", "t5"])
def test_inspect_reads_the_way_of_few_queries(encoding: str, tmp_path: Path) -> None:
    _, path = both(block(encoding, "consecutive"), tmp_path)
    (found,) = inspect_graph(read_graph(path)).attentions
    assert found["encoding"]["name"] == encoding


def test_rewrite_reads_the_way_of_few_queries(tmp_path: Path) -> None:
    _, path = both(block("alibi"), tmp_path)
    (site,) = rewrite_model(ir.load(path), form="native").sites
    assert site.state == "rewritten"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fields", [{}, {"causal": False}, {"kv_cache": "concat"}, {"kv_cache": "shared"}])
def test_deberta_for_tensorrt_is_the_same(fields: dict[str, Any], tmp_path: Path) -> None:
    """TensorRT's graph looks distances up instead of shifting rows."""
    slots = {"max_seq": 64} if fields.get("kv_cache") == "shared" else {}
    past = {"past_seq": 7, **slots} if "kv_cache" in fields else {}
    compared(block("deberta", "consecutive", **fields), tmp_path, [Sizes(batch=2, seq=MANY, **past)], "tensorrt")
