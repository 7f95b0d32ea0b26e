"""Explains why torch's exporter can't trace or write a module that runs, and where in a model an error arose.

The types of torch's errors tell the kind of problem. What torch says comes after a label, only for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from posexport.errors import RequestError, said


class TraceError(RequestError):
    """torch's exporter can't trace or write a module. `__cause__` is torch's error, which knows the place."""


Told = tuple[str, str]
"""What is wrong, and what to do."""

_TENSORS_ALONE: Told = (
    "the module runs, but torch can't trace what it does there",
    "compute with torch's operators on tensors alone, without numpy, other libraries or values as Python numbers",
)
_BRANCH: Told = (
    "the module branches on the values of a tensor, or on a size that follows from them",
    "a graph takes branches on sizes of inputs and on constants of the module, so write this one with torch.where or "
    "torch.cond, and leave out an assert",
)
_NUMBER: Told = (
    "the module makes a Python number of a value of a tensor, as int(), float() and .item() do",
    "leave it a tensor, or make the number a constant of the module",
)
_DYNAMIC_SHAPES: Told = (
    "dynamic_shapes let an axis vary, or limit it, in a way that the module or its example doesn't",
    "leave that axis out, give equal axes one name, or leave dynamic_shapes out, so that torch finds the axes that can "
    "vary",
)
_SIZE_BY_VALUES: Told = (
    "the size of a tensor follows from the values of another one",
    "give it a size that follows from those of the inputs, such as a mask in place of a selection",
)
_NO_TRANSLATION: Told = (
    "torch's exporter has no ONNX operators for one of the module's operators",
    "write that part with other operators of torch",
)


def _guard(error: Any) -> Told:
    """The problem is a condition, or a number, that depends on values."""
    kinds = {kind.__name__ for kind in type(getattr(error, "cond", None)).__mro__}  # of sympy, which has no type hints
    return _BRANCH if kinds & {"Relational", "BooleanFunction"} else _NUMBER


def _user_error(error: Any) -> Told:
    kind = getattr(getattr(error, "error_type", None), "name", "")
    return _USER_ERRORS.get(kind, _TENSORS_ALONE)


_USER_ERRORS = {
    "CONSTRAINT_VIOLATION": _DYNAMIC_SHAPES,
    "DYNAMIC_DIM": _DYNAMIC_SHAPES,
    "DYNAMIC_CONTROL_FLOW": _BRANCH,
}

_KINDS: dict[str, Callable[[Any], Told]] = {
    "GuardOnDataDependentSymNode": _guard,
    "DataDependentOutputException": lambda _: _NUMBER,
    "DynamicOutputShapeException": lambda _: _SIZE_BY_VALUES,
    "ConstraintViolationError": lambda _: _DYNAMIC_SHAPES,
    "UserError": _user_error,
    "DispatchError": lambda _: _NO_TRANSLATION,
    "ConversionError": lambda _: _NO_TRANSLATION,
}
"""What is wrong by the name of the error's type: the module of the type differs between versions of torch."""


@contextmanager
def tracing(module: torch.nn.Module, dynamic_shapes: bool) -> Iterator[None]:
    """A context in which torch's exporter works on a module that runs. What it raises becomes a TraceError.

    `dynamic_shapes` says whether the user gave some.
    """
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        told = _told(error, module, dynamic_shapes)
        # about values, torch's text only has its own symbols
        detail = "" if told in (_BRANCH, _NUMBER) else f" (torch says: {said(chain_of(error)[-1])})"
        raise TraceError(f"{told[0]}: {told[1]}{detail}.") from error


def _told(error: Exception, module: torch.nn.Module, dynamic_shapes: bool) -> Told:
    chain = chain_of(error)
    if (known := known_kind(chain)) is not None:
        return known
    forward = getattr(type(module).forward, "__code__", None)
    # torch compares the given shapes with those that it found, before and after it runs the module
    return (
        _DYNAMIC_SHAPES if dynamic_shapes and not any(_comes_from(each, forward) for each in chain) else _TENSORS_ALONE
    )


def known_kind(chain: list[BaseException]) -> Told | None:
    """What is wrong and what to do, by the types of errors of torch's exporter; None for others."""
    for each in reversed(chain):
        for kind in type(each).__mro__:
            if kind.__name__ in _KINDS and kind.__module__.startswith("torch."):
                return _KINDS[kind.__name__](each)
    return None


def _comes_from(error: BaseException, code: CodeType | None) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return True
        trace = trace.tb_next
    return False


def chain_of(error: BaseException) -> list[BaseException]:
    """An error and its causes; the first cause is last."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def place_of(chain: list[BaseException]) -> str:
    """`, at line 8 of modeling_t5.py`: the last line in transformers' code of a model that errors passed through."""
    lines = [found for each in chain if (found := _line(each)) is not None]
    return f", at {lines[-1]}" if lines else ""


def _line(error: BaseException) -> str | None:
    found, trace = None, error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.name.startswith("modeling_"):
            found = f"line {trace.tb_lineno} of {file.name}"
        trace = trace.tb_next
    return found
