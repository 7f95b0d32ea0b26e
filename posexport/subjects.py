"""What is to be verified: artifacts read and checked from their own files, `.onnx` or `.plan`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact import Artifact, contradictions, manifest_fault, read_onnx
from posexport.dimensions import SUMS, Bounds, Values, bounds_of, smallest
from posexport.errors import RequestError
from posexport.plan import check_plan, onnx_of
from posexport.spec import Spec


@attrs.frozen(kw_only=True)
class Subject:
    """One artifact: what runs (`path`), and the ONNX artifact that its truth comes from (the same, or a plan's source).

    `only` names the one runtime that can open it (a plan's builder), `broken` what of the contract its graph breaks,
    `tuned` the sizes, by dimension, that a plan is tuned for.
    """

    path: Path
    source: Artifact
    inputs: Values
    dtypes: Mapping[str, str]
    bounds: Bounds
    only: str | None = None
    broken: str | None = None
    tuned: Mapping[str, int] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def spec(self) -> Spec:
        """The spec of the block."""
        return self.source.spec


def find_artifacts(paths: Sequence[Path]) -> list[Path]:
    """The artifacts that `paths` name, all those under a folder, each once; RequestError where there are none."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise RequestError(f"{str(path)!r} is not there: give artifacts of posexport, or a folder that holds some.")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in (".onnx", ".plan") and file.is_file())
            if not inside:
                raise RequestError(f"the folder {str(path)!r} holds no .onnx or .plan: give a folder with artifacts.")
        elif path.suffix in (".onnx", ".plan"):
            inside = [path]
        else:
            raise RequestError(f"{str(path)!r} is neither .onnx nor .plan nor a folder: give artifacts of posexport.")
        for file in inside:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def read_subject(path: Path) -> Subject:
    """Read the artifact at `path`; RequestError says what keeps it from being verified."""
    return _plan(path) if path.suffix == ".plan" else _onnx(path)


def _onnx(path: Path) -> Subject:
    artifact = read_onnx(path)
    inputs, outputs = artifact.inputs(), artifact.outputs()
    fault = manifest_fault(artifact)
    return Subject(
        path=path,
        source=artifact,
        inputs=inputs,
        dtypes={name: dtype for name, (_, dtype) in outputs.items()},
        bounds=bounds_of(artifact.spec.inputs(), inputs),
        broken=_broken(artifact.spec, inputs, outputs),
        notes=() if fault is None else (fault,),
    )


def _plan(path: Path) -> Subject:
    manifest = check_plan(path)
    source = read_onnx(onnx_of(path, manifest))
    inputs, outputs = (_values(manifest[key]) for key in ("inputs", "outputs"))
    bounds, tuned = _profiled(source.spec, inputs, manifest["profiles"])
    other = ", ".join(contradictions(manifest, source))
    told = f"its manifest {path.name}.json says otherwise than {source.path.name} of its {other}"
    return Subject(
        path=path,
        source=source,
        tuned=tuned,
        inputs=inputs,
        dtypes={name: dtype for name, (_, dtype) in outputs.items()},
        bounds=bounds,
        only=manifest["runtime"]["name"],
        broken=_broken(source.spec, inputs, outputs),
        notes=(told,) if other else (),
    )


def _profiled(spec: Spec, inputs: Values, profiles: Mapping[str, Any]) -> tuple[Bounds, dict[str, int]]:
    """The bounds of a plan's dimensions, and the sizes that it is tuned for."""
    bounds, tuned = bounds_of(spec.inputs(), inputs), {}
    for name, (shape, _) in spec.inputs().items():
        sizes = profiles.get(name, {"min": (), "opt": (), "max": ()})
        for dim, low, best, high in zip(shape, sizes["min"], sizes["opt"], sizes["max"], strict=False):
            if dim in bounds:
                before = bounds[str(dim)]
                bounds[str(dim)] = (max(low, before[0]), high if before[1] is None else min(high, before[1]))
                tuned[str(dim)] = best
    return bounds, tuned


def _values(entries: Iterable[Mapping[str, Any]]) -> Values:
    return {entry["name"]: (tuple(entry["shape"]), entry["dtype"]) for entry in entries}


def _broken(spec: Spec, inputs: Values, outputs: Values) -> str | None:
    """The first way in which a graph breaks the contract of its spec, or None."""
    return (
        _breach("input", spec.inputs(), inputs)
        or _breach("output", spec.outputs(), outputs)
        or _uneven(spec, {**inputs, **outputs})
    )


def _breach(kind: str, wanted: Values, found: Values) -> str | None:
    """The first way in which a graph's inputs or outputs are not those of its spec, or None."""
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            return f"the graph lacks the {kind} {name!r}: it has {', '.join(found) or 'none'}"
        have_shape, have_dtype = found[name]
        if have_dtype != dtype:
            return f"the graph's {kind} {name!r} is {have_dtype}, its spec says {dtype}"
        if len(have_shape) != len(shape) or not all(
            have == want or (isinstance(want, str) and (isinstance(have, str) or have >= smallest(want)))
            for want, have in zip(shape, have_shape, strict=True)
        ):
            return f"the graph's {kind} {name!r} has shape {list(have_shape)}, its spec says {list(shape)}"
    extra = [name for name in found if name not in wanted]
    return f"the graph has the {kind} {extra[0]!r}, which its spec has not" if extra else None


def _uneven(spec: Spec, found: Values) -> str | None:
    """A dimension that is fixed in one place and another size, or free, in another, or a sum that isn't that of its
    parts; None where all agree."""
    sizes: dict[str, tuple[str, int | str]] = {}
    for name, (shape, _) in {**spec.inputs(), **spec.outputs()}.items():
        for want, have in zip(shape, found[name][0], strict=True):
            if isinstance(want, str):
                have = have if isinstance(have, int) else "free"
                where, before = sizes.setdefault(want, (name, have))
                if have != before:
                    return f"the graph's {want} is {before} in {where!r} and {have} in {name!r}: it must be the same"
    for total, parts in SUMS.items():
        name, have = sizes.get(total, ("", "free"))
        terms = [sizes[part][1] for part in parts if part in sizes]
        if isinstance(have, int) and not (
            all(isinstance(term, int) for term in terms) and have == sum(map(int, terms))
        ):
            told = " + ".join(f"{part} {term}" for part, term in zip(parts, terms, strict=True))
            return f"the graph's {total} in {name!r} is fixed to {have}: it must be the sum of {told}"
    return None
