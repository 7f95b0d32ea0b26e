"""May Triton run the requests of several clients as one batch? What its dynamic batcher does to each kind of artifact.

The batcher joins requests along the first dimension, and only requests whose other dimensions are equal. So every row
must come out as it would alone, and shapes must meet often enough to be worth a queue:

- no cache, or a shared one (a buffer of one length for all; `write_indices` holds each row's own): joined;
- a grown cache: its length is part of the shape, and differs from client to client, so nothing would be joined;
- frequencies that depend on the largest position of the batch (`dynamic`, `longrope`): a row would change with its
  neighbours, so never;
- GroupQueryAttention takes several tokens beside a cache in a batch of one only: a joined prefill would fail.

Where requests are not joined, `max_batch_size` is 0 and the batch stands in `dims`: with any other value Triton's
TensorRT backend turns its batcher on by itself. A single request may still hold several rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.artifact.plan import MOMENTS
from posexport.errors import RequestError
from posexport.models.scaling import SCALINGS
from posexport.spec.contract import Values
from posexport.spec.spec import Spec

MAX_BATCH = 8
"""The most rows that are joined where no plan and no request says otherwise."""


@attrs.frozen(kw_only=True)
class Batching:
    """`max_batch_size` is 0 where Triton joins nothing; `reason` says why, or on what condition it joins."""

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
    profiles: Mapping[str, Mapping[str, list[int]]] | None = None,
    asked: int | None = None,
) -> Batching:
    """What suits an artifact: `values` are its inputs and outputs, `operators` those of an ONNX graph, `profiles` those
    of a plan, `asked` the most rows that the user wants joined (0: none).

    Raises RequestError where joining that many would be wrong or impossible.
    """
    least, usual, most = _rows(values, profiles)
    never = _never(spec, values, profiles, least)
    if never is not None:
        if asked:
            raise RequestError(f"max_batch_size is {asked}, but requests can't be joined: {never}; drop it, or give 0.")
        return Batching(max_batch_size=0, reason=never)
    if asked is not None and most is not None and asked > most:
        raise RequestError(
            f"max_batch_size is {asked}, the plan takes up to {most} rows: give {most} or less, or compile it with "
            "another --profile."
        )
    seldom = _seldom(spec, operators)
    if asked is None and seldom is not None:
        return Batching(max_batch_size=0, reason=seldom)
    if asked == 0:
        return Batching(max_batch_size=0, reason="max_batch_size is 0, as asked for")
    size = asked or most or MAX_BATCH
    if size == 1:
        why = "max_batch_size is 1, as asked for" if asked else "the plan takes a single row"
        return Batching(max_batch_size=1, reason=why)
    preferred = tuple(sorted({min(usual, size), size} - {1})) if usual is not None else ()
    promised = "" if seldom is None else f"; as asked for, though {seldom}"
    return Batching(max_batch_size=size, preferred=preferred, reason=_condition(spec) + promised)


def _rows(values: Values, profiles: Mapping[str, Mapping[str, list[int]]] | None) -> tuple[int, int | None, int | None]:
    """The least, usual and largest batch of a plan's profile; (1, None, None) of a graph."""
    name = next((name for name, (shape, _) in values.items() if shape[:1] == ("batch",)), None)
    if profiles is None or name is None or name not in profiles:
        return 1, None, None
    least, usual, most = (profiles[name][moment][0] for moment in MOMENTS)
    return least, usual, most


def _never(spec: Spec, values: Values, profiles: Any, least: int) -> str | None:
    """Why joined requests would fail or come out otherwise, or None."""
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
    """Why joining, though right, is not worth it or needs a promise of the clients, or None."""
    if spec.kv_cache == "concat":
        return "caches grow, so each client's past_seq is another and requests of unequal shapes are not joined"
    if spec.kv_cache == "shared" and "GroupQueryAttention" in operators:
        return (
            "GroupQueryAttention takes several tokens beside a cache in a batch of one only (--max-batch-size is right "
            "where clients send one token at a time)"
        )
    return None


def _condition(spec: Spec) -> str:
    """What requests must have in common to be joined."""
    if spec.kv_cache == "shared":
        return "requests of equal seq and max_seq are joined; write_indices holds each row's own length"
    padded = "; pad shorter ones and say so in attention_mask" if spec.padding_mask else ""
    seqs = "seq and encoder_seq" if spec.cross else "seq"
    return f"requests of equal {seqs} are joined{padded}"
