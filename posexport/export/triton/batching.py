"""Whether Triton may run the requests of several clients as one batch, for each kind of artifact.

Triton's dynamic batcher joins requests along the first dimension, and only requests whose other dimensions are equal.
Every row must give the same output as by itself, and equal shapes must be frequent enough to be worth a queue:

- no cache, or a shared one (a buffer of one length for all rows; `write_indices` has the length of each): joined;
- a grown cache: its length is part of the shape and differs between clients, so no requests would be joined;
- frequencies that depend on the largest position of the batch (`dynamic`, `longrope`): a row would change with its
  neighbours, so requests are never joined;
- GroupQueryAttention takes several tokens with a cache only in a batch of one: a joined prefill would fail.

If requests are not joined, `max_batch_size` is 0 and the batch is in `dims`: with any other value, Triton's TensorRT
backend enables its batcher by itself. A single request may still have several rows.
"""

from __future__ import annotations

import attrs

from posexport.artifact.manifest import MOMENTS
from posexport.artifact.profiles import ShapeProfiles
from posexport.errors import RequestError
from posexport.models.scaling import SCALINGS
from posexport.spec.contract import Values
from posexport.spec.spec import Spec

MAX_BATCH = 8
"""By default, at most this many rows are joined."""


@attrs.frozen(kw_only=True)
class Batching:
    """`max_batch_size` is 0 if Triton joins no requests; `reason` says why, or under which condition it joins them."""

    max_batch_size: int
    preferred: tuple[int, ...] = ()
    reason: str

    @property
    def joined(self) -> bool:
        """Whether requests run together."""
        return self.max_batch_size > 1


def batching_of(
    spec: Spec,
    values: Values,
    *,
    operators: frozenset[str] = frozenset(),
    profiles: ShapeProfiles | None = None,
    requested: int | None = None,
) -> Batching:
    """The batching that suits an artifact with these inputs and outputs (`values`).

    `operators` are those of an ONNX graph, `profiles` those of a plan. `requested` is the most rows that the user wants
    joined (0: none). Raises RequestError if joining that many would be wrong or impossible.
    """
    least, usual, most = _rows(values, profiles)
    never = _never(spec, values, profiles, least)
    return decided(requested, never, _seldom(spec, operators), _condition(spec), usual, most)


def decided(
    requested: int | None,
    never: str | None,
    seldom: str | None,
    condition: str,
    usual: int | None = None,
    most: int | None = None,
) -> Batching:
    """The batching by what was requested, and by why joining is wrong (`never`), or of little use (`seldom`).

    `condition` is what requests must have in common; `usual` and `most` are the rows of a plan's profile.
    """
    if never is not None:
        if requested:
            raise RequestError(
                f"max_batch_size is {requested}, but requests can't be joined: {never}; drop it, or give 0."
            )
        return Batching(max_batch_size=0, reason=never)
    if requested is not None and most is not None and requested > most:
        raise RequestError(
            f"max_batch_size is {requested}, the plan takes up to {most} rows: give {most} or less, or compile it with "
            "another --profile."
        )
    if requested is None and seldom is not None:
        return Batching(max_batch_size=0, reason=seldom)
    if requested == 0:
        return Batching(max_batch_size=0, reason="max_batch_size is 0, as requested")
    size = requested or most or MAX_BATCH
    if size == 1:
        why = "max_batch_size is 1, as requested" if requested else "the plan takes a single row"
        return Batching(max_batch_size=1, reason=why)
    preferred = tuple(sorted({min(usual, size), size} - {1})) if usual is not None else ()
    caveat = "" if seldom is None else f"; as requested, though {seldom}"
    return Batching(max_batch_size=size, preferred=preferred, reason=condition + caveat)


def _rows(values: Values, profiles: ShapeProfiles | None) -> tuple[int, int | None, int | None]:
    """The smallest, usual and largest batch of a plan's profile; (1, None, None) for a graph."""
    name = next((name for name, (shape, _) in values.items() if shape[:1] == ("batch",)), None)
    if profiles is None or name is None or name not in profiles:
        return 1, None, None
    least, usual, most = (profiles[name][moment][0] for moment in MOMENTS)
    return least, usual, most


def _never(spec: Spec, values: Values, profiles: ShapeProfiles | None, least: int) -> str | None:
    """Why joined requests would fail or give other outputs; None if they would not."""
    fixed = [name for name, (shape, _) in values.items() if shape[:1] != ("batch",)]
    if fixed:
        return f"the first dimension of {fixed[0]} is fixed, so a request holds all rows"
    for kind in spec.distinct_layers():
        scaling = getattr(kind.encoding, "scaling", None)
        if scaling is not None and SCALINGS[scaling].by_length:
            return f"scaling {scaling} depends on the largest position of the batch, so rows would change each other"
    if least > 1:
        return f"the plan takes no fewer than {least} rows, and Triton may run a single request alone"
    if profiles is not None and any(len(shape) == 1 for shape, _ in values.values()):
        return "a plan's input of the shape [batch] has no dimension left for Triton's TensorRT backend"
    return None


def _seldom(spec: Spec, operators: frozenset[str]) -> str | None:
    return seldom(
        "past_seq", spec.kv_cache == "concat", spec.kv_cache == "shared" and "GroupQueryAttention" in operators
    )


def seldom(length: str, grows: bool, grouped: bool) -> str | None:
    """Why joining is correct but not worth it, or correct for some clients only; else None.

    `grows` is set for a cache of this `length`, `grouped` where GroupQueryAttention reads a cache.
    """
    if grows:
        return f"caches grow, so {length} differs between clients and requests of unequal shapes are not joined"
    if grouped:
        return (
            "GroupQueryAttention takes several tokens beside a cache in a batch of one only (use --max-batch-size "
            "where clients send one token at a time)"
        )
    return None


def _condition(spec: Spec) -> str:
    """What requests must have in common to be joined."""
    if spec.kv_cache == "shared":
        return "requests of equal seq and max_seq are joined; write_indices holds the length of each row"
    padded = "; pad shorter ones and say so in attention_mask" if spec.padding_mask else ""
    seqs = "seq and encoder_seq" if spec.cross else "seq"
    return f"requests of equal {seqs} are joined{padded}"
