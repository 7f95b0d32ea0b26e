"""An export of a module in a Python file of the user: finds its example inputs, then exports and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.export.graph_options import GraphOptions, graph_options
from posexport.progress import Progress, silent
from posexport.spec.fields import stated, text

if TYPE_CHECKING:
    from posexport.artifact.manifest import OnnxManifest
    from posexport.artifact.signing import SigningKey
    from posexport.export.modules import ExportedModule


@attrs.frozen(kw_only=True)
class ModuleOptions(GraphOptions):
    """Options of the export of `module`, FILE.py:NAME; `example` is a .npz of inputs by parameter."""

    module: str = text(None, "FILE.py:NAME")
    example: str | None = text(None, "a .npz of inputs")

    @property
    def path(self) -> Path:
        """The file to write."""
        return Path(f"{self.module.rpartition(':')[2]}.onnx" if self.output is None else self.output)


def module_options(given: Mapping[str, Any]) -> ModuleOptions:
    """The options of a command line, of which None and () are not given; RequestError for what a module decides."""
    return graph_options(ModuleOptions, stated(given), "was given with --module: the module decides it, so drop it.")


def write_module(
    options: ModuleOptions, progress: Progress = silent, key: SigningKey | None = None
) -> tuple[ExportedModule, OnnxManifest]:
    """Run the file, export the module and write the graph with its manifest, which is signed if there is a `key`.

    RequestError for whatever goes wrong in the file, with its line.
    """
    progress("loading torch")
    from posexport.artifact.manifest import ModuleSource
    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.export.modules import export_any
    from posexport.runtimes.module_file import load_module
    from posexport.runtimes.npz import read_arrays
    from posexport.runtimes.tensors import to_tensors

    progress("running the file")
    user = load_module(options.module)
    if options.example is not None:
        example = to_tensors(read_arrays(Path(options.example), "--example"))
    elif (example := user.setting("example_inputs")) is None:
        raise RequestError(
            f"{options.module!r} has no example inputs: write a function example_inputs that returns them, or give "
            "--example inputs.npz."
        )
    shapes, names = user.setting("dynamic_shapes"), user.setting("output_names")
    with user.running("exporting"):
        exported = export_any(
            user.module,
            example,
            shapes,
            output_names=names,
            form=options.form,
            target=options.target,
            opset=options.opset,
            source=ModuleSource(name=user.name, file=user.path.name, sha256=user.sha256),
            progress=progress,
        )
    progress(f"writing {options.path.name}")
    return exported, write_onnx(exported.model, options.path, key=key)
