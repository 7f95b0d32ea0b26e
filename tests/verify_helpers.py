"""Artifacts with planted faults, for the tests of verify."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from helpers import exported
from onnx import helper, numpy_helper

from posexport.artifact import write_onnx
from posexport.spec import Spec

Mutate = Callable[[onnx.ModelProto], None]


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


def constant(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Mutate:  # type: ignore[type-arg]
    """Change an initializer."""

    def mutate(model: onnx.ModelProto) -> None:
        tensor = next(each for each in model.graph.initializer if each.name == name)
        changed = change(numpy_helper.to_array(tensor).copy())
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), name))

    return mutate


def later_positions(model: onnx.ModelProto) -> None:
    """Every position one later than the caller said."""
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name == "position_ids":
                node.input[index] = "later"
    model.graph.initializer.append(helper.make_tensor("one", onnx.TensorProto.INT64, [], [1]))
    model.graph.node.insert(0, helper.make_node("Add", ["position_ids", "one"], ["later"], name="late"))


def baked_length(model: onnx.ModelProto) -> None:
    """The last Reshape gives the lengths of the traced example instead of the input's own."""
    node = [node for node in model.graph.node if node.op_type == "Reshape"][-1]
    model.graph.initializer.append(helper.make_tensor("baked", onnx.TensorProto.INT64, [3], [2, 7, -1]))
    node.input[1] = "baked"


def other_spec(spec: Spec) -> Mutate:
    """The file says that it computes the block of another spec."""

    def mutate(model: onnx.ModelProto) -> None:
        for entry in model.metadata_props:
            if entry.key == "posexport.spec":
                entry.value = spec.to_json()

    return mutate


def renamed_output(model: onnx.ModelProto) -> None:
    """The output under another name."""
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == "output":
                node.output[index] = "result"
    model.graph.output[0].name = "result"


def second_output(model: onnx.ModelProto) -> None:
    """One output more than the block has."""
    model.graph.node.append(helper.make_node("Identity", ["output"], ["again"], name="again"))
    again = model.graph.output.add()
    again.CopyFrom(model.graph.output[0])
    again.name = "again"


def nan_at(values: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """The same with one NaN."""
    values.flat[1] = np.nan
    return values
