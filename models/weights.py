"""Weights by Hugging Face's names and layout: which a spec needs, made from a seed, or read from a file.

Names carry `layers.N.` where a block has several layers; what acts once at the input (`embed_tokens.weight`, and the
table of an absolute encoding) never does.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError
from posexport.machine import available
from posexport.models.encoding import Encoding
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

_ENCODING = re.compile(r"(?:layers\.(\d+)\.)?encoding\.(.*)")


def layer_shapes(spec: Spec) -> Shapes:
    """Name to shape of one layer's weights, without `layers.N.`."""
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
    encoding = spec.encoding
    assert isinstance(encoding, Encoding)
    if encoding.hook and not encoding.at_input and not spec.cross:
        shapes |= {f"encoding.{name}": shape for name, shape in encoding.weights(spec).items()}
    return shapes


def norm_names(spec: Spec) -> tuple[str, ...]:
    """The norms of a layer in the order of use: Llama's names for pre-norm, Gemma 2's for the post-norms."""
    if spec.norm is None:
        return ()
    if spec.norm == "pre":
        return ("input_layernorm", "post_attention_layernorm")
    return ("post_attention_layernorm", "post_feedforward_layernorm")


def weight_shapes(spec: Spec) -> Shapes:
    """Name to shape of every weight of the block, in a fixed order."""
    shapes: Shapes = {}
    encoding = spec.encoding
    assert isinstance(encoding, Encoding)
    if spec.vocab_size is not None:
        shapes["embed_tokens.weight"] = (spec.vocab_size, spec.hidden_size)
    if encoding.at_input:
        shapes |= {f"encoding.{name}": shape for name, shape in encoding.weights(spec).items()}
    kinds = [layer_shapes(kind) for kind in spec.kinds()]
    for index in range(spec.layers):
        prefix = f"layers.{index}." if spec.layers > 1 else ""
        shapes |= {prefix + name: shape for name, shape in kinds[index % len(kinds)].items()}
    return shapes


class LazyWeights(Mapping[str, "torch.Tensor"]):
    """Weights by public name, each made anew by `make` when it is asked for and kept by nobody here."""

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
    """The bytes of all weights, in `dtype` or the spec's own."""
    return sum(math.prod(shape) for shape in weight_shapes(spec).values()) * _SIZES[dtype or spec.dtype]


def seeded(spec: Spec, seed: int) -> LazyWeights:
    """Random weights in the spec's dtype, each tensor from its own generator, so that order doesn't matter.

    Matrices have the variance 1/fan_in, which keeps logits near 1 so that every term of the encoding shows. Raises
    RequestError where not even the largest has room in memory.
    """
    shapes = weight_shapes(spec)
    largest = max(shapes, key=lambda name: math.prod(shapes[name]))
    needed, free = math.prod(shapes[largest]) * (4 + _SIZES[spec.dtype]), available()
    if needed > free:
        raise RequestError(
            f"making the weight {largest!r} of this block takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
            "memory are free: choose smaller sizes."
        )
    return LazyWeights(shapes, lambda name: _seeded(spec, seed, name, shapes[name]))


def seeded_weights(spec: Spec, seed: int) -> dict[str, torch.Tensor]:
    """All of `seeded` in memory at once; RequestError where they have no room there."""
    weights, needed, free = seeded(spec, seed), bytes_of(spec), available()
    if needed > free:
        raise RequestError(
            f"the weights of this block take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free: "
            "choose smaller sizes."
        )
    return dict(weights)


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of tensors by name, dtype, shape and content."""
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
    own = _ENCODING.match(name)
    if own:
        encoding = spec.layer(int(own[1] or 0)).encoding
        assert isinstance(encoding, Encoding)
        values = encoding.seeded(own[2], values)
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
    """The weights in a .safetensors file, in the spec's dtype, and the spec with the biases that the file has.

    Raises RequestError that names the tensor where one is missing, extra or of a wrong shape; where one is not of
    floats or not finite, once it is asked for.
    """
    with _opened(path) as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    spec = attrs.evolve(spec, bias=_biases_in(found, spec))
    wanted = weight_shapes(spec)
    for name in wanted:
        if name not in found:
            like = [given for given in found if given.endswith(f".{name}")]
            hint = f"rename {like[0]!r} to it" if like else f"the spec needs {_told(wanted)}"
            raise RequestError(f"weights {path} lack {name!r} {list(wanted[name])}: {hint}.")
    for name, shape in found.items():
        if name not in wanted:
            raise RequestError(f"weights {path} hold {name!r}, which the spec has no place for: drop or rename it.")
        if shape != wanted[name]:
            raise RequestError(
                f"weights {path}: {name!r} has shape {list(shape)}, the spec needs {list(wanted[name])}."
            )
    return spec, LazyWeights(wanted, lambda name: _read(path, name, spec.dtype))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, open as short as can be: what was read of it counts as memory until it is closed."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise RequestError(f"weights {path} can't be read as .safetensors ({error}): give a readable file.") from None


def _read(path: Path, name: str, dtype: str) -> torch.Tensor:
    import torch

    with _opened(path) as file:
        tensor = file.get_tensor(name)
        check_values(tensor, f"weights {path}: {name!r}")
        values: torch.Tensor = tensor.to(getattr(torch, TORCH_DTYPES[dtype]))
        if not bool(torch.isfinite(values).all()):
            raise RequestError(
                f"weights {path}: {name!r} overflows in {dtype}, use dtype bf16 or fp32 or scale it down."
            )
    return values


def check_values(tensor: torch.Tensor, said: str, hint: str = "") -> None:
    """RequestError that begins with `said` where a tensor of a file isn't of floats, with `hint`, or isn't finite."""
    import torch

    if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise RequestError(f"{said} is {tensor.dtype}, it must be a floating-point tensor of 16 bits or more{hint}.")
    if not bool(torch.isfinite(tensor).all()):
        raise RequestError(f"{said} holds NaN or Inf, every value must be finite.")


def _told(names: Collection[str], most: int = 24) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(islice(names, most)) + rest


def _biases_in(tensors: Collection[str], spec: Spec) -> tuple[str, ...]:
    """The projections with a bias in the first layer of a file; the check of all names notices where layers differ."""
    prefix = "layers.0." if spec.layers > 1 else ""
    return tuple(name for name in spec.projections() if f"{prefix}{name}.bias" in tensors)
