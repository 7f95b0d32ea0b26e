"""Models that read the states between their layers, such as backbones, are traced with all layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from tiny_models import session

transformers: Any = pytest.importorskip("transformers")

from posexport.artifact import write_onnx  # noqa: E402
from posexport.export.layer_copies import TRACE_DOMAIN  # noqa: E402
from posexport.export.layer_kinds import Layers, LayersDifferError  # noqa: E402
from posexport.export.repeated_layers import END, without_markers  # noqa: E402
from posexport.export.whole_model import HowToExport, export_whole  # noqa: E402
from posexport.models.pretrained import open_pretrained  # noqa: E402

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "image_size": 8, "patch_size": 4, "mlp_ratio": 2}


def test_the_stages_of_a_backbone(tmp_path: Path) -> None:
    """Traced with one layer of four, DINOv2 had no such stages: the message was "tuple index out of range"."""
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**SIZES, num_hidden_layers=4, out_features=["stage2", "stage4"])
    model = transformers.Dinov2Backbone(config).eval()
    model.save_pretrained(tmp_path / "backbone")
    (exported,) = export_whole(open_pretrained(tmp_path / "backbone"), HowToExport(form="native"))
    write_onnx(exported.model, tmp_path / "model.onnx")
    assert len(exported.attentions) == 4
    image = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        wanted = model(pixel_values=image).feature_maps
    made = session(tmp_path / "model.onnx").run(None, {"pixel_values": image.numpy()})
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=1e-5)


@pytest.mark.parametrize("reader", ["", "Neg", "Shape", "output"])
def test_states_between_layers_are_read_by_layers_only(reader: str) -> None:
    """If something else read them, it would read the states after another layer in the file."""
    given = ir.val("x", ir.DataType.FLOAT, [2])
    nodes: list[ir.Node] = []

    def add(kind: str, value: ir.Value, **options: Any) -> ir.Value:
        nodes.append(ir.node(kind, [value], **options))
        return nodes[-1].outputs[0]

    def marked(value: ir.Value, layer: int) -> ir.Value:
        return add("Enter", value, domain=TRACE_DOMAIN, attributes={"layer": layer})

    state = add("Tanh", marked(given, 0))
    outputs = [marked(add("Relu", marked(state, 2)), END)]
    if reader == "output":
        outputs.append(state)
    elif reader:
        outputs.append(add(reader, state))
    model = ir.Model(ir.Graph([given], outputs, nodes=nodes, opset_imports={"": 23, TRACE_DOMAIN: 1}), ir_version=10)
    layers = Layers("layers", (0, 0, 2))
    if reader in ("", "Shape"):
        assert {*without_markers(model, layers).enter} == {0, 2}
    else:
        with pytest.raises(LayersDifferError, match="the states between two layers, is read outside"):
            without_markers(model, layers)
