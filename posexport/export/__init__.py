"""Writes files: an ONNX graph from a block, a plan from an ONNX file, a model repository for Triton."""

from typing import TYPE_CHECKING

from posexport import public_names

if TYPE_CHECKING:
    from posexport.export.exporter import DOMAIN as DOMAIN
    from posexport.export.exporter import export as export
    from posexport.export.modules import export_module as export_module

__getattr__ = public_names(__name__, {"exporter": ("DOMAIN", "export"), "modules": ("export_module",)})
