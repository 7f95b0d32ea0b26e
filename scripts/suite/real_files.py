"""Files with trained weights from wheels of the package registry. pip downloads the wheels; they are unpacked but never
installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnxruntime


@attrs.frozen(kw_only=True)
class RealFile:
    """A file inside a wheel. `shapes` maps the name of a reference to the input's shape."""

    name: str
    wheel: str
    member: str
    sites: int
    exporter: str
    shapes: dict[str, tuple[int, ...]]
    integers: int = 0
    """An integer input is drawn below this number; 0 means a float input."""


OCR = "rapidocr-onnxruntime==1.4.4"
REAL_FILES = [
    RealFile(
        name="ppocr_rec",
        wheel=OCR,
        member="rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        sites=2,
        exporter="paddle12",
        shapes={"short": (1, 3, 48, 96), "wide": (2, 3, 48, 320)},
    ),
    RealFile(
        name="ppocr_det",
        wheel=OCR,
        member="rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        sites=0,
        exporter="paddle12",
        shapes={"square": (1, 3, 96, 96), "wide": (1, 3, 64, 160)},
    ),
    RealFile(
        name="ppocr_cls",
        wheel=OCR,
        member="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        sites=0,
        exporter="paddle11",
        shapes={"one": (1, 3, 48, 192), "three": (3, 3, 48, 192)},
    ),
    RealFile(
        name="magika",
        wheel="magika==1.0.3",
        member="magika/models/standard_v3_3/model.onnx",
        sites=0,
        exporter="tensorflow",
        shapes={"one": (1, 2048), "three": (3, 2048)},
        integers=256,
    ),
]


def fetch(folder: Path, row: RealFile) -> dict[str, Any]:
    """The record of one file, unpacked to `<name>-<exporter>.onnx`. Its references contain ONNX Runtime's own
    outputs."""
    path = folder / f"{row.name}-{row.exporter}.onnx"
    if not path.exists():
        place = folder / "wheels" / row.wheel
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), row.wheel]
        subprocess.run(command, check=True, timeout=300)
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            path.write_bytes(wheel.read(row.member))
    model = onnx.load(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (source,) = session.get_inputs()
    generator = np.random.default_rng(0)
    for label, shape in row.shapes.items():
        values = generator.normal(0, 0.5, shape).astype(np.float32)
        if row.integers:
            values = generator.integers(0, row.integers, shape).astype(np.int32)
        outputs = session.run(None, {source.name: values})
        names = (f"ort/{value.name}" for value in session.get_outputs())
        data = {f"in/{source.name}": values, **dict(zip(names, outputs, strict=True))}
        np.savez(folder / f"{row.name}-{label}.npz", **data)
    return {
        "name": path.stem,
        "architecture": row.name,
        "exporter": row.exporter,
        "file": path.name,
        "sites": row.sites,
        "encoding": "none",
        "rope": "",
        "nodes": len(model.graph.node),
        "opset": {entry.domain: entry.version for entry in model.opset_import},
        "inputs": [source.name],
        "outputs": [value.name for value in session.get_outputs()],
        "caches": [],
        "references": [f"{row.name}-{label}.npz" for label in row.shapes],
    }
