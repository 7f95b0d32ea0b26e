"""Vision: ViT, Swin in both versions, DINOv3, Pixtral's tower, V-JEPA 2's encoder and SAM 2's memory attention.

All are bidirectional (within a window, for Swin). The default scale is 1/sqrt(head_dim), or Swin v2's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from posexport.errors import RequestError
from posexport.models.checkpoints.architecture import (
    Architecture,
    Weights,
    count,
    full_heads,
    projections,
    read_renamed,
    renamed,
    under,
)
from posexport.models.checkpoints.config import Config, Data
from posexport.models.checkpoints.rope import axial_theta
from posexport.models.checkpoints.tensors import Tensors
from posexport.spec.spec import Spec


def _pair(config: Config, name: str, default: int) -> tuple[int, int]:
    """Read two sizes, or one number for both."""
    value = config.value(name, default=default)
    both = value if isinstance(value, list) else [value, value]
    if len(both) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) and one > 0 for one in both):
        raise config.wrong(name, "a whole number from 1, or two of them")
    return both[0], both[1]


def _grid(config: Config, image: int, patch: int) -> tuple[int, int]:
    """Return the number of patches along both sides of an image."""
    (height, width), (rows, columns) = _pair(config, "image_size", image), _pair(config, "patch_size", patch)
    return height // rows, width // columns


def _biases(config: Config) -> list[str]:
    """Return the projections with a bias."""
    return ["q_proj", "k_proj", "v_proj", "o_proj"] if config.flag("qkv_bias", default=True) else ["o_proj"]


def vit(config: Config, layer: int) -> Data:
    """Read a layer of ViT. Positions are added at the input, so layers after the first have no encoding."""
    rows, columns = _grid(config, 224, 16)
    table = {"name": "learned", "max_positions": rows * columns + 1}  # one more row for the class token
    encoding = table if layer == 0 else {"name": "none"}
    return {**full_heads(config, 768, 12), "bias": _biases(config), "encoding": encoding}


def vit_weights(tensors: Tensors, path: str, spec: Spec, config: Config) -> Weights:
    names = projections("attention.query", "attention.key", "attention.value", "output.dense")
    weights = read_renamed(tensors, path, spec, names)
    if spec.encoding.at_input:
        name = f"{path.partition('encoder.layer.')[0]}embeddings.position_embeddings"
        weights["encoding.weight"] = tensors(name, (1, *spec.encoding.weights(spec)["weight"]))[0]
    return weights


def _stage(config: Config, layer: int) -> tuple[int, int]:
    """Return the stage of Swin that contains a layer, and the layer's index in the stage."""
    for stage, depth in enumerate(_depths(config)):
        if layer < depth:
            return stage, layer
        layer -= depth
    raise RequestError(f"{config.where}: depths ends before that layer: give an earlier one.")


def _depths(config: Config) -> list[int]:
    return config.integers("depths", default=[2, 2, 6, 2]) or []


def swin_layers(config: Config) -> int:
    return sum(_depths(config))


def _windowed(config: Config, layer: int) -> tuple[Data, int, int]:
    """Return the sizes of a layer of Swin, its stage, and the cells along the shorter side of the stage's grid."""
    stage, block = _stage(config, layer)
    config.must("use_absolute_embeddings", False)
    heads = config.integers("num_heads", default=[3, 6, 12, 24]) or []
    if len(heads) != len(_depths(config)) or not heads[stage]:
        raise config.wrong("num_heads", "a list of whole numbers from 1, one for each of depths")
    width = config.integer("embed_dim", default=96) * 2**stage
    if width % heads[stage]:
        raise RequestError(f"{config.where}: {heads[stage]} heads don't divide the width {width} of stage {stage}.")
    grid = _grid(config, 224, 4)
    if any(side % 2**stage for side in grid):
        raise config.wrong("image_size", f"such that its grid of {grid[0]} by {grid[1]} patches halves {stage} times")
    cells = min(grid) // 2**stage
    if block % 2 and cells > config.integer("window_size", default=7):
        raise RequestError(
            f"{config.where}: layer {layer} shifts its windows, and a block has no input for the mask that borders "
            f"need: give a layer without a shift, such as {layer - 1}."
        )
    return {"hidden_size": width, "num_heads": heads[stage]}, stage, cells


def swin(config: Config, layer: int) -> Data:
    size, stage, cells = _windowed(config, layer)
    window = config.integer("window_size", default=7)
    if cells < window:
        raise RequestError(
            f"{config.where}: the windows of stage {stage} are larger than its grid: give another layer."
        )
    return {**size, "bias": _biases(config), "encoding": {"name": "swin", "window_size": window}}


def swinv2(config: Config, layer: int) -> Data:
    size, stage, cells = _windowed(config, layer)
    window = min(cells, config.integer("window_size", default=7))
    trained = config.integers("pretrained_window_sizes", default=[0, 0, 0, 0]) or []
    if len(trained) <= stage:
        raise config.wrong("pretrained_window_sizes", "a list of whole numbers, one for each of depths")
    encoding = {"name": "swinv2", "window_size": window, "pretrained_window_size": trained[stage] or None}
    biases = ["q_proj", "v_proj", "o_proj"] if config.flag("qkv_bias", default=True) else ["o_proj"]
    return {**size, "bias": biases, "encoding": encoding}


def _block_of_swin(*roots: str) -> Callable[[Config, int], Sequence[str]]:
    def paths(config: Config, layer: int) -> Sequence[str]:
        stage, block = _stage(config, layer)
        return [f"{root}encoder.layers.{stage}.blocks.{block}.attention" for root in ("", *roots)]

    return paths


_SWIN_BIASES = "relative_position_bias_table continuous_position_bias_mlp.0 continuous_position_bias_mlp.2 logit_scale"
SWIN_NAMES = projections("self.query", "self.key", "self.value", "output.dense")
SWIN_NAMES |= {f"encoding.{name}": f"self.{name}" for name in _SWIN_BIASES.split()}


def dinov3(config: Config, layer: int) -> Data:
    """Read a layer of DINOv3. The class token and the registers come first and have no position."""
    flags = {"q_proj": ("query_bias", True), "k_proj": ("key_bias", False), "v_proj": ("value_bias", True)}
    flags["o_proj"] = ("proj_bias", True)
    return {
        **full_heads(config, 384, 6),
        "bias": [name for name, (key, default) in flags.items() if config.flag(key, default=default)],
        "prefix_tokens": 1 + config.integer("num_register_tokens", default=0, at_least=0),
        "encoding": {"name": "rope-dinov3", "theta": config.number("rope_theta", default=100.0)},
    }


def pixtral(config: Config, layer: int) -> Data:
    size = full_heads(config, 1024, 16)
    config.must("head_dim", None, size["head_dim"])
    theta = axial_theta(config, "rope_theta")
    axes = {"order": "yx", "spacing": "alternate", "layout": "half-head"}
    return {**size, "encoding": {"name": "rope2d", "theta": theta, **axes}}


def vjepa2(config: Config, layer: int) -> Data:
    return {**full_heads(config, 1024, 16), "bias": _biases(config), "encoding": {"name": "rope-vjepa2"}}


_MEMORY = "memory_attention_"


def sam2_video(config: Config, layer: int) -> Data:
    """Read a layer of self-attention over a frame. Cross-attention to the memory has keys of another width."""
    size = full_heads(config, 256, 1, (f"{_MEMORY}hidden_size",), (f"{_MEMORY}num_attention_heads",))
    narrower = config.integer(f"{_MEMORY}downsample_rate", default=1)
    theta = axial_theta(config, f"{_MEMORY}rope_theta")
    width = size["hidden_size"] // narrower // size["num_heads"]
    return {**size, "head_dim": width, "bias": True, "encoding": {"name": "rope2d", "theta": theta}}


ARCHITECTURES = {
    "vit": Architecture(count(12), vit, under("encoder.layer.{}.attention", "vit."), vit_weights),
    "swin": Architecture(swin_layers, swin, _block_of_swin("swin."), renamed(SWIN_NAMES)),
    "swinv2": Architecture(swin_layers, swinv2, _block_of_swin("swinv2."), renamed(SWIN_NAMES)),
    "dinov3_vit": Architecture(count(12), dinov3, under("layer.{}.attention", "model.")),
    "pixtral": Architecture(
        count(24),
        pixtral,
        under("transformer.layers.{}.attention", "vision_tower.", "model.vision_tower.", "vision_encoder."),
    ),
    "vjepa2": Architecture(
        count(24),
        vjepa2,
        under("encoder.layer.{}.attention", "vjepa2."),
        renamed(projections("query", "key", "value", "proj")),
    ),
    "sam2_video": Architecture(
        count(4, f"{_MEMORY}num_layers"), sam2_video, under("memory_attention.layers.{}.self_attn")
    ),
}
