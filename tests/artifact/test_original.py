"""Comparison of a file with its original: an export of a checkpoint or of a file of weights passes, and any other
difference is named."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import checkpoint_decoders
import checkpoint_encoders
import pytest
import torch
from checkpoint_files import LLAMA, llama_tensors, written
from safetensors.torch import save_file
from torch import Tensor

from posexport.artifact.original import OTHER_SPEC, OTHER_WEIGHTS, Original
from posexport.errors import RequestError
from posexport.models.checkpoints import read_checkpoint
from posexport.spec.spec import Spec

CASES = {**checkpoint_decoders.CASES, **checkpoint_encoders.CASES}
FIRST = ("llama", "gemma2", "phi3", "falcon-key-heads", "bloom", "t5", "bert", "swin", "dinov3_vit", "deberta-v2")
"""Checkpoints of the usual run: grouped heads, windows, three kinds of fused projections, tables of biases, several
axes, prefix tokens."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        CASES[name].build().save_pretrained(folder)
        return folder

    return save


def read(folder: Path, layer: int = 0, layers: int = 1, **options: Any) -> tuple[Spec, dict[str, Tensor]]:
    """The spec and the weights of an export."""
    checkpoint = read_checkpoint(folder, layer, layers, options)
    assert checkpoint.weights is not None
    return checkpoint.spec, dict(checkpoint.weights)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FIRST else pytest.mark.slow) for n in CASES])
def test_an_export_is_its_checkpoint_and_one_with_a_fault_is_not(name: str, saved: Any) -> None:
    folder, layer = saved(name), CASES[name].layers[0]
    original = Original(checkpoint=folder, layer=layer)
    for dtype in ("fp32", "bf16", "fp16"):
        assert original.mismatch(*read(folder, layer, dtype=dtype)) is None, dtype
    spec, weights = read(folder, layer)
    for tensor_name, tensor in weights.items():
        for fault in (tensor * 1.5 + 0.01, tensor.flip(0) + 1e-6, _one_bit(tensor)):
            reason = original.mismatch(spec, {**weights, tensor_name: fault})
            assert reason is not None and reason.code == OTHER_WEIGHTS, tensor_name
            assert tensor_name in reason.text
    changes: list[dict[str, Any]] = [{"scale": spec.scale * 1.01}, {"causal": not spec.causal}, {"softcap": 7.5}]
    for change in changes:
        (field,) = change
        try:
            other = attrs.evolve(spec, **change)
        except RequestError:  # the encoding does not allow the change
            continue
        reason = original.mismatch(other, weights)
        assert reason is not None and (reason.code, field in reason.text) == (OTHER_SPEC, True)


def _one_bit(tensor: Tensor) -> Tensor:
    """The tensor with the last bit of its last number flipped."""
    bits = tensor.clone().view(torch.int32)
    bits.view(-1)[-1] ^= 1
    return bits.view(torch.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    written(folder, **LLAMA)
    save_file(llama_tensors(), folder / "model.safetensors")
    return folder


def said(original: Original, spec: Spec, weights: dict[str, Tensor]) -> str:
    reason = original.mismatch(spec, weights)
    return "" if reason is None else reason.text


def test_what_whoever_exports_chooses_may_differ(llama: Path) -> None:
    options: dict[str, Any] = {"kv_cache": "shared", "padding_mask": True, "angles": "exact", "dtype": "bf16"}
    assert said(Original(checkpoint=llama), *read(llama, **options)) == ""


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layout": "interleaved"}, "layout of rope is interleaved in the file and half in the original"),
        ({"theta": 10_000.0}, "theta of rope is 10000.0 in the file and 500.0 in the original"),
        ({"rotary_dim": 4}, "rotary_dim of rope is 4 in the file and none in the original"),
        ({"scaling": "linear", "factor": 2.0}, "scaling of rope is linear in the file and none in the original"),
    ],
)
def test_a_spec_that_differs_is_named_with_both_values(llama: Path, change: dict[str, Any], sentence: str) -> None:
    spec, weights = read(llama)
    other = attrs.evolve(spec, encoding=attrs.evolve(spec.encoding, **change))
    reason = Original(checkpoint=llama).mismatch(other, weights)
    assert reason is not None and reason.code == OTHER_SPEC
    assert sentence in reason.text


def test_of_a_long_list_the_first_number_that_differs_is_named(saved: Any) -> None:
    spec, weights = read(saved("llama-longrope"))
    factors = list(getattr(spec.encoding, "long_factor"))  # noqa: B009 (not every encoding has it)
    factors[-1] += 0.5
    other = attrs.evolve(spec, encoding=attrs.evolve(spec.encoding, long_factor=tuple(factors)))  # type: ignore[call-arg]
    text = said(Original(checkpoint=saved("llama-longrope")), other, weights)
    assert f"long_factor of rope[{len(factors) - 1}] is {factors[-1]} in the file and {factors[-1] - 0.5}" in text


def test_other_numbers_of_heads_encodings_and_biases_are_named(llama: Path) -> None:
    spec, weights = read(llama)
    original = Original(checkpoint=llama)
    heads = said(original, attrs.evolve(spec, num_kv_heads=4), weights)
    assert "num_kv_heads is 4 in the file and 2 in the original; k_proj.weight is [32, 32] in the file" in heads
    plain = attrs.evolve(spec, bias=())
    assert "bias is none in the file and q_proj, k_proj" in said(original, plain, weights)
    assert "encoding is none in the file and rope in the original" in said(original, _without_rope(spec), weights)


def _without_rope(spec: Spec) -> Spec:
    from posexport.models import read_spec

    return read_spec({**json.loads(spec.to_json()), "encoding": {"name": "none"}})


def test_prefix_tokens_must_be_said_where_the_config_does_not(llama: Path) -> None:
    spec, weights = read(llama, prefix_tokens=2)
    assert "prefix_tokens is 2 in the file and 0" in said(Original(checkpoint=llama), spec, weights)
    assert said(Original(checkpoint=llama, prefix_tokens=2), spec, weights) == ""


def test_another_layer_is_not_the_one_that_was_asked_for(llama: Path) -> None:
    reason = Original(checkpoint=llama, layer=1).mismatch(*read(llama, 2))
    assert reason is not None and reason.code == OTHER_WEIGHTS
    assert "not an export of checkpoint" in reason.text and "layer 1: " in reason.text
    assert reason.text.endswith("and 4 more differences")


def test_a_stack_is_its_layers_in_their_order(llama: Path) -> None:
    spec, weights = read(llama, 1, 2, dtype="fp16")
    assert said(Original(checkpoint=llama, layer=1), spec, weights) == ""
    assert "layers.0.q_proj.weight" in said(Original(checkpoint=llama, layer=0), spec, weights)
    swapped = {name.replace("layers.0", "layers.9"): tensor for name, tensor in weights.items()}
    swapped = {name.replace("layers.1", "layers.0"): tensor for name, tensor in swapped.items()}
    swapped = {name.replace("layers.9", "layers.1"): tensor for name, tensor in swapped.items()}
    assert said(Original(checkpoint=llama, layer=1), spec, swapped)
    beyond = said(Original(checkpoint=llama, layer=2), spec, weights)
    assert "the file has 2 layers, but" in beyond and "describes 3 layers" in beyond


def test_a_layer_of_a_stack_with_a_fault_is_named(saved: Any) -> None:
    folder = saved("gemma2")
    spec, weights = read(folder, 0, 2)
    assert said(Original(checkpoint=folder), spec, weights) == ""
    first, second = spec.layer_pattern
    wide = attrs.evolve(spec, layer_pattern=(attrs.evolve(first, window=9), second))
    assert "in layer 0 window is 9 in the file and" in said(Original(checkpoint=folder), wide, weights)


def test_a_pattern_that_is_written_otherwise_is_the_same_block(saved: Any) -> None:
    folder = saved("gemma2")
    spec, weights = read(folder, 0, 2)
    twice = attrs.evolve(spec, layer_pattern=spec.layer_pattern * 2)
    assert said(Original(checkpoint=folder), twice, weights) == ""


def test_a_file_of_weights_is_compared_by_names_shapes_and_values(llama: Path, tmp_path: Path) -> None:
    spec, weights = read(llama)
    file = tmp_path / "w.safetensors"
    save_file(weights, file)
    original = Original(weights=file)
    assert said(original, spec, weights) == ""
    half = attrs.evolve(spec, dtype="fp16")
    assert said(original, half, {name: tensor.half() for name, tensor in weights.items()}) == ""
    assert "q_proj.weight is torch.float32 in the file" in said(original, half, weights)
    wrong = {**weights, "o_proj.weight": weights["o_proj.weight"] * 1.5}
    assert "not an export of weights w.safetensors: o_proj.weight has different weights" in said(original, spec, wrong)
    save_file({name: tensor for name, tensor in weights.items() if name != "v_proj.bias"}, file)
    assert "v_proj.bias is [16] in the file and absent in the original" in said(original, spec, weights)
    save_file({**weights, "more": torch.ones(3)}, file)
    assert "more is absent in the file and [3] in the original" in said(original, spec, weights)


def test_a_weight_that_is_not_finite_is_named(llama: Path) -> None:
    spec, weights = read(llama)
    weights["q_proj.weight"][0, 0] = float("nan")
    assert "q_proj.weight has different weights: the largest difference is nan" in said(
        Original(checkpoint=llama), spec, weights
    )


def test_an_original_that_cannot_be_read_is_no_verdict(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="3 is none of them"):
        Original(checkpoint=llama, layer=3).check()
    with pytest.raises(RequestError, match="a file without weights: give the folder"):
        Original(checkpoint=llama / "config.json").check()
    (tmp_path / "x.safetensors").write_bytes(b"none")
    for path in (tmp_path / "x.safetensors", tmp_path / "y.safetensors"):
        with pytest.raises(RequestError, match=r"can't be read as \.safetensors"):
            Original(weights=path).check()
    with pytest.raises(RequestError, match="one original"):
        Original()
