"""The source of a plan: an artifact of posexport, or any other ONNX file with its attention and its shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.loaded import check_source, load_sound
from posexport.artifact.manifest import OnnxManifest, PlanManifest
from posexport.artifact.onnx_artifact import Artifact, ForeignFileError
from posexport.artifact.signing import TrustedKey
from posexport.errors import Reason, RequestError
from posexport.graphs.inspection import Inspection, inspect_graph
from posexport.graphs.shape_profiles import graph_profiles, named_shapes
from posexport.progress import Progress
from posexport.runtimes.tensorrt.builder import Shapes
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.spec.contract import Shape


@attrs.frozen(kw_only=True)
class CompileSource:
    """An ONNX file to build, and its manifest.

    For a file that posexport didn't write, `shapes` are what its plan takes, and `found` is what the inspection found.
    """

    graph: GraphFile
    manifest: OnnxManifest | PlanManifest | None
    shapes: Shapes | None = None
    found: Inspection | None = None

    @property
    def artifact(self) -> Artifact | None:
        """The file as an artifact of posexport, if it is one."""
        return self.graph if isinstance(self.graph, Artifact) else None

    @property
    def attentions(self) -> tuple[Mapping[str, Any], ...]:
        """The attentions of a file that posexport didn't write, as data."""
        return () if self.found is None else self.found.attentions

    @property
    def unknown(self) -> Reason | None:
        """Why attention was not looked for in a file that posexport didn't write."""
        return None if self.found is None else self.found.reason

    def inputs(self) -> dict[str, tuple[Shape, str]]:
        """The inputs, with the names of dimensions that `--profile` takes."""
        inputs = self.graph.inputs()
        if self.found is None:
            return inputs
        named = named_shapes({name: shape for name, (shape, _) in inputs.items()}, self.found)
        return {name: (named[name], dtype) for name, (_, dtype) in inputs.items()}


def compile_source(
    path: Path,
    options: BuildOptions,
    progress: Progress,
    trusted: Sequence[TrustedKey] = (),
    roles: Mapping[str, str] | None = None,
) -> CompileSource:
    """Read the source of a plan at `path`; raises the errors of `posexport.export.compile.compile_plan`.

    `roles` of inputs are for files that posexport didn't write.
    """
    try:
        loaded = load_sound(path, trusted)
    except ForeignFileError as error:
        if not error.is_graph:
            raise  # an artifact that lost some of its metadata
        graph = error.graph
    else:
        if roles:
            raise RequestError("--input was given with an artifact of posexport, whose inputs are known: drop it.")
        return CompileSource(graph=loaded.source, manifest=loaded.manifest)
    manifest = check_source(graph, trusted)
    found = inspect_graph(graph, roles, progress)
    inputs = {name: shape for name, (shape, _) in graph.inputs().items()}
    shapes = Shapes(
        profiles=graph_profiles(inputs, found, options.profile),
        dimensions={name: [*shape] for name, shape in named_shapes(inputs, found).items()},
        attentions=len(found.attentions),
    )
    return CompileSource(graph=graph, manifest=manifest, shapes=shapes, found=found)
