"""Export time of a block: posexport's export against torch.onnx.export of the same block in plain torch.

Both write their file into a temporary folder, with dynamic batch and sequence and opset 18, in one process.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from results import Row, compared
from timing import COMMON, block_spec, seeded_block, write_block

from posexport import temporary
from posexport.bench import rounds
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.custom_ops.operator import plain_torch
from posexport.runtimes.base import timed
from posexport.spec.spec import Spec

TARGET = 1.3


def measure(quick: bool) -> list[Row]:
    rows = []
    with temporary.folder() as folder:
        for name in ["rope"] if quick else [*COMMON, "rope:layout=half"]:
            spec = block_spec(name, 768, 12)
            arrays = seeded_inputs(spec, Sizes(batch=2, seq=7), 0)
            inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
            calls: dict[str, Callable[[], object]] = {
                "ours": partial(write_block, spec, Path(folder, "ours.onnx")),
                "theirs": partial(_torch_export, spec, inputs, Path(folder, "theirs.onnx")),
            }
            for call in calls.values():
                call()
            timings = {side: timed(call) for side, call in calls.items()}
            series = rounds.interleave(timings, 3 if quick else 9, pause=0.0)
            rows.append(compared(f"export of {name}, hidden 768", series["ours"], series["theirs"], TARGET))
    return rows


def _torch_export(spec: Spec, inputs: dict[str, torch.Tensor], path: Path) -> None:
    """torch's own export with its default optimizations."""
    dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")},) * len(inputs)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists torchvision's operators as missing
    with torch.no_grad(), plain_torch(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            seeded_block(spec),
            tuple(inputs.values()),
            path,
            opset_version=18,
            external_data=False,
            verbose=False,
            input_names=list(inputs),
            output_names=["output"],
            dynamic_shapes=(dims,),
        )
