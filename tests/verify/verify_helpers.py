"""Artifacts with planted faults, for the tests of verify."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import onnx
import pytest
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
    """An artifact `<name>.onnx` that `mutate` has changed. It has no manifest, because its digest would give the fault
    away."""
    path = write(folder, name, spec, form)
    model = onnx.load(path)
    mutate(model)
    onnx.save(model, path)
    path.with_name(path.name + ".json").unlink()
    return path


def on_each_engine(names: Iterable[str], engines: Collection[str], few: Collection[str]) -> list[Any]:
    """Every pair (name, engine) as a parameter. All are marked slow, except the names in `few` on the first engine."""
    first, *_ = engines
    return [
        pytest.param(name, engine, marks=() if name in few and engine == first else pytest.mark.slow)
        for name, engine in itertools.product(names, engines)
    ]
