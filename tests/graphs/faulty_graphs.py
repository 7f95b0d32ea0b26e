"""Graphs with faults, beside the right one that verify compares them with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import onnx
from helpers import cli


def states_of(text: str, ends: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The states of verdicts on a graph in ONNX's text format, by the name of its end, against the one named "right".

    Each of the `ends` takes the place of FAULT in the text.
    """
    paths = {name: folder / f"{name}.onnx" for name in ends}
    for name, end in ends.items():
        onnx.save(onnx.parser.parse_model(text.replace("FAULT", end)), paths[name])
    result = cli("verify", *paths.values(), "--against", paths["right"], "--runtime", "ort-cpu", "--json")
    return {Path(one["artifact"]).stem: one["state"] for one in json.loads(result.stdout)["verdicts"]}
