"""A layer pattern accepts exactly the layers that are valid blocks, and computes the same as these blocks in sequence.

The tests combine every pair of encodings (with a variant of each) with every override, in both orders, under options of
the whole block that one of the two may not use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from helpers import cli, inputs_for, refused, small_spec, weights_for

from posexport.errors import RequestError
from posexport.models import ENCODINGS, read_encoding, read_spec
from posexport.models.block import build_block
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import LAYER_FIELDS, Spec

PARAMETERS: dict[str, dict[str, Any]] = {
    "t5": {"num_buckets": 8, "max_distance": 20},
    "deberta": {"max_relative_positions": 40, "position_buckets": 8},
    "swin": {"window_size": 9},
    "swinv2": {"window_size": 9},
    "cope": {"npos_max": 8},
    "fire": {"mlp_width": 4},
}
VARIANTS = [
    *({"name": name, **PARAMETERS.get(name, {})} for name, encoding in ENCODINGS.items() if not encoding.at_input),
    {"name": "relative", "table": "learned", "max_distance": 9},
    {"name": "rope", "scaling": "dynamic", "factor": 4, "original_max_position_embeddings": 500},
]
OVERRIDES: list[dict[str, Any]] = [
    {},
    {"qk_norm": False},
    {"qk_norm": True},
    {"window": 3},
    {"attention_chunk_size": 2, "qk_norm": False},
]
SIZES = {"hidden_size": 24, "num_heads": 2, "head_dim": 12, "scale": 1.0, "layers": 2}
BLOCKS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "qk_norm": True, "qk_norm_type": "l2"},
    {"qk_norm": True},
    {"qk_norm_type": "l2", "norm_eps": 0.01},
    {"causal": True, "norm_eps": 0.01, "qk_norm_type": "rms", "window": 4},
    {"angles": "exact"},
    {"prefix_tokens": 2},
    {"causal": True, "kv_cache": "concat", "padding_mask": True},
    {"causal": True, "kv_cache": "shared"},
    {"cross": True},
    {"block": "transformer", "qk_norm": True, "qk_norm_type": "l2", "norm_eps": 0.01},
]


def alone(layer: dict[str, Any], block: dict[str, Any]) -> Spec | None:
    """A layer as a separate block, without options that do not concern it; None if it is not valid."""
    own = {**SIZES, **block, **{name: layer[name] for name in LAYER_FIELDS if name in layer}, "layers": 1}
    encoding = read_encoding(layer["encoding"])
    if not own.get("qk_norm"):
        own.pop("qk_norm_type", None)
        if own.get("block") != "transformer":
            own.pop("norm_eps", None)
    if not encoding.angular or layer["encoding"].get("table") == "learned":
        own.pop("angles", None)
    if not encoding.takes_prefix:
        own.pop("prefix_tokens", None)
    try:
        return read_spec({"encoding": layer["encoding"], **own})
    except RequestError:
        return None


def together(layers: list[dict[str, Any]], block: dict[str, Any]) -> Spec | None:
    try:
        return read_spec({"encoding": layers[0]["encoding"], "layer_pattern": layers, **SIZES, **block})
    except RequestError:
        return None


def fits_a_block(blocks: list[Spec], block: dict[str, Any]) -> bool:
    """Whether valid layers agree on their positions, and each option of the block concerns one of them."""
    axes = {one.encoding.axes for one in blocks} - {0}
    normed = block.get("qk_norm", False) or any(one.qk_norm for one in blocks)
    angular = any(one.angles == "exact" for one in blocks) or "angles" not in block
    prefix = any(one.prefix_tokens for one in blocks) or "prefix_tokens" not in block
    type_used = normed or "qk_norm_type" not in block
    eps_used = normed or "norm_eps" not in block or block.get("block") == "transformer"
    return len(axes) < 2 and angular and prefix and type_used and eps_used


def pairs() -> Iterator[list[dict[str, Any]]]:
    for (first, second), (own, other) in itertools.product(
        itertools.product(VARIANTS, repeat=2), itertools.product(OVERRIDES, repeat=2)
    ):
        yield [{"encoding": first, **own}, {"encoding": second, **other}]


def composed(spec: Spec, weights: dict[str, torch.Tensor], inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The output of the layers as separate blocks in sequence, in float64."""
    x = inputs["hidden_states"]
    for index in range(spec.layers):
        own = spec.layer(index)
        prefix = f"layers.{index}."
        mine = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        given = {**inputs, "hidden_states": x}
        given |= {name: inputs[f"{name}.{index}"] for name in ("past_key", "past_value") if spec.kv_cache}
        out = build_block(own, mine, torch.float64)(*(given[name] for name in graph_inputs(own)))
        x = out[0] if isinstance(out, tuple) else out
    return x.numpy()


def tensors_for(spec: Spec, batch: int = 2, seq: int = 6) -> dict[str, torch.Tensor]:
    """All inputs of a spec; a cache has three past tokens."""
    random = np.random.default_rng(0)
    given: dict[str, Any] = inputs_for(spec, batch, seq, "gaps")
    sizes = {"batch": batch, "seq": seq, "past_seq": 3, "total_seq": seq + 3, "max_seq": seq + 5, "encoder_seq": 4}
    for name, (shape, _) in graph_inputs(spec).items():
        whole = [sizes[dim] if isinstance(dim, str) else dim for dim in shape]
        if name == "attention_mask":
            given[name] = np.ones(whole, np.int64)
        elif name == "write_indices":
            given[name] = np.array([3, 1])
        elif name not in given:
            given[name] = random.standard_normal(whole)
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in given.items()}
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def check_accepted(block: dict[str, Any], stride: int, offset: int = 0) -> list[Spec]:
    accepted = []
    for layers in itertools.islice(pairs(), offset, None, stride):
        blocks = [alone(layer, block) for layer in layers]
        spec = together(layers, block)
        sound = None not in blocks and fits_a_block([one for one in blocks if one], block)
        assert (spec is not None) == sound, (layers, block)
        if spec is not None:
            assert [spec.layer(index) for index in range(2)] == blocks
            assert read_spec(spec.to_dict()) == spec
            accepted.append(spec)
    return accepted


def check_output(spec: Spec) -> None:
    given = tensors_for(spec)
    weights = weights_for(spec)
    out = build_block(spec, weights, torch.float64)(*(given[name] for name in graph_inputs(spec)))
    ours = (out[0] if isinstance(out, tuple) else out).numpy()
    np.testing.assert_allclose(ours, composed(spec, weights, given), atol=1e-12, rtol=0)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "-".join(block) or "plain")
def test_a_pattern_takes_what_its_layers_take(block: dict[str, Any]) -> None:
    accepted = check_accepted(block, 67)
    assert accepted
    for spec in accepted[:: len(accepted) // 5 + 1]:
        check_output(spec)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "-".join(block) or "plain")
def test_every_pattern_takes_what_its_layers_take(block: dict[str, Any]) -> None:
    for spec in check_accepted(block, 1)[::97]:
        check_output(spec)


def test_a_stack_of_llama_4_may_begin_without_rope() -> None:
    spec = small_spec(
        "temperature", pattern="temperature:qk_norm=false,rope", qk_norm=True, qk_norm_type="l2", layers=2, causal=True
    )
    assert [layer.qk_norm_type for layer in spec.distinct_layers()] == [None, "l2"]
    assert spec.layer(1) == attrs.evolve(
        small_spec("rope", qk_norm=True, qk_norm_type="l2", causal=True), encoding=spec.layer(1).encoding
    )
    check_output(spec)


def test_a_layer_that_an_option_does_not_fit_is_still_refused(tmp_path: Any) -> None:
    options = ("--hidden-size", "32", "--num-heads", "4", "--qk-norm", "--qk-norm-type", "l2", "--causal")
    target = tmp_path / "out.onnx"
    refused(cli("export", "--layer-pattern", "rope,temperature", *options, "-o", target), "such a norm removes")
    refused(cli("export", "--layer-pattern", "rope,swinv2:qk_norm=false", *options, "-o", target), "give scale")
    assert not target.exists()


def test_norms_of_single_layers_have_a_type_without_the_blocks() -> None:
    spec = small_spec("rope", pattern="none,rope:qk_norm=true", qk_norm_type="l2", norm_eps=0.02, layers=2)
    assert [(layer.qk_norm_type, layer.norm_eps) for layer in spec.distinct_layers()] == [(None, None), ("l2", 0.02)]
    with pytest.raises(RequestError, match="qk_norm_type is 'l2' without qk_norm"):
        small_spec("rope", pattern="none,rope:qk_norm=false", qk_norm_type="l2", layers=2)
