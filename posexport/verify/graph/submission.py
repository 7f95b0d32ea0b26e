"""Reads a file that anyone wrote and prepares it: its cases, and the file that it is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.paths import encoder_beside
from posexport.artifact.signing import TrustedKey
from posexport.errors import Reason, RequestError, located
from posexport.graphs.baked import baked_sizes, pinned
from posexport.graphs.bands import band_corners
from posexport.graphs.load import inlined, model_of
from posexport.graphs.roles import Role
from posexport.graphs.tables import lengths_of_tables
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.pool import Pool, result
from posexport.runtimes.tokens import start_tokens
from posexport.verify.graph.cases import GraphCase, drawn_cases, given_case
from posexport.verify.graph.exact_angles import exact_source
from posexport.verify.graph.greedy import GreedyCheck, is_decoder
from posexport.verify.graph.greedy_encoder import TranslationCheck, reads_encoder
from posexport.verify.graph.job import GraphJob
from posexport.verify.graph.pairing import cache_mismatch, mismatch, shared_roles
from posexport.verify.graph.reference import evaluate
from posexport.verify.graph.subject import GraphSubject, read_file, read_subject
from posexport.verify.graph.trained import Trained, trained
from posexport.verify.result import VerifyOverrides


@attrs.frozen(kw_only=True)
class GraphRequest:
    """A request for files that anyone wrote.

    `against` is another file, or `module` the user's torch module. `roles` are those of inputs by name. `inputs` is the
    user's own file with its `arrays`; without it, cases are drawn from `seed` with a `reach`, and `more` further ones.
    """

    against: Path | None = None
    module: str | None = None
    roles: Mapping[str, str] = attrs.field(factory=dict)
    inputs: Path | None = None
    arrays: Arrays | None = None
    seed: int = 0
    reach: Mapping[str, int] = attrs.field(factory=dict)
    more: int = 0


def make_graph_job(
    graph: GraphFile,
    request: GraphRequest,
    pool: Pool,
    runtimes: Mapping[str, Runtime],
    overrides: VerifyOverrides,
    trusted: Sequence[TrustedKey] = (),
) -> GraphJob:
    """The job of a file; RequestError if it can't be verified, for example if the role of an input can't be guessed."""
    subject = read_subject(graph, trusted)
    other = None if request.against is None else read_subject(read_file(request.against))
    roles, differs = _paired_roles(subject, other, request)
    exact = None if other is None or differs is not None else exact_source(subject, other, request.roles, pool)
    checkpoint = checkpoint_of(request.module)
    if checkpoint is not None:  # before inputs of the sizes that its configuration states are drawn
        _check_opens(pool, subject, checkpoint)
    own = Trained() if checkpoint is None else trained(checkpoint)
    tables = own.tables(roles) if checkpoint is not None or other is not None else {}
    lengths = lengths_of_tables(inlined(model_of(graph)).graph) if other is not None or request.module else set[int]()
    cases = [] if differs is not None else _cases(subject, request, roles, own, lengths)
    if checkpoint is not None:
        roles = own.roles(roles)
    greedy = None
    if checkpoint is not None:
        greedy = _greedy_check(
            pool=pool,
            subject=subject,
            roles=roles,
            module=str(checkpoint),
            trained_length=own.decodes,
            seed=request.seed,
            tolerance=overrides.tolerance,
            trusted=trusted,
        )
    return GraphJob(
        subject=subject,
        pool=pool,
        runtimes=runtimes,
        overrides=overrides,
        cases=cases,
        against=exact or other,
        reference=None if exact is None else f"{request.against} with exact angles",
        module=request.module,
        mismatch=differs,
        given=request.inputs is not None,
        seed=request.seed,
        other_roles=_other_roles(graph, roles),
        greedy=greedy,
        trained=own,
        tables=tables,
        lengths=lengths,
    )


def _cases(
    subject: GraphSubject, request: GraphRequest, roles: Mapping[str, Role], own: Trained, lengths: Iterable[int]
) -> list[GraphCase]:
    """The user's own inputs, or drawn ones that reach the known sizes of the model."""
    weights, seed = subject.weight_count, request.seed
    if checkpoint_of(request.module) is not None:
        corners, roles = [*own.corners(roles, weights, seed)], own.roles(roles)
    else:
        corners = [] if request.against is None else [*own.table_corners(roles, weights)]
    if request.inputs is not None and request.arrays is not None:
        with located(repr(str(subject.path))):
            return [given_case(request.inputs, request.arrays, subject.inputs, roles)]
    corners += own.length_corners(lengths, weights)
    corners += band_corners(roles, seed, own.cost(roles, weights, subject.outputs))
    with located(repr(str(subject.path))):
        return drawn_cases(roles, seed, request.reach, request.more, corners, own.length)


def _greedy_check(
    *, subject: GraphSubject, roles: Mapping[str, Role], module: str, trusted: Sequence[TrustedKey], **given: Any
) -> GreedyCheck | None:
    """The check of a decoder's tokens, None for a file without tokens. The encoder beside it must be signed too."""
    given |= {"subject": subject, "roles": roles, "module": module}
    if roles and is_decoder(subject):
        return GreedyCheck(**given)
    if not roles or not reads_encoder(subject):
        return None
    path = encoder_beside(subject.path)
    encoder = None if path is None else read_subject(read_file(path, trusted), trusted)
    return TranslationCheck(encoder=encoder, begin=start_tokens(Path(module)), **given)


def _other_roles(graph: GraphFile, roles: Mapping[str, Role]) -> Iterator[dict[str, Role]]:
    """The roles with the sizes that the graph may have been made for."""
    for sizes in baked_sizes(model_of(graph), roles):
        yield pinned(roles, sizes)


def _paired_roles(
    subject: GraphSubject, other: GraphSubject | None, request: GraphRequest
) -> tuple[dict[str, Role], Reason | None]:
    """The roles of inputs, and how the file differs from `other`: there are no roles then.

    The user's own inputs don't need roles.
    """
    if other is not None and (differs := mismatch(subject, other)) is not None:
        return {}, differs
    if request.inputs is not None:
        return _known_roles(subject, request.roles), None
    roles = subject.roles(request.roles)
    if other is None:
        return roles, None
    theirs = other.roles({name: role.kind for name, role in roles.items()})
    differs = cache_mismatch(roles, theirs, other.path.name)
    return (shared_roles(roles, theirs), None) if differs is None else ({}, differs)


def _check_opens(pool: Pool, subject: GraphSubject, checkpoint: Path) -> None:
    """RequestError if the checkpoint can't be opened, or is not that of the file, before any case is evaluated."""
    failure = result(evaluate(pool, subject.path, [], {"module": str(checkpoint)})).failure
    if failure is not None:
        raise RequestError(f"{failure.text.rstrip('.')}.")


def _known_roles(subject: GraphSubject, given: Mapping[str, str]) -> dict[str, Role]:
    """Roles by name; none if one can't be guessed, since the user's own inputs don't need them."""
    try:
        return subject.roles(given)
    except RequestError:
        if given:
            raise
        return {}
