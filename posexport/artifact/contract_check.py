"""Whether a graph's inputs and outputs are those that its spec promises."""

from __future__ import annotations

from posexport.spec.contract import SUMS, Values, graph_inputs, graph_outputs, smallest
from posexport.spec.spec import Spec


def contract_violation(spec: Spec, inputs: Values, outputs: Values) -> str | None:
    """The first way in which a graph breaks the contract of its spec, or None."""
    return (
        _value_violation("input", graph_inputs(spec), inputs)
        or _value_violation("output", graph_outputs(spec), outputs)
        or _dimension_violation(spec, {**inputs, **outputs})
    )


def _value_violation(kind: str, expected: Values, actual: Values) -> str | None:
    """The first input or output that is missing, unknown, or of another shape or dtype than expected."""
    for name, (shape, dtype) in expected.items():
        if name not in actual:
            return f"the graph lacks the {kind} {name!r}: it has {', '.join(actual) or 'none'}"
        actual_shape, actual_dtype = actual[name]
        if actual_dtype != dtype:
            return f"the graph's {kind} {name!r} is {actual_dtype}, its spec says {dtype}"
        if len(actual_shape) != len(shape) or not all(map(_fits, actual_shape, shape)):
            return f"the graph's {kind} {name!r} has shape {list(actual_shape)}, its spec says {list(shape)}"
    unknown = [name for name in actual if name not in expected]
    return f"the graph has the {kind} {unknown[0]!r}, which its spec has not" if unknown else None


def _fits(actual: int | str, expected: int | str) -> bool:
    """Whether a dimension is the expected size, or may stand for a named one."""
    if actual == expected:
        return True
    return isinstance(expected, str) and (isinstance(actual, str) or actual >= smallest(expected))


def _dimension_violation(spec: Spec, values: Values) -> str | None:
    """A dimension with two sizes, or fixed in one value and free in another; or a sum that is not that of its parts."""
    sizes: dict[str, tuple[str, int | str]] = {}
    for name, (shape, _) in {**graph_inputs(spec), **graph_outputs(spec)}.items():
        for dim, actual in zip(shape, values[name][0], strict=True):
            if isinstance(dim, str):
                size = actual if isinstance(actual, int) else "free"
                other, known = sizes.setdefault(dim, (name, size))
                if size != known:
                    return f"the graph's {dim} is {known} in {other!r} and {size} in {name!r}: it must be the same"
    for total, parts in SUMS.items():
        name, size = sizes.get(total, ("", "free"))
        terms = [sizes[part][1] for part in parts if part in sizes]
        numbers = [term for term in terms if isinstance(term, int)]
        if isinstance(size, int) and (len(numbers) < len(terms) or size != sum(numbers)):
            written = " + ".join(f"{part} {term}" for part, term in zip(parts, terms, strict=True))
            return f"the graph's {total} in {name!r} is fixed to {size}: it must be the sum of {written}"
    return None
