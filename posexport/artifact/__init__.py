"""Files on disk: the ONNX artifact, the plan, and the manifest beside each."""

from typing import TYPE_CHECKING

from posexport import public_names

if TYPE_CHECKING:
    from posexport.artifact.manifest import manifest_path as manifest_path
    from posexport.artifact.manifest import matches_manifest as matches_manifest
    from posexport.artifact.manifest import read_manifest as read_manifest
    from posexport.artifact.onnx_artifact import Artifact as Artifact
    from posexport.artifact.onnx_artifact import read_onnx as read_onnx
    from posexport.artifact.onnx_artifact import write_onnx as write_onnx

__getattr__ = public_names(
    __name__,
    {
        "manifest": ("manifest_path", "matches_manifest", "read_manifest"),
        "onnx_artifact": ("Artifact", "read_onnx", "write_onnx"),
    },
)
