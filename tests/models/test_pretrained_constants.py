"""Buffers that keep their dtype if the weights of a checkpoint get another dtype, and buffers that change too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import cli
from small_decoders import exported_model
from tiny_models import checkpoint

from posexport.models.pretrained import constants_of, open_pretrained, without_values


def test_frequencies_keep_their_dtype() -> None:
    pretrained = open_pretrained(checkpoint("llama"))
    assert constants_of(pretrained.model) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    with without_values(pretrained, torch.float16):
        assert {buffer.dtype for buffer in pretrained.model.buffers()} == {torch.float32}


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_tables_of_sinusoids_follow(stored: str) -> None:
    pretrained = open_pretrained(checkpoint("m2m_100", stored))
    assert constants_of(pretrained.model) == frozenset()
    for dtype in (torch.float16, torch.bfloat16):
        with without_values(pretrained, dtype):
            assert {buffer.dtype for buffer in pretrained.model.buffers()} == {dtype}
    assert {buffer.dtype for buffer in pretrained.model.buffers()} == {getattr(torch, stored)}


@pytest.mark.slow
def test_a_model_with_such_a_table_in_fp16(tmp_path: Path) -> None:
    """Exported from fp32 and compared with transformers: the table has fp16, like the weights."""
    exported_model(checkpoint("m2m_100"), tmp_path / "model.onnx", "--dtype", "fp16")
    files = [tmp_path / f"{part}_model.onnx" for part in ("encoder", "decoder")]
    result = cli("verify", *files, "--from", checkpoint("m2m_100"), "--runtime", "ort-cpu", "--json")
    assert result.exit_code == 0, result.output
    assert {one["state"] for one in json.loads(result.stdout)["verdicts"]} == {"passed"}
