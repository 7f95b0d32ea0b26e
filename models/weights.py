"""Weights with Hugging Face's names and layout: the shapes that a spec needs, random weights, weights from a file.

Names begin with `layers.N.` if a block has several layers. Exceptions are the weights at the input:
`embed_tokens.weight`, and the table of an absolute encoding.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.files import check_regular
from posexport.machine import available, size_text
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(spec: Spec) -> Shapes:
    """Return the shapes of one layer's weights by name, without `layers.N.`."""
    hidden, q_width, kv_width = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = {
        "q_proj": (q_width, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, q_width),
    }
    if spec.intermediate_size is not None:
        wide, narrow = (spec.intermediate_size, hidden), (hidden, spec.intermediate_size)
        sizes |= {name: narrow if name in ("mlp.fc2", "mlp.down_proj") else wide for name in spec.projections()[4:]}
    shapes: Shapes = {}
    for name, size in sizes.items():
        shapes[f"{name}.weight"] = size
        if name in spec.bias:
            shapes[f"{name}.bias"] = size[:1]
    if spec.qk_norm_type == "rms":
        shapes |= {f"{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,)
    for norm in norm_names(spec):
        shapes[f"{norm}.weight"] = (hidden,)
        if spec.norm_type == "layernorm":
            shapes[f"{norm}.bias"] = (hidden,)
    if spec.encoding.hook and not spec.encoding.at_input and not spec.cross:
        shapes |= _encoding_shapes(spec)
    return shapes


def _encoding_shapes(spec: Spec) -> Shapes:
    return {f"encoding.{name}": shape for name, shape in spec.encoding.weights(spec).items()}


def norm_names(spec: Spec) -> tuple[str, ...]:
    """Return the norms of a layer in order of use: Llama's names for pre-norms, Gemma 2's for post-norms."""
    if spec.norm is None:
        return ()
    if spec.norm == "pre":
        return ("input_layernorm", "post_attention_layernorm")
    return ("post_attention_layernorm", "post_feedforward_layernorm")


def weight_shapes(spec: Spec) -> Shapes:
    """Return the shapes of all weights of the block by name, in a fixed order."""
    shapes: Shapes = {}
    if spec.vocab_size is not None:
        shapes["embed_tokens.weight"] = (spec.vocab_size, spec.hidden_size)
    if spec.encoding.at_input:
        shapes |= _encoding_shapes(spec)
    layers = [layer_shapes(layer) for layer in spec.distinct_layers()]
    for index in range(spec.layers):
        prefix = f"layers.{index}." if spec.layers > 1 else ""
        shapes |= {prefix + name: shape for name, shape in layers[index % len(layers)].items()}
    return shapes


class LazyWeights(Mapping[str, "torch.Tensor"]):
    """Weights by public name. `make` creates a weight each time it is looked up. Nothing is kept."""

    def __init__(self, shapes: Shapes, make: Callable[[str], torch.Tensor]) -> None:
        self.shapes, self._make = shapes, make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def bytes_of(spec: Spec, dtype: str | None = None) -> int:
    """Return the number of bytes of all weights in `dtype`, by default the spec's."""
    return sum(math.prod(shape) for shape in weight_shapes(spec).values()) * _SIZES[dtype or spec.dtype]


def seeded(spec: Spec, seed: int) -> LazyWeights:
    """Return random weights in the spec's dtype. Each tensor has its own generator, so that their order does not
    matter.

    Matrices have the variance 1/fan_in. This keeps logits near 1, so that every term of the encoding matters. Raises
    RequestError if the largest weight does not fit in memory.
    """
    shapes = weight_shapes(spec)
    largest = max(shapes, key=lambda name: math.prod(shapes[name]))
    needed = math.prod(shapes[largest]) * (4 + _SIZES[spec.dtype])
    _check_memory(f"making the weight {largest!r} of this block takes", needed)
    return LazyWeights(shapes, lambda name: _seeded(spec, seed, name, shapes[name]))


def seeded_weights(spec: Spec, seed: int) -> dict[str, torch.Tensor]:
    """Return all weights of `seeded` at once. RequestError if they do not fit in memory."""
    weights = seeded(spec, seed)
    _check_memory("the weights of this block take", bytes_of(spec))
    return dict(weights)


def _check_memory(what: str, size: int) -> None:
    if size > (free := available()):
        raise RequestError(f"{what} {size_text(size)} and {size_text(free)} of memory are free: choose smaller sizes.")


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of tensors by name, dtype, shape and content."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _seeded(spec: Spec, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # torch reads 32 bits
    values = torch.randn(shape, generator=generator)
    match = re.match(r"(?:layers\.(\d+)\.)?encoding\.(.*)", name)
    if match:
        values = spec.layer(int(match[1] or 0)).encoding.seeded(match[2], values)
    elif "norm" in name and name.endswith("weight"):
        values.mul_(0.1).add_(1)
    elif len(shape) == 1 and not name.endswith("sinks"):
        values.mul_(0.1)
    elif name.endswith(("_proj.weight", "fc1.weight", "fc2.weight")):
        values.mul_(shape[1] ** -0.5)
    return values.to(getattr(torch, TORCH_DTYPES[spec.dtype]))


TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64", "int64": "int64"}
"""torch's names for the dtypes of specs, of the float64 reference and of positions."""

_SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of an element."""


def read_weights(path: Path, spec: Spec) -> tuple[Spec, LazyWeights]:
    """Return the spec with the biases that a .safetensors file has, and the file's weights in the spec's dtype.

    Raises RequestError that names the tensor if one is missing, extra or has a wrong shape. A tensor that is not
    floating-point or not finite raises when it is looked up.
    """
    stored = stored_shapes(path)
    # the biases of the first layer; the check of all names rejects layers that differ from it
    prefix = "layers.0." if spec.layers > 1 else ""
    spec = attrs.evolve(spec, bias=tuple(name for name in spec.projections() if f"{prefix}{name}.bias" in stored))
    shapes = weight_shapes(spec)
    for name in shapes:
        if name not in stored:
            similar = [other for other in stored if other.endswith(f".{name}")]
            more = f" and {len(shapes) - 24} more" if len(shapes) > 24 else ""
            needed = f"the spec needs {', '.join(islice(shapes, 24))}{more}"
            hint = f"rename {similar[0]!r} to it" if similar else needed
            raise RequestError(f"weights {path} lack {name!r} {list(shapes[name])}: {hint}.")
    for name, shape in stored.items():
        if name not in shapes:
            raise RequestError(f"weights {path} hold {name!r}, which the spec has no place for: drop or rename it.")
        if shape != shapes[name]:
            raise RequestError(
                f"weights {path}: {name!r} has shape {list(shape)}, the spec needs {list(shapes[name])}."
            )
    return spec, LazyWeights(shapes, lambda name: _read(path, name, spec.dtype))


def stored_shapes(path: Path) -> Shapes:
    """Return the shapes in a .safetensors file by name. RequestError if it cannot be read."""
    with _opened(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the file. Close it early, because pages that were read count as memory until then."""
    import safetensors

    try:
        check_regular(path)
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"weights {path} can't be read as .safetensors ({why}): give a readable file.") from None


def _read(path: Path, name: str, dtype: str) -> torch.Tensor:
    import torch

    with _opened(path) as file:
        tensor = file.get_tensor(name)
    check_values(tensor, f"weights {path}: {name!r}")
    values: torch.Tensor = tensor.to(getattr(torch, TORCH_DTYPES[dtype]))
    if not bool(torch.isfinite(values).all()):
        raise RequestError(f"weights {path}: {name!r} overflows in {dtype}, use dtype bf16 or fp32 or scale it down.")
    return values


def check_values(tensor: torch.Tensor, label: str, hint: str = "") -> None:
    """Raise RequestError for a tensor of a file that is not floating-point or not finite.

    The message begins with `label`. It ends with `hint` if the tensor is not floating-point.
    """
    import torch

    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise RequestError(f"{label} is {tensor.dtype}, it must be a floating-point tensor of 16 bits or more{hint}.")
    if not bool(torch.isfinite(tensor).all()):
        raise RequestError(f"{label} holds NaN or Inf, every value must be finite.")
