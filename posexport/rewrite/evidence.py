"""Evidence for each rewritten attention: the graph before and after, in float64, on the same drawn features.

The model's inputs are drawn by their roles. Random features replace the queries, keys and values of every site, in both
graphs, so that sites don't influence one another. Masks, positions, cosines and caches are the model's own. The results
of the sites must agree to LIMIT of the largest value, for every query that sees a key, and where the graph gives zeros
to a query that sees none. This is tested, on the stated number of cases, and not proved.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.score_axes import by_query
from posexport.graphs.attention.scores import HIDDEN
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.frames import Override
from posexport.rewrite.shared_cache import buffered
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import to_tensors

ShapesOn = Callable[[Iterable["ir.Value"], Arrays], dict["ir.Value", tuple[int, ...]]]

LIMIT = 1e-9
"""How far two float64 computations of the same function may differ, as a part of the largest value."""

_MAGNITUDES = (1.0, 8.0, 1.0, 0.02)
"""The magnitudes of the features of the cases, in turn."""

UNSEEN = HIDDEN
"""If all logits of a query are below this, it sees no key."""


@attrs.define(kw_only=True)
class Evidence:
    """What the cases showed for one site: the largest difference, relative to the largest value, and their number.

    `problem` says why a case gave no number.
    """

    error: float = 0.0
    cases: int = 0
    problem: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the site is the same function, as far as it was tried."""
        return not self.differs and self.cases > 0

    @property
    def differs(self) -> bool:
        """Whether it is another function."""
        return self.problem is not None or not self.error <= LIMIT

    def add(self, other: Evidence) -> None:
        """Add the results of further cases."""
        self.error, self.cases = max(self.error, other.error), self.cases + other.cases
        self.problem = self.problem or other.problem


def evidence_of(
    before: ir.Model,
    after: ir.Model,
    attentions: Sequence[Attention],
    cases: Sequence[DrawnInputs],
    *,
    buffers: Sequence[str] = (),
    shapes_on: ShapesOn | None = None,
) -> dict[str, Evidence]:
    """The evidence for each site, by name. `buffers` are the inputs of `after` that are caches of a fixed length.

    With `shapes_on`, which gives the shapes on other inputs if it knows them, the values that features replace need not
    be computed. Sites may then differ on inputs that the model as a whole doesn't take; such inputs don't count.
    """
    old, new = Evaluator(before), Evaluator(after)
    found = {attention.name: Evidence() for attention in attentions}
    caches = {side.cache.present.name for one in attentions for side in (one.k, one.v) if side.cache is not None}
    sides = [side for attention in attentions for side in (attention.q, attention.k, attention.v)]
    turned = [turn.rotary.source for attention in attentions for turn in attention.turns]
    # a cache is given by its own site
    sources = dict.fromkeys([side.source.value for side in sides if side.source.value.name not in caches] + turned)
    for index, case in enumerate(cases):
        arrays = to_tensors(case.arrays)
        features: dict[str, torch.Tensor] = {}
        overrides: dict[str, Override] = {}
        shapes = {} if shapes_on is None else shapes_on(sources, case.arrays)
        for value in sources:
            override = _drawn(value.name or "", index, features)
            if value in shapes:
                override(torch.empty(shapes[value], device="meta"))
            else:
                overrides[value.name or ""] = override
        skips = bool(features)
        try:
            expected, seen = _expected(old, arrays | features, overrides, attentions)
        except RequestError:
            continue  # the model itself takes no such inputs
        given = buffered(case, buffers, after) if buffers else case.arrays
        inputs = to_tensors(given) | features
        tried = {attention.name: Evidence() for attention in attentions}
        for attention in attentions:
            evidence = tried[attention.name]
            try:
                actual = new.run(inputs, _outputs(attention))
            except RequestError:
                text = f"its replacement can't be computed on inputs such as {case.label}, unlike the graph's own nodes"
                evidence.problem = evidence.problem or text
            else:
                _compare(attention, evidence, expected, actual, *seen[attention.name])
        if skips and any(one.differs for one in tried.values()) and not _takes(old, arrays, [*sources]):
            continue
        for name, evidence in tried.items():
            found[name].add(evidence)
    return found


def _takes(evaluator: Evaluator, inputs: Mapping[str, torch.Tensor], values: Sequence[ir.Value]) -> bool:
    """Whether a model can compute these values on inputs."""
    try:
        evaluator.run(inputs, [value.name or "" for value in values], see=lambda name, value: None)
    except RequestError:
        return False
    return True


def _expected(
    evaluator: Evaluator,
    inputs: Mapping[str, torch.Tensor],
    overrides: Mapping[str, Override],
    attentions: Sequence[Attention],
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, int]]]:
    """The results of the sites, by the names of values, and which queries see a key.

    The latter is, for each site, [B, N, S] and the number of queries: the logits themselves would be too large to keep.
    """
    found: dict[str, torch.Tensor] = {}
    seen: dict[str, tuple[torch.Tensor, int]] = {}
    wanted = dict.fromkeys(name for attention in attentions for name in _outputs(attention))
    logits = dict.fromkeys(attention.logits.name or "" for attention in attentions)

    def note(name: str, value: torch.Tensor) -> None:
        if name in wanted:
            found[name] = value
        for one in attentions if name in logits else ():
            if one.logits.name == name:
                shown = by_query(value, one.logits_axes, one.num_heads)
                seen[one.name] = (shown > UNSEEN).any(-1), one.queries(tuple(value.shape))

    evaluator.run(inputs, [*(wanted | logits)], overrides=overrides, see=note)
    return found, seen


def _outputs(attention: Attention) -> list[str]:
    """The names of a site's outputs: its result, its caches, and values that it rotates."""
    return [*_results(attention), *(turn.rotary.target.name or "" for turn in attention.turns)]


def _results(attention: Attention) -> list[str]:
    caches = [side.cache.present.name or "" for side in (attention.k, attention.v) if side.cache is not None]
    return [attention.output.value.name or "", *caches]


def _compare(
    attention: Attention,
    evidence: Evidence,
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    seen: torch.Tensor,
    queries: int,
) -> None:
    """Compare the outputs of a site. `seen` says which of the queries see a key."""
    compared = False
    for index, name in enumerate(_outputs(attention)):
        want, have = expected[name], actual[name]
        if 0 < index < len(_results(attention)):  # of a buffer, the part that a grown cache has
            have = have[:, :, : want.shape[2]]
        if want.shape != have.shape:
            evidence.problem = f"it gives {name} with shape {list(have.shape)} instead of {list(want.shape)}"
            return
        if index == 0:
            sizes = _sizes(attention, want, queries)
            want, have = (attention.output.layout.to_heads(tensor, sizes) for tensor in (want, have))
            seen = seen.reshape(sizes[:3])
            if attention.divides_zeros:  # its logits don't tell which keys are hidden
                seen = seen & ~torch.isnan(want).all(-1)
            seen = seen | (want == 0).all(-1)  # zeros in place of the mean of hidden keys are the graph's own choice
            want, have = want[seen], have[seen]
        if not torch.isfinite(want).all():
            return  # nothing can be said if the original isn't finite
        if not torch.isfinite(have).all():
            evidence.problem = f"it gives {name} numbers that are not finite"
            return
        if want.numel():
            scale = max(float(want.abs().max()), 1e-300)
            evidence.error = max(evidence.error, float((want - have).abs().max()) / scale)
            compared |= not index  # if no query sees a key, nothing was shown of the site
    evidence.cases += compared


def _sizes(attention: Attention, output: torch.Tensor, queries: int) -> tuple[int, int, int, int]:
    """Batch, heads, queries and features of a result."""
    return (
        output.numel() // (attention.num_heads * queries * attention.value_dim),
        attention.num_heads,
        queries,
        attention.value_dim,
    )


def _drawn(name: str, case: int, drawn: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that replaces a value by random features, always the same for a name and a case; `drawn` gets them."""

    def features(value: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) * 1000 + case)
        size = _MAGNITUDES[case % len(_MAGNITUDES)]
        drawn[name] = size * torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return drawn[name]

    return features
