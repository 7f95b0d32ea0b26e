"""Whether a graph's inputs and outputs are those that its spec promises."""

from __future__ import annotations

from posexport.spec.contract import SUMS, Values, graph_inputs, graph_outputs, smallest
from posexport.spec.spec import Spec


def contract_violation(spec: Spec, inputs: Values, outputs: Values) -> str | None:
    """The first way in which a graph breaks the contract of its spec, or None."""
    return (
        _breach("input", graph_inputs(spec), inputs)
        or _breach("output", graph_outputs(spec), outputs)
        or _uneven(spec, {**inputs, **outputs})
    )


def _breach(kind: str, wanted: Values, found: Values) -> str | None:
    """The first way in which a graph's inputs or outputs are not those of its spec, or None."""
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            return f"the graph lacks the {kind} {name!r}: it has {', '.join(found) or 'none'}"
        have_shape, have_dtype = found[name]
        if have_dtype != dtype:
            return f"the graph's {kind} {name!r} is {have_dtype}, its spec says {dtype}"
        if len(have_shape) != len(shape) or not all(
            have == want or (isinstance(want, str) and (isinstance(have, str) or have >= smallest(want)))
            for want, have in zip(shape, have_shape, strict=True)
        ):
            return f"the graph's {kind} {name!r} has shape {list(have_shape)}, its spec says {list(shape)}"
    extra = [name for name in found if name not in wanted]
    return f"the graph has the {kind} {extra[0]!r}, which its spec has not" if extra else None


def _uneven(spec: Spec, found: Values) -> str | None:
    """A dimension that is fixed in one place and another size, or free, in another, or a sum that isn't that of its
    parts; None where all agree."""
    sizes: dict[str, tuple[str, int | str]] = {}
    for name, (shape, _) in {**graph_inputs(spec), **graph_outputs(spec)}.items():
        for want, have in zip(shape, found[name][0], strict=True):
            if isinstance(want, str):
                have = have if isinstance(have, int) else "free"
                where, before = sizes.setdefault(want, (name, have))
                if have != before:
                    return f"the graph's {want} is {before} in {where!r} and {have} in {name!r}: it must be the same"
    for total, parts in SUMS.items():
        name, have = sizes.get(total, ("", "free"))
        terms = [sizes[part][1] for part in parts if part in sizes]
        if isinstance(have, int) and not (
            all(isinstance(term, int) for term in terms) and have == sum(map(int, terms))
        ):
            told = " + ".join(f"{part} {term}" for part, term in zip(parts, terms, strict=True))
            return f"the graph's {total} in {name!r} is fixed to {have}: it must be the sum of {told}"
    return None
