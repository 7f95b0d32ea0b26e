"""The description that posexport gives of the attention of a graph."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from posexport.graphs.attention.describe import KEYS, Describer
from posexport.graphs.attention.origins import call_sites
from posexport.graphs.view import view_of


def described(model: onnx.ModelProto) -> dict[str, Any]:
    """The description of the only attention of a graph."""
    inner = ir.from_proto(model)
    sites = call_sites(inner)
    view = view_of(inner)
    (one,) = view.attentions
    found = Describer(view, sites).describe(one)
    assert tuple(found) == KEYS
    return found
