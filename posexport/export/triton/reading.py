"""Reads what is to be served: artifacts of posexport and plans by their spec, other ONNX files by their graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from posexport.artifact.manifest import values_of
from posexport.artifact.plan import check_plan
from posexport.artifact.signing import SigningKey, TrustedKey
from posexport.errors import RequestError
from posexport.export.triton.served_artifact import BACKENDS, UNSERVED, ServedArtifact, weight_files
from posexport.spec.spec import Spec


def read_served(
    path: Path, gpu: bool | None, trusted: Sequence[TrustedKey] = (), key: SigningKey | None = None
) -> ServedArtifact:
    """The artifact at `path` (.onnx or .plan), to run on a GPU, on the CPU (False) or where Triton chooses (None).

    Raises RequestError if it can't be read, if it contradicts its manifest or its spec or none of the `trusted` keys
    signed it, for a dtype or a device that its backend does not support, and if it has no manifest that `key` could
    sign.
    """
    served = _from_plan(path, trusted) if path.suffix == ".plan" else _from_onnx(path, trusted)
    if served.spec is not None and served.spec.dtype in UNSERVED[served.backend]:
        raise RequestError(
            f"{str(path)!r} is {served.spec.dtype}, which Triton's {served.backend} backend has no tensors of: export "
            "it with --dtype fp16, or package a plan of tensorrt."
        )
    if key is not None and served.manifest is None:
        raise RequestError(
            f"--sign was given with {str(path)!r}, which has no manifest to sign: make the file with 'posexport "
            "export' or 'rewrite', which write one, or drop --sign."
        )
    if served.backend == "tensorrt" and gpu is False:
        raise RequestError(f"--cpu was given with the plan {str(path)!r}, which runs on GPUs only: drop it.")
    return served


def _from_onnx(path: Path, trusted: Sequence[TrustedKey]) -> ServedArtifact:
    from posexport.artifact.loaded import load_sound
    from posexport.artifact.onnx_artifact import ForeignFileError
    from posexport.export.triton.served_graph import served_graph

    try:
        loaded = load_sound(path, trusted)
    except ForeignFileError as error:
        if not error.is_graph:
            raise
        return served_graph(error.graph)
    artifact, manifest = loaded.source, loaded.manifest
    file = BACKENDS["onnxruntime"][1]
    nodes = [*artifact.model.graph.node, *(node for function in artifact.model.functions for node in function.node)]
    domains = sorted(set(artifact.domains()) - {"", "ai.onnx", "posexport"})
    return ServedArtifact(
        backend="onnxruntime",
        spec=artifact.spec,
        title=title_of(artifact.spec),
        inputs=artifact.inputs(),
        outputs=artifact.outputs(),
        usual={name: shapes["opt"] for name, shapes in artifact.profiles().items()},
        profiles=None,
        operators=frozenset(node.op_type for node in nodes),
        manifest=None if manifest is None else attrs.evolve(manifest, file=file),
        files={
            file: (path, None if manifest is None else manifest.sha256),
            **weight_files(artifact, {} if manifest is None else manifest.external_data),
        },
        about=f"opset {artifact.opset}{' and ' if domains else ''}{', '.join(domains)}",
    )


def _from_plan(path: Path, trusted: Sequence[TrustedKey]) -> ServedArtifact:
    from posexport.artifact.loaded import contract_violation

    manifest = check_plan(path, trusted)
    violation = contract_violation(manifest.block(), values_of(manifest.inputs), values_of(manifest.outputs))
    if violation is not None:
        raise RequestError(f"{str(path)!r} contradicts the spec in its manifest, {violation}: build it again.")
    runtime = manifest.runtime
    if runtime.name != "tensorrt":
        raise RequestError(
            f"{str(path)!r} was built by {runtime.name} {runtime.version}, whose plans Triton's TensorRT backend "
            "can't load: build it with 'posexport compile --runtime tensorrt', or package the ONNX file."
        )
    file, profiles = BACKENDS["tensorrt"][1], manifest.profiles
    return ServedArtifact(
        backend="tensorrt",
        spec=manifest.block(),
        title=title_of(manifest.block()),
        inputs=values_of(manifest.inputs),
        outputs=values_of(manifest.outputs),
        usual={name: shapes["opt"] for name, shapes in profiles.items()},
        profiles=profiles,
        operators=frozenset(),
        manifest=attrs.evolve(manifest, file=file),
        files={file: (path, manifest.sha256)},
        about=f"only TensorRT {runtime.version} can open it: use a Triton with that version",
    )


def title_of(spec: Spec) -> str:
    """The encodings of a block, and its dtype."""
    encodings = dict.fromkeys(kind.encoding.name for kind in spec.distinct_layers())
    return f"{', '.join(encodings)} in {spec.dtype}"
