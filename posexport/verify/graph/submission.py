"""A file that anyone wrote, read and made ready: its cases, and the file that it is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.graph_file import GraphFile
from posexport.artifact.paths import encoder_beside
from posexport.artifact.signing import TrustedKey
from posexport.errors import RequestError, located
from posexport.graphs.baked import baked_sizes, pinned
from posexport.graphs.bands import band_corners
from posexport.graphs.cases import Corner
from posexport.graphs.load import inlined, model_of
from posexport.graphs.roles import Role
from posexport.graphs.tables import lengths_of_tables
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.pool import Pool, result
from posexport.runtimes.tokens import start_tokens
from posexport.verify.graph.cases import drawn_cases, given_case
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
    """What was asked for of files that anyone wrote: `against` another one or the user's torch `module`, `roles` of
    inputs by name, the user's own `inputs` with their `arrays`, or cases from `seed` with a `reach` and so many `more`.
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
    """The job of a file; RequestError where it can't be verified, such as for an input whose role can't be guessed."""
    subject = read_subject(graph, trusted)
    other = None if request.against is None else read_subject(read_file(request.against))
    differs = None if other is None else mismatch(subject, other)
    roles, theirs = ({}, {}) if differs is not None else _roles(subject, other, request)
    if other is not None and theirs:
        differs = cache_mismatch(roles, theirs, other.path.name)
        roles = {} if differs is not None else shared_roles(roles, theirs)
    exact = None if other is None or differs is not None else exact_source(subject, other, request.roles, pool)
    checkpoint = checkpoint_of(request.module)
    own, tables, corners = Trained(), dict[str, Role](), list[Corner]()
    if checkpoint is not None:
        own = trained(checkpoint)
        tables, corners = own.tables(roles), list(own.corners(roles, subject.weight_count, request.seed))
        roles = own.roles(roles)
    elif other is not None:
        tables, corners = own.tables(roles), list(own.table_corners(roles, subject.weight_count))
    lengths = lengths_of_tables(inlined(model_of(graph)).graph) if other is not None or request.module else set[int]()
    corners += own.length_corners(lengths, subject.weight_count)
    corners += band_corners(roles, request.seed, own.cost(roles, subject.weight_count, subject.outputs))
    if differs is not None:
        cases = []
    elif request.inputs is not None and request.arrays is not None:
        with located(repr(str(subject.path))):
            cases = [given_case(request.inputs, request.arrays, subject.inputs, roles)]
    else:
        cases = drawn_cases(roles, request.seed, request.reach, request.more, corners, own.length)
    greedy = None
    if checkpoint is not None:
        _check_opens(pool, subject, checkpoint)
        greedy = _greedy_check(
            pool=pool,
            subject=subject,
            roles=roles,
            module=str(checkpoint),
            trained_length=own.decodes,
            seed=request.seed,
            tolerance=overrides.tolerance,
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


def _greedy_check(*, subject: GraphSubject, roles: Mapping[str, Role], module: str, **given: Any) -> GreedyCheck | None:
    """The check of a decoder's tokens, None for a file that makes none."""
    given |= {"subject": subject, "roles": roles, "module": module}
    if roles and is_decoder(subject):
        return GreedyCheck(**given)
    if not roles or not reads_encoder(subject):
        return None
    path = encoder_beside(subject.path)
    encoder = None if path is None else read_subject(read_file(path))
    return TranslationCheck(encoder=encoder, begin=start_tokens(Path(module)), **given)


def _other_roles(graph: GraphFile, roles: Mapping[str, Role]) -> Iterator[dict[str, Role]]:
    """The roles with the sizes that the graph may have been made for."""
    for sizes in baked_sizes(model_of(graph), roles):
        yield pinned(roles, sizes)


def _roles(
    subject: GraphSubject, other: GraphSubject | None, request: GraphRequest
) -> tuple[dict[str, Role], dict[str, Role]]:
    """The roles of inputs, and those that they have in the other file; the user's own inputs need none."""
    if request.inputs is not None:
        return _known_roles(subject, request.roles), {}
    roles = subject.roles(request.roles)
    return roles, {} if other is None else other.roles({name: role.kind for name, role in roles.items()})


def _check_opens(pool: Pool, subject: GraphSubject, checkpoint: Path) -> None:
    """RequestError where the checkpoint can't be opened, or is not that of the file, before any case is evaluated."""
    failure = result(evaluate(pool, subject.path, [], {"module": str(checkpoint)})).failure
    if failure is not None:
        raise RequestError(f"{failure.text.rstrip('.')}.")


def _known_roles(subject: GraphSubject, given: Mapping[str, str]) -> dict[str, Role]:
    """Roles by name; none where one can't be guessed, since the user's own inputs need none."""
    try:
        return subject.roles(given)
    except RequestError:
        if given:
            raise
        return {}
