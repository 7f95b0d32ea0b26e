"""The export of a whole model uses 1.2 N of disk and 0.3 N of memory for a checkpoint of N bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_decoders import small_checkpoint

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 18, "vocab_size": 8000}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}


def large_checkpoint(folder: Path) -> int:
    """Writes an fp16 checkpoint in four shards without a model in memory; returns its size in bytes."""
    import transformers

    config: Any = transformers.LlamaConfig(**SIZES, **HEADS, dtype="float16")
    with torch.device("meta"):
        shapes = {
            name: each.shape for name, each in transformers.LlamaForCausalLM(config).state_dict(keep_vars=True).items()
        }
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    numbers, places = torch.randn(2**20).half(), dict[str, str]()
    for shard in range(4):
        file, own = f"model-{shard + 1:05}-of-00004.safetensors", [*shapes][shard::4]
        save_file({name: filled(numbers, shapes[name]) for name in own}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(own, file)
    total = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def filled(numbers: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A tensor of this shape with the numbers, repeated."""
    return numbers.repeat(-(-shape.numel() // numbers.numel()))[: shape.numel()].view(shape)


def peak(checkpoint: Path, output: Path) -> int:
    """The observed peak memory of `posexport export --model` and its children in bytes.

    Pages of checkpoint files do not count, because the kernel reclaims them if it needs memory.
    """
    output.parent.mkdir()
    command = [sys.executable, "-P", "-m", "posexport", "export", "--from", checkpoint, "--model", "-o", output]
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            most = max(most, sum(_held(pid) for pid in _session(process.pid)))
            time.sleep(0.01)
    assert process.returncode == 0
    return most


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            if os.getsid(pid) == leader:
                found.append(pid)
    return found


def _held(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_checkpoint_of_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    size = large_checkpoint(tmp_path / "large")
    assert size > 1.9e9
    small_checkpoint(tmp_path / "small", num_hidden_layers=2)
    output = tmp_path / "exported" / "model.onnx"
    assert peak(tmp_path / "large", output) - peak(tmp_path / "small", tmp_path / "beside" / "model.onnx") < 0.3 * size
    assert sum(file.stat().st_size for file in output.parent.iterdir()) < 1.2 * size
