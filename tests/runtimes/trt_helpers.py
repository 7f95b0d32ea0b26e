"""Helpers of the compile stage's tests. Blocks are exported once per process. Tests are skipped without a builder."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.cli import main
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import seeded_weights
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.builder import Built, build
from posexport.runtimes.tensorrt.options import BuildOptions

RTX = "tensorrt-rtx"
needs_rtx = pytest.mark.skipif(api.can_build(RTX) is not None, reason=f"{RTX}: {api.can_build(RTX)}")

_FOLDER = tempfile.TemporaryDirectory(prefix="posexport-")


@functools.cache
def exported(
    encoding: str, dtype: str = "fp16", form: str = "decomposed", opset: int | None = None, **sizes: Any
) -> Path:
    """An ONNX artifact with hidden size 256 and 4 heads. Other tests read the same file, so it must not be changed."""
    extra = {key: sizes.pop(key) for key in ("batch", "seq", "max_seq") if key in sizes}
    spec = read_spec({"encoding": {"name": encoding}, "hidden_size": 256, "num_heads": 4, "dtype": dtype, **sizes})
    model = export(spec, seeded_weights(spec, 0), form=form, opset=opset, **extra)
    names = "-".join(f"{key}={value}" for key, value in {**sizes, **extra}.items())
    path = Path(_FOLDER.name) / f"{encoding}-{dtype}-{form}-{opset}{names}.onnx"
    write_onnx(model, path)
    return path


def copied(source: Path, folder: Path, name: str = "block.onnx") -> Path:
    """A copy that a test may change, without a manifest."""
    return Path(shutil.copy(source, folder / name))


def built(path: Path, **options: Any) -> Built:
    """The plan of an artifact, in memory."""
    return build(read_onnx(path), BuildOptions(runtime=RTX, **options))


def posexport(*args: object) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


def refused(result: Result, *parts: str, code: int = 2) -> None:
    """Check the exit code, and that stderr is one sentence that contains `parts`."""
    assert result.exit_code == code, (result.exit_code, result.output)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: "), lines
    assert lines[0].endswith("."), lines
    for part in parts:
        assert part in lines[0], (part, lines[0])
