"""Options that exports of whole models and of modules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from posexport.errors import FieldError
from posexport.export import support
from posexport.spec.fields import integer, text


@attrs.frozen(kw_only=True)
class GraphOptions:
    """How a graph is written whose block is not described by options."""

    form: str = text("decomposed", "form of the graph")
    target: str = text("portable", "what the form is lowered for")
    opset: int | None = integer(None, "ONNX opset")
    output: str | None = text(None, "the file to write")


T = TypeVar("T", bound=GraphOptions)


def graph_options(kind: type[T], given: Mapping[str, Any], complaint: str) -> T:
    """The options that were given; RequestError with the `complaint` for one that the class doesn't have."""
    names = {field.name for field in attrs.fields(kind)}
    for name in given:
        if name not in names:
            raise FieldError(name, complaint)
    options = kind(**given)
    support.checked_opset(None, options.form, options.target, options.opset)
    return options
