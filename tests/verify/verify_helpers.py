"""Artifacts with planted faults, for the tests of verify."""

from __future__ import annotations

from pathlib import Path

import onnx
from helpers import exported
from mutants import Mutate

from posexport.artifact.onnx_artifact import write_onnx
from posexport.spec.spec import Spec


def write(folder: Path, name: str, spec: Spec, form: str = "decomposed") -> Path:
    """A sound artifact `<name>.onnx`."""
    path = folder / f"{name}.onnx"
    write_onnx(exported(spec, form), path)
    return path


def plant(folder: Path, name: str, spec: Spec, mutate: Mutate, form: str = "decomposed") -> Path:
    """An artifact `<name>.onnx` that `mutate` has changed; without a manifest, which would tell."""
    path = write(folder, name, spec, form)
    model = onnx.load(path)
    mutate(model)
    onnx.save(model, path)
    path.with_name(path.name + ".json").unlink()
    return path
