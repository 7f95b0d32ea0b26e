"""The table of kernels, from operator (domain, type) to the torch function that computes it, and a kernel's Call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import onnx_ir as ir
import torch

from posexport.graphs.kernels import dtypes

Value = Any
"""A tensor, a sequence (list of tensors), or None if an optional value is absent."""

Kernel = Callable[..., Value]
"""Called with a Call and the node's inputs. Returns one value, or a tuple of values for several outputs."""

KERNELS: dict[tuple[str, str], Kernel] = {}

MICROSOFT = "com.microsoft"

_K = TypeVar("_K", bound=Kernel)


def kernel(*types: str, domain: str = "") -> Callable[[_K], _K]:
    """Enter a function into the table under these operator types."""

    def enter(function: _K) -> _K:
        for name in types:
            KERNELS[domain, name] = function
        return function

    return enter


@attrs.frozen(kw_only=True)
class Call:
    """One use of an operator: its attributes with resolved references, its opset, and a function that runs subgraphs.

    `wide`: floating-point values are float64 whatever the file says. `wanted`: for each output of the node, whether it
    has a name. `types`: the element types that the file states for the inputs.
    """

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    wide: bool
    wanted: tuple[bool, ...]
    types: tuple[ir.DataType | None, ...]
    run_body: Callable[[ir.Graph, Sequence[Value]], list[Value]]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        value = self.attributes.get(name)
        return default if value is None else value

    def dtype(self, number: int) -> torch.dtype:
        """The torch dtype for an ONNX element type."""
        return dtypes.torch_dtype(ir.DataType(number), self.wide)

    def tensor(self, stored: ir.TensorProtocol) -> torch.Tensor:
        """A stored tensor as a torch tensor."""
        return dtypes.to_torch(stored, self.wide)

    def type_of(self, at: int) -> ir.DataType | None:
        """The element type that the file states for an input. Tensors hold types of 4 and 2 bits in 8 bits."""
        return self.types[at] if at < len(self.types) else None

    def wants(self, output: int) -> bool:
        """Whether the node's output of this number has a name."""
        return output < len(self.wanted) and self.wanted[output]


def integers(tensor: torch.Tensor) -> list[int]:
    """The values of an integer tensor as a list."""
    return [int(value) for value in tensor.flatten().tolist()]
