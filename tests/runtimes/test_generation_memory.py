"""The memory of generation: weights, caches and at most a quarter more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_decoders import exported_model, small_checkpoint

from posexport.runtimes.generation_process import ALLOCATION

_PROCESS = """
import json, sys
from posexport import machine
from posexport.jsondata import unstructure
from posexport.runtimes import generation_process
from posexport.runtimes.generation import GenerationOptions

generation_process.report = lambda _: None
options = unstructure(GenerationOptions(max_new_tokens=8))
request = {"path": sys.argv[1], "session": {"threads": 1}, "prompts": [[1, 2, 3]], "options": options}
none = {"trained_length": None, "encoder": None, "inputs": None, "begin": [], "usual_begin": [], "vocabulary": None}
machine.forget_peak()
generation_process.answer({**request, **none})
print(machine.peak())
"""


def peak(path: Path) -> int:
    """The peak of resident bytes of a process that generates like `posexport generate`."""
    command, environment = [sys.executable, "-P", "-c", _PROCESS, str(path)], {**os.environ, **ALLOCATION}
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told anew on Linux only")
@pytest.mark.parametrize("options", [(), ("--form", "contrib", "--target", "ort", "--kv-cache", "shared")], ids=str)
def test_a_quarter_more_than_the_weights_at_most(options: tuple[str, ...], tmp_path: Path) -> None:
    """The process of a small decoder is subtracted, because it contains everything except weights."""
    small_checkpoint(tmp_path / "small")
    wide = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 4000, "num_hidden_layers": 6}
    small_checkpoint(tmp_path / "large", num_attention_heads=12, num_key_value_heads=12, **wide)
    files = [exported_model(tmp_path / name, tmp_path / f"{name}.onnx", *options) for name in ("small", "large")]
    weights = files[1].stat().st_size - files[0].stat().st_size
    assert weights > 150e6
    assert peak(files[1]) - peak(files[0]) < 1.25 * weights
