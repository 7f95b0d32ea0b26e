"""Shape profiles of a plan: the smallest, usual and largest shape of each input. Imports no engine.

A request names a dimension, `seq=1:1024:4096` (min:opt:max, or one number for all three), or an input,
`position_ids=1x1,1x1024,8x4096`. Fixed last dimensions of an input may be left out. Inputs share dimensions by name, so
a request for one input or dimension also applies to other inputs.

TensorRT knows no sums. total_seq spans the sums of past_seq and seq, and no request may give other sizes. With a buffer
there is no past_seq, and total_seq spans all slots of the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from posexport.artifact.manifest import MOMENTS
from posexport.errors import RequestError, located, unknown
from posexport.spec.contract import SUMS, Shape, smallest

ShapeProfiles = Mapping[str, Mapping[str, Sequence[int]]]
"""{input: {min, opt, max}}, the shapes for which a plan is built."""

Range = tuple[int, int, int]
"""A dimension's smallest, usual and largest size."""

DEFAULTS: Mapping[str, Range] = {
    "batch": (1, 1, 8),
    "seq": (1, 1024, 4096),
    "past_seq": (0, 1024, 4096),
    "max_seq": (1, 4096, 4096),
    "encoder_seq": (1, 1024, 4096),
}
"""The range of a dynamic dimension if no request gives one."""

_BESIDES = {"seq": 0, "past_seq": 1, "max_seq": 0}
"""The dimensions that a table of positions limits, and how many of its rows other dimensions need at least."""

_LARGEST = 2**31 - 1
_HOW = "write it like seq=1:1024:4096 or position_ids=1x1,1x1024,8x4096"


def profiles_of(
    shapes: Mapping[str, Shape],
    requests: Iterable[str] = (),
    seq_limit: int | None = None,
    fixed: Mapping[str, int] | None = None,
    *,
    consecutive: bool = False,
) -> dict[str, dict[str, list[int]]]:
    """Return {input: {min, opt, max}} for every input. A dynamic dimension in `shapes` is a name.

    `seq_limit` limits the defaults of `seq` and of caches (the number of positions in a trained table). `fixed`
    contains the sizes of dimensions that the graph fixes. If positions are consecutive, no request may have more tokens
    than `seq_limit`. Raises RequestError for a request that names nothing, is not ordered min <= opt <= max, or
    contradicts another request, a fixed dimension, a sum or that limit.
    """
    ranges: dict[str, tuple[Range, str]] = {}
    dynamic = list(dict.fromkeys(dim for shape in shapes.values() for dim in shape if isinstance(dim, str)))
    for request in requests:
        with located(f"--profile {request!r}"):
            for dim, requested in _read_request(request, shapes, dynamic).items():
                if consecutive and dim == "seq" and seq_limit is not None and requested[-1] > seq_limit:
                    raise RequestError(
                        f"seq reaches {requested[-1]}, and the file has {seq_limit} consecutive positions: give less."
                    )
                before, by = ranges.setdefault(dim, (requested, request))
                if before != requested:
                    raise RequestError(
                        f"{dim} is {_text(requested)} here and {_text(before)} in --profile {by!r}: keep one of them."
                    )
    known: dict[str, Range] = {dim: (size, size, size) for dim, size in (fixed or {}).items()}
    beside = {*dynamic, *known}
    sums = [dim for dim in dynamic if dim in SUMS and not ("max_seq" in beside and "past_seq" not in beside)]
    known |= {
        dim: ranges[dim][0] if dim in ranges else _default(dim, beside, seq_limit)
        for dim in dynamic
        if dim not in (*sums, "total_seq")
    }
    spans = known | {dim: _sum(dim, known, *ranges.get(dim, (None, ""))) for dim in sums}
    if "total_seq" in dynamic and "total_seq" not in sums:  # no input says how full a buffer is
        spans["total_seq"] = ranges["total_seq"][0] if "total_seq" in ranges else (1, *known["max_seq"][1:])
    return {
        name: {
            moment: [spans[dim][at] if isinstance(dim, str) else dim for dim in shape]
            for at, moment in enumerate(MOMENTS)
        }
        for name, shape in shapes.items()
    }


def check_shapes(profiles: ShapeProfiles, shapes: Mapping[str, Iterable[int]]) -> None:
    """Raise RequestError unless `shapes` has exactly one shape for each input, between its min and max."""
    if set(shapes) != set(profiles):
        raise RequestError(f"inputs {', '.join(sorted(shapes))} were given: the plan takes {', '.join(profiles)}.")
    for name, given in shapes.items():
        shape, smallest, largest = list(given), profiles[name]["min"], profiles[name]["max"]
        if len(shape) != len(smallest) or not all(
            least <= dim <= most for least, dim, most in zip(smallest, shape, largest, strict=True)
        ):
            raise RequestError(
                f"input {name!r} has shape {shape}: the plan takes {smallest} to {largest}, so give such a shape or "
                "compile with another --profile."
            )


def ranges_of(profiles: ShapeProfiles, shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return the dynamic dimensions of a plan's inputs with their min:opt:max. Sums are left out."""
    ranges: dict[str, str] = {}
    for name, shape in shapes.items():
        for dim, low, usual, high in zip(shape, *(profiles[name][moment] for moment in MOMENTS), strict=True):
            if isinstance(dim, str) and dim not in SUMS:
                ranges[dim] = _text((low, usual, high))
    return ranges


def lower_requests(ranges: Mapping[str, str]) -> list[str]:
    """Return requests with a quarter of the largest sizes of `ranges`, but not less than the usual sizes."""
    requests = []
    for dim, text in ranges.items():
        low, usual, high = map(int, text.split(":"))
        if high > (lower := max(usual, high // 4)):
            requests.append(f"{dim}={_text((low, usual, lower))}")
    return requests


def default_requests(dims: Iterable[str]) -> str:
    """Return the default profile of these dynamic dimensions as requests: `batch=1:1:8 seq=1:1024:4096`."""
    dims = list(dims)
    return " ".join(f"{dim}={_text(_default(dim, dims, None))}" for dim in dims)


def describe(profiles: ShapeProfiles) -> list[tuple[str, str]]:
    """Return (input, "1x1 to 8x4096, tuned for 1x1024") for people."""
    rows = []
    for name, shapes in profiles.items():
        smallest, usual, largest = ("x".join(map(str, shapes[moment])) for moment in MOMENTS)
        rows.append((name, usual if smallest == largest else f"{smallest} to {largest}, tuned for {usual}"))
    return rows


def _default(dim: str, beside: Iterable[str], seq_limit: int | None) -> Range:
    if dim not in DEFAULTS:
        raise RequestError(f"dimension {dim!r} has no default: give it with --profile {dim}=MIN:OPT:MAX.")
    least, usual, largest = DEFAULTS[dim]
    if dim == "seq" and not {"past_seq", "max_seq"}.isdisjoint(beside):
        usual = 1  # with a cache, most runs add one token
    limit = max(seq_limit - _BESIDES[dim], least) if dim in _BESIDES and seq_limit is not None else largest
    return least, min(usual, limit), min(largest, limit)


def _sum(dim: str, spans: Mapping[str, Range], requested: Range | None, request: str) -> Range:
    """Return the range of a sum from the ranges of its parts. RequestError if a request gives another range."""
    parts = SUMS[dim]
    if not set(parts) <= set(spans):
        raise RequestError(f"dimension {dim!r} is {' + '.join(parts)}, which the graph lacks: export it again.")
    low, usual, high = (sum(spans[part][at] for part in parts) for at in range(3))
    if requested is not None and requested != (low, usual, high):
        raise RequestError(
            f"--profile {request!r} gives {dim} {_text(requested)}: it is {' + '.join(parts)}, which span "
            f"{_text((low, usual, high))}, so ask for those alone."
        )
    return low, usual, high


def _read_request(request: str, shapes: Mapping[str, Shape], dynamic: list[str]) -> dict[str, Range]:
    """Return the ranges of dimensions in one request."""
    name, equals, sizes = (part.strip() for part in request.partition("="))
    if not equals or not name or not sizes:
        raise RequestError(f"it is not NAME=SIZES: {_HOW}.")
    if name in shapes:
        return _by_input(shapes[name], sizes)
    if name in dynamic:
        return {name: _ordered(name, [_size(part) for part in _three(sizes, ":", "sizes")])}
    raise unknown("input or dimension", name, [*dynamic, *shapes])


def _three(text: str, separator: str, what: str) -> list[str]:
    """Return the texts of min, opt and max. A single text is used for all three."""
    parts = text.split(separator)
    if len(parts) not in (1, 3):
        raise RequestError(f"it has {len(parts)} {what}, not {separator.join(MOMENTS)} or a single one: {_HOW}.")
    return parts * 3 if len(parts) == 1 else parts


def _by_input(shape: Shape, text: str) -> dict[str, Range]:
    least = max((at + 1 for at, dim in enumerate(shape) if isinstance(dim, str)), default=0)
    columns = [[_size(size) for size in part.split("x")] for part in _three(text, ",", "shapes")]
    for column in columns:
        if not least <= len(column) <= len(shape) or len(column) != len(columns[0]):
            raise RequestError(
                f"it has a shape of {len(column)} dimensions, the input has {list(shape)}: give each shape all of "
                "them, fixed last ones may be left out."
            )
    spans: dict[str, Range] = {}
    for dim, sizes in zip(shape, zip(*columns, strict=True), strict=False):
        if isinstance(dim, str):
            span = _ordered(dim, list(sizes))
            if spans.setdefault(dim, span) != span:
                raise RequestError(f"it gives {dim} two ranges: give it one.")
        elif set(sizes) != {dim}:
            raise RequestError(
                f"it gives {_text(sizes)} where the input has the fixed size {dim}: give that size, or export without "
                "--batch, --seq or --max-seq if one of them fixed it."
            )
    return spans


def _size(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_LARGEST)) and int(text) <= _LARGEST):
        raise _no_size(text, 1)
    return int(text)


def _ordered(dim: str, sizes: list[int]) -> Range:
    low, usual, high = sizes
    if min(sizes) < smallest(dim):
        raise _no_size(str(min(sizes)), smallest(dim))
    if not low <= usual <= high:
        raise RequestError(f"{dim} is {_text(sizes)}, which is not ordered: give min <= opt <= max.")
    return low, usual, high


def _no_size(text: str, least: int) -> RequestError:
    return RequestError(f"{text!r} is no size from {least} to {_LARGEST}: {_HOW}.")


def _text(sizes: Iterable[int]) -> str:
    return ":".join(map(str, sizes))
