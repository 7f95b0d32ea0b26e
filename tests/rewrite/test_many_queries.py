"""Files for ONNX Runtime have a separate branch for many queries.

A rewrite is compared with this branch too. A fault in it is reported and not corrected silently.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import rewrite_helpers as helpers

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import seeded_weights


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers.in_process(monkeypatch)


def own_file(encoding: str, path: Path) -> Path:
    fields = {"hidden_size": 16, "num_heads": 2, "causal": True}
    spec = read_spec({"encoding": {"name": encoding}, **fields})
    write_onnx(export(spec, seeded_weights(spec, 0), form="decomposed", target="ort"), path)
    path.with_name(path.name + ".json").unlink()  # The manifest would reveal that the file was changed.
    return path


def with_other_softmax(path: Path) -> None:
    """Makes the softmax run over the queries, only in the branch for many queries."""

    def change(graph: onnx.GraphProto, many: bool) -> int:
        count = 0
        for node in graph.node:
            if many and node.op_type == "Softmax":
                del node.attribute[:]
                node.attribute.append(onnx.helper.make_attribute("axis", -2))
                count += 1
            for attribute in node.attribute:
                count += change(attribute.g, many or attribute.name == "else_branch")
        return count

    model = onnx.load(path)
    assert change(model.graph, False) == 1
    onnx.save(model, path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("encoding", ["none", "alibi"])
def test_a_fault_in_the_way_of_many_queries_stays(encoding: str, tmp_path: Path) -> None:
    path, out = own_file(encoding, tmp_path / "a.onnx"), tmp_path / "out.onnx"
    sound = helpers.rewritten(path, out, form="contrib", target="ort")
    assert [one["state"] for one in sound.attentions] == ["rewritten"]
    with_other_softmax(path)
    faulty = helpers.rewritten(path, tmp_path / "faulty.onnx", form="contrib", target="ort")
    assert [(one["state"], one["reason"]["code"]) for one in faulty.attentions] == [("kept", "whole-graph-differs")]
