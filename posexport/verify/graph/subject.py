"""One ONNX file that anyone wrote, with what verify needs: inputs by role, dtypes, operators, size of weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import onnx
import onnx_ir as ir

from posexport.artifact.authenticity import signature_of, weights_of
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.loaded import check_manifest
from posexport.artifact.manifest import OnnxManifest, read_manifest_of
from posexport.artifact.signing import TrustedKey
from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.errors import Reason, RequestError
from posexport.graphs.load import ir_of
from posexport.graphs.node_arguments import ROUNDING
from posexport.graphs.roles import Role, values_of_model
from posexport.graphs.told_roles import told_roles
from posexport.runtimes.wide_outputs import widths
from posexport.spec.contract import Values

_FLOATS = {1: ("fp32", 4), 10: ("fp16", 2), 16: ("bf16", 2), 11: ("fp64", 8)}

LARGE = 256 * 2**20
"""From this many bytes of weights on, one process at a time has a file open, and cases are evaluated together."""

STANDARD = ("", "ai.onnx", "ai.onnx.ml")
"""The operator domains that every runtime has."""


@attrs.frozen(kw_only=True)
class GraphSubject:
    """A file, read and checked.

    `dtype` is that of most of its weights, `weight_count` the number of their values. `is_quantised` is true if
    features are rounded to whole numbers, `is_routed` if tokens may go to experts. `foreign_domains` are operator
    domains that are neither standard nor defined by functions of the file. `bounded` has the outputs of operators such
    as Sigmoid or Softmax, with the type of the operator: runtimes compute these to a certain number of digits of 1, or
    of the largest value.
    """

    graph: GraphFile
    dtype: str
    weight_count: int
    weight_bytes: int
    foreign_domains: tuple[str, ...]
    has_attention: bool
    is_quantised: bool
    is_routed: bool
    bounded: Mapping[str, str]
    inputs: Values
    outputs: Values
    weights: Reason
    signature: Reason

    @property
    def path(self) -> Path:
        """The file."""
        return self.graph.path

    @property
    def is_large(self) -> bool:
        """Whether its weights take much memory and are slow to read."""
        return self.weight_bytes > LARGE

    @property
    def wide(self) -> dict[str, int]:
        """The columns of outputs of which only a few are compared if there are many tokens.

        Outputs of a softmax need all columns, since their largest value is their scale.
        """
        return {name: width for name, width in widths(self.outputs).items() if name not in self.bounded}

    def roles(self, given: Mapping[str, str] | None = None) -> dict[str, Role]:
        """The roles of its inputs; RequestError for an input whose role can't be guessed."""
        try:
            return told_roles(self.graph, given)
        except RequestError as error:
            raise RequestError(f"{str(self.path)!r}: {error}") from None


def read_subject(graph: GraphFile, trusted: Sequence[TrustedKey] = ()) -> GraphSubject:
    """What verify needs of a file.

    RequestError if the manifest beside it can't be used. MismatchError if the manifest describes another file, or if
    none of the `trusted` keys signed it.
    """
    manifest = check_manifest(graph, trusted)
    model = ir_of(graph)
    tensors = list(_tensors(graph.model))
    inputs = values_of_model(value for value in model.graph.inputs if not value.is_initializer())
    return GraphSubject(
        graph=graph,
        dtype=main_dtype(graph.model, inputs),
        weight_count=sum(math.prod(tensor.dims) for tensor in tensors),
        weight_bytes=sum(map(_bytes, tensors)),
        foreign_domains=_foreign_domains(model),
        has_attention=any(node.op_type == "Attention" for node in model.graph.all_nodes()),
        is_quantised=any(node.op_type in ROUNDING for node in model.graph.all_nodes()),
        is_routed=any(node.op_type in _CHOICES for node in model.graph.all_nodes()),
        bounded={str(value.name): kind for value in model.graph.outputs if (kind := _bounded_by(value))},
        inputs=inputs,
        outputs=values_of_model(model.graph.outputs),
        weights=weights_of(manifest, mismatch=None),
        signature=signature_of(manifest, bool(trusted)),
    )


def read_file(path: Path, trusted: Sequence[TrustedKey] = ()) -> GraphFile:
    """An ONNX file; RequestError for any other file.

    MismatchError, before the file is parsed, if none of the `trusted` keys signed its manifest.
    """
    if path.suffix != ".onnx":
        raise RequestError(f"{str(path)!r} is no .onnx: give an ONNX file.")
    if trusted:
        read_manifest_of(OnnxManifest, path, trusted)
    return read_with_weights_on_disk(path)


def main_dtype(model: onnx.ModelProto, inputs: Values) -> str:
    """The dtype of most weights; without weights, that of the first floating-point input, else fp32."""
    counts: Counter[int] = Counter()
    for tensor in _tensors(model):
        if tensor.data_type in _FLOATS and len(tensor.dims) > 1:
            counts[tensor.data_type] += math.prod(tensor.dims)
    if counts:
        return _FLOATS[counts.most_common(1)[0][0]][0]
    floats = [dtype for _, dtype in inputs.values() if dtype in ("fp32", "fp16", "bf16", "fp64")]
    return floats[0] if floats else "fp32"


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The weights that nodes of a graph read, and the values of its Constant nodes."""
    read = set(_names_read(model.graph))
    yield from (tensor for tensor in model.graph.initializer if tensor.name in read)
    for node in model.graph.node:
        yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """The names that nodes of a graph and of its subgraphs read, and the names of its outputs."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names_read(inner)


def _bytes(tensor: onnx.TensorProto) -> int:
    return int(math.prod(tensor.dims)) * _FLOATS.get(tensor.data_type, ("", 8))[1]


_CHOICES = {"TopK", "ArgMax", "ArgMin"}
"""Operators that choose the largest of several numbers, as routers do."""

_BOUNDED = ("Sigmoid", "Softmax", "Tanh", "HardSigmoid", "Erf", "Softsign")
_CARRIED = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Flatten", "Slice", "Gather", "Concat")


def _bounded_by(value: ir.Value) -> str:
    """The type of the operator of _BOUNDED that a value comes from; empty if there is none.

    The value may be cast or moved after it.
    """
    for _ in range(16):
        node = value.producer()
        if node is None or not node.inputs or node.inputs[0] is None:
            return ""
        if node.op_type in _BOUNDED:
            return node.op_type
        if node.op_type not in _CARRIED:
            return ""
        value = node.inputs[0]
    return ""


def _foreign_domains(model: ir.Model) -> tuple[str, ...]:
    own = {key[0] for key in model.functions}
    used = {node.domain for node in model.graph.all_nodes()}
    used |= {node.domain for function in model.functions.values() for node in function.all_nodes()}
    return tuple(sorted(used - own - set(STANDARD)))
