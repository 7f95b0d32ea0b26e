"""How a benchmark times an ONNX file of another tool: inputs are drawn by role, at sizes by their meaning.

The file has no spec that says what it computes. Its lower bound is that of the products in the file
(posexport.bench.graph_work). It can be timed beside torch only if the user gives a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.loaded import bytes_mismatch
from posexport.artifact.manifest import OnnxManifest, read_manifest_of
from posexport.bench.graph_sizes import GraphSizes
from posexport.bench.scenarios import Scenario
from posexport.bench.shapes import Sizes
from posexport.errors import located
from posexport.graphs.axes import SLOTS
from posexport.graphs.load import ir_of
from posexport.graphs.roles import Role, values_of_model
from posexport.graphs.sizes import fitted, shape_of
from posexport.graphs.told_roles import told_roles
from posexport.jsondata import unstructure
from posexport.runtimes import ORT, TENSORRT, Runtime
from posexport.spec.contract import Values
from posexport.verify.graph.subject import main_dtype


@attrs.frozen(kw_only=True)
class TimedGraph:
    """A posexport.bench.timed_file.TimedFile.

    If posexport rewrote the file, `form` is the form in which it did, and `origin` is the sha256 of the original file.
    Otherwise both are None.
    """

    graph: GraphFile
    roles: Mapping[str, Role]
    inputs: Values
    outputs: Values
    dtype: str
    form: str | None = None
    origin: str | None = None
    warnings: tuple[str, ...] = ()

    required_runtime = None
    no_torch = "the file has no spec of posexport that says what it computes"

    @property
    def path(self) -> Path:
        """The file."""
        return self.graph.path

    @property
    def source(self) -> Path:
        """The same file."""
        return self.graph.path

    @property
    def spec(self) -> Mapping[str, Any]:
        """Empty, because the file has no spec."""
        return {}

    @property
    def _sizes(self) -> GraphSizes:
        return GraphSizes(file=self.path.name, roles=self.roles)

    def facts(self) -> dict[str, Any]:
        """What is known without a spec."""
        return {
            "file": self.path.name,
            "sha256": self.graph.sha256,
            "encoding": None,
            "form": self.form,
            "opset": self.graph.opset,
            "dtype": self.dtype,
            "spec": {},
            "origin": self.origin,
            "no_torch": self.no_torch,
        }

    def default_sizes(self) -> list[Sizes]:
        """A prefill and a step if there is a cache, otherwise two lengths."""
        return self._sizes.defaults()

    def read_sizes(self, text: str) -> Sizes:
        """Sizes by the names of the contract, by meaning, or by the names of the file."""
        return self._sizes.read(text)

    def scenario_sizes(self, scenario: Scenario) -> Sizes:
        """The sizes of a scenario."""
        return self._sizes.scenario(scenario)

    def sizes_like(self, sizes: Sizes) -> Sizes:
        """The sizes of another file for the dimensions that this one has too. The others are defaults."""
        return self._sizes.like(sizes)

    def request(self, sizes: Sizes) -> dict[str, Any]:
        """The roles, and sizes by meaning."""
        return {"roles": unstructure(list(self.roles.values())), **self._sizes.asked(sizes)}

    def work_request(self, sizes: Sequence[Sizes]) -> dict[str, Any] | None:
        """The roles, the dtype, and sizes by meaning."""
        return {
            "roles": unstructure(list(self.roles.values())),
            "dtype": self.dtype,
            "requests": [self._sizes.asked(one) for one in sizes],
        }

    def engine_options(self, runtime: Runtime, sizes: Sequence[Sizes]) -> dict[str, Any]:
        """Buffers that are written in place. For a plan that is built on the fly, the shapes that it spans."""
        if runtime.module == ORT:
            shared = self._written_in_place()
            return {"shared": shared} if shared else {}
        if runtime.module != TENSORRT:
            return {}
        every = [fitted(self.roles, self._sizes.asked(one)) for one in sizes]
        requests = []
        for name, role in self.roles.items():
            if any(isinstance(dim, str) for dim in role.shape):
                columns = list(zip(*(shape_of(role, one) for one in every), strict=True))
                spans = ([min(column) for column in columns], [max(column) for column in columns])
                least, most = ("x".join(map(str, shape)) for shape in spans)
                requests.append(f"{name}={least},{most},{most}")
        return {"profile": requests}

    def _written_in_place(self) -> dict[str, str]:
        """Each output that is an input buffer with new rows written into it, and that input, by name."""
        pairs = {}
        for name, (shape, _) in self.outputs.items():
            for past in (name.replace("present", before) for before in ("past", "past_key_values")):
                role = self.roles.get(past)
                if past != name and role is not None and SLOTS in role.axes and shape == role.shape:
                    pairs[name] = past
        return pairs


def timed_graph(graph: GraphFile, roles: Mapping[str, str]) -> TimedGraph:
    """The file that was read, with `roles` of inputs that the user knows. Names of other inputs are ignored.

    RequestError for an input whose role can't be guessed, and for a manifest that can't be read.
    """
    model = ir_of(graph)
    inputs = values_of_model(value for value in model.graph.inputs if not value.is_initializer())
    manifest = read_manifest_of(OnnxManifest, graph.path)
    warnings: tuple[str, ...] = ()
    reason = None if manifest is None else bytes_mismatch(graph, manifest)
    if reason is not None:
        warnings, manifest = (f"{graph.path}: {reason}",), None
    rewrite = None if manifest is None else manifest.rewrite
    with located(repr(str(graph.path))):
        known = told_roles(graph, {name: role for name, role in roles.items() if name in inputs})
    return TimedGraph(
        graph=graph,
        roles=known,
        inputs=inputs,
        outputs=values_of_model(model.graph.outputs),
        dtype=main_dtype(graph.model, inputs),
        form=manifest.form if manifest is not None and rewrite is not None and rewrite.changed else None,
        origin=None if rewrite is None else rewrite.source.sha256,
        warnings=warnings,
    )
