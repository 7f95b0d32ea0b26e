"""Rewrites a file into a folder: reads it under the guards, and tests each site and the whole graph.

The whole graph must agree with the original; otherwise every attention stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import onnx
import onnx_ir as ir

from posexport.artifact import onnx_file
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.graph_writer import copy_graph, write_graph
from posexport.artifact.loaded import check_source
from posexport.artifact.manifest import manifest_path, tensors_of
from posexport.artifact.onnx_artifact import Artifact, artifact_of
from posexport.artifact.rewrite_record import RewriteSource, WholeGraph
from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.custom_ops.attention_by_queries import WHOLE
from posexport.errors import Reason, RequestError, check_known, located, shown
from posexport.files import check_target, protect, staged
from posexport.graphs.attention.candidates import may_hold_attention, unread
from posexport.graphs.attention.describe import POSITIONS, ROTATION, Describer, undescribed
from posexport.graphs.branches import has_branches, most_of_few
from posexport.graphs.cases import cases_of, of_more_queries, without_keys
from posexport.graphs.expand import domain_of
from posexport.graphs.inspection import described_one
from posexport.graphs.load import model_of
from posexport.graphs.roles import check_drawable, values_of_model
from posexport.progress import Progress, silent
from posexport.rewrite.angles.exact import exact_model
from posexport.rewrite.angles.parameters import UNKNOWN as ANGLES_UNKNOWN
from posexport.rewrite.angles.result import PARITY, SiteAngles
from posexport.rewrite.angles.rewriter import rewrite_exactly
from posexport.rewrite.branches import rewrite_branches, rewrite_with_choices
from posexport.rewrite.request import LOWEST_OPSET, RewriteOptions
from posexport.rewrite.result import ALREADY, KEPT, REWRITTEN, RewriteResult, block_of, rounded, site_record
from posexport.rewrite.rewriter import Rewritten, SiteResult, rewrite_as
from posexport.rewrite.shared_cache import grown_caches
from posexport.rewrite.whole import whole_evidence


def rewrite_into(
    folder: Path, path: Path, target: Path, options: RewriteOptions, progress: Progress = silent
) -> RewriteResult:
    """Rewrite the ONNX file at `path` for `target`; the new files are written into `folder` with their final names.

    RequestError for a file, an option or a target that can't be used, and for a file that is not what its manifest
    says; `folder` is then empty.
    """
    progress("reading the file")
    graph = read_with_weights_on_disk(path)
    check_source(graph)
    for name in graph.external_files():
        protect(graph.path.with_name(name))
    for place in (target, onnx_file.data_path(target), manifest_path(target)):
        check_target(place)
    own = artifact_of(graph) if "posexport.spec" in graph.metadata() else None
    _check(graph, options, own)
    model = model_of(graph)
    progress("recognising attention and testing its replacement")
    write = rewrite_as if options.angles is None else rewrite_exactly
    if options.angles is None and options.kv_cache is None:
        write = rewrite_branches if has_branches(model) else rewrite_with_choices
    with located(repr(str(path))):
        if may_hold_attention(model) and not unread(model):
            check_drawable(_given(model))
        rewritten = write(model, options)
    names = [site.attention.name for site in rewritten.sites]
    with located("--only"):
        for name in options.only:
            check_known("attention", name, names)
    whole = None
    if rewritten.changed:
        _finish(model, rewritten)
        rewritten = _unless_equal(model, rewritten)
    if rewritten.changed:
        progress("comparing the whole graph with the original")
        rewritten, whole = _checked(model, rewritten, options)
    records = tuple(_records(rewritten, options, progress))
    progress("writing the file")
    with staged() as files:
        place = folder / target.name
        if rewritten.changed:
            hashes = write_graph(rewritten.model, graph.path, place, files)
        else:
            hashes = copy_graph(graph, place, files)
    _check_written(place, target)
    return _result(graph, rewritten, whole, hashes, options, own, records)


def _check_written(place: Path, target: Path) -> None:
    """RequestError if the file at `place`, for `target`, can't be read: no runtime would be tried with it then."""
    try:
        read_with_weights_on_disk(place)
    except RequestError as error:
        text = str(error).replace(str(place), str(target)).rstrip(".")
        raise RequestError(
            f"the new file would be wrong, which is a bug in posexport: please report it ({text})."
        ) from None


def exact_into(folder: Path, path: Path, names: Sequence[str], roles: Mapping[str, str], seed: int) -> None:
    """Write the ONNX file at `path` into `folder`, with exact angles in the attentions with these names.

    A file that was rewritten like this must compute the same. RequestError if one of them can't have exact angles.
    """
    graph = read_with_weights_on_disk(path)
    with located(repr(str(path))):
        options = RewriteOptions(roles=roles, only=tuple(names), seed=seed)
        exact = exact_model(model_of(graph), options)
    for name in names:
        if name not in exact.angles or exact.angles[name].state == PARITY:
            raise RequestError(f"{str(path)!r} has no attention {shown(name)} whose angles can be made exact.")
    with staged() as files:
        write_graph(exact.model, graph.path, folder / path.name, files)


def _check(graph: GraphFile, options: RewriteOptions, own: Artifact | None) -> None:
    name = repr(str(graph.path))
    if graph.opset < LOWEST_OPSET:
        raise RequestError(
            f"{name} is of opset {graph.opset}, and {LOWEST_OPSET} is the lowest that is rewritten: export it in a "
            "higher one, or convert it with onnx.version_converter."
        )
    if own is not None and options.kv_cache is not None:
        raise RequestError(
            f"{name} is an artifact of posexport, whose spec says how its cache is: export it again with "
            "--kv-cache shared, or leave that out."
        )
    if own is not None and options.angles is not None and own.spec.angles != options.angles:
        raise RequestError(
            f"{name} is an artifact of posexport, whose spec says how its angles are: export it again with "
            "--angles exact, or leave that out."
        )


def _checked(model: ir.Model, rewritten: Rewritten, options: RewriteOptions) -> tuple[Rewritten, WholeGraph | None]:
    """The rewritten model with the evidence for the whole graph; the original, if the two differ.

    If angles were made exact, the new model is compared with the original with exact angles: at far positions the two
    originals differ on purpose.
    """
    roles = rewritten.roles
    buffers = grown_caches(roles) if options.kv_cache is not None else ()
    views = [(site.view, site.attention.name) for site in rewritten.sites if site.state == REWRITTEN]
    operators = [view.operator_of(name) for view, name in views if view is not None]
    # what one of ONNX Runtime's operators gives to a query that sees no key depends on its kernel
    told = all(one is None or not domain_of(one.node) for one in operators)
    few = most_of_few(rewritten.original, rewritten.model)
    if few is not None:
        few = max(few, WHOLE)  # up to which many queries may be one block
    own = (*(without_keys(roles) if told else ()), *of_more_queries(few))
    cases = cases_of(roles, options.seed, own=own)
    evidence = whole_evidence(rewritten.original, rewritten.model, cases, buffers, few)
    if evidence.problem is None:
        error = None if evidence.untested is not None else rounded(evidence.error)
        return rewritten, WholeGraph(error=error, cases=evidence.cases, untested=evidence.untested, left=evidence.left)
    return _kept(model, rewritten, evidence.problem), None


def _unless_equal(model: ir.Model, rewritten: Rewritten) -> Rewritten:
    """The rewritten model; or the original if both are the same graph, as for a file that was rewritten before."""
    graphs = [onnx_file.skeleton(each).SerializeToString(deterministic=True) for each in (model, rewritten.model)]
    if graphs[0] != graphs[1]:
        return rewritten
    return _kept(model, rewritten, Reason(ALREADY, f"it is in the form {rewritten.form} already"))


def _kept(model: ir.Model, rewritten: Rewritten, reason: Reason) -> Rewritten:
    """The original, with a reason for each site that was rewritten."""
    sites = (
        one if one.state == KEPT else attrs.evolve(one, state=KEPT, reason=reason, angles=_parity(one.angles, reason))
        for one in rewritten.sites
    )
    return attrs.evolve(rewritten, model=model, original=model, changed=False, sites=tuple(sites))


def _parity(angles: SiteAngles | None, reason: Reason) -> SiteAngles | None:
    """The angles of an attention that stays as it was."""
    return angles if angles is None or not angles.changed else SiteAngles(state=PARITY, reason=reason)


def _finish(original: ir.Model, rewritten: Rewritten) -> None:
    """Set what the new model must declare.

    These are the domains and the IR version that its operators need, the metadata of its outputs, and posexport's own
    metadata that are still true.
    """
    model = rewritten.model
    for old, new in zip(original.graph.outputs, model.graph.outputs, strict=True):
        new.doc_string = old.doc_string
        new.metadata_props.update(old.metadata_props)
    used = {node.domain for node in model.graph.all_nodes()} | {*original.opset_imports}
    for domain in [domain for domain in model.opset_imports if domain not in used]:
        model.opset_imports.pop(domain)  # the converter of opsets adds them
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    lowest = onnx.helper.find_min_ir_version_for(opsets, ignore_unknown=True)
    model.ir_version = max(model.ir_version, lowest, 8 if model.functions else 0)
    if "posexport.form" in model.metadata_props and not any(site.state == KEPT for site in rewritten.sites):
        model.metadata_props["posexport.form"] = rewritten.form
        if rewritten.target != "portable":
            model.metadata_props["posexport.target"] = rewritten.target


def _result(
    graph: GraphFile,
    rewritten: Rewritten,
    whole: WholeGraph | None,
    hashes: Mapping[str, str],
    options: RewriteOptions,
    own: Artifact | None,
    records: tuple[Mapping[str, Any], ...],
) -> RewriteResult:
    model = rewritten.model
    return RewriteResult(
        source=RewriteSource(file=graph.path.name, sha256=graph.sha256, external_data=graph.external_sha256),
        attentions=records,
        changed=rewritten.changed,
        whole=whole,
        hashes=hashes,
        block=None if own is None else block_of(own, model.metadata_props),
        form=options.form,
        target=options.target,
        opset=model.opset_imports.get("") or model.opset_imports["ai.onnx"],
        domains=dict(sorted(model.opset_imports.items())),
        inputs=tensors_of(values_of_model(_given(model))),
        outputs=tensors_of(values_of_model(model.graph.outputs)),
    )


def _given(model: ir.Model) -> Sequence[ir.Value]:
    return [value for value in model.graph.inputs if not value.is_initializer()]


def _records(rewritten: Rewritten, options: RewriteOptions, progress: Progress) -> Iterator[dict[str, Any]]:
    describer: Describer | None = None
    for number, site in enumerate(rewritten.sites, 1):
        progress(f"describing attention {number} of {len(rewritten.sites)}")
        if site.view is not None and (describer is None or describer.view is not site.view):
            describer = Describer(site.view)
        description = _description(describer, site)
        angles = site.angles if options.angles is None or site.angles is not None else _unknown(description)
        yield site_record(description, site.state, site.reason, site.evidence, angles)


def _description(describer: Describer | None, site: SiteResult) -> dict[str, Any]:
    if describer is not None and site.view is not None:
        return described_one(describer, site.attention)
    return undescribed(site.attention, site.reason or Reason("operator", "it is not read"))


def _unknown(description: Mapping[str, Any]) -> SiteAngles | None:
    """Why angles stay if positions rotate queries or keys in a way that was not recognised; None if that isn't so."""
    reason = (description["encoding"] or {}).get("reason") or {}
    if reason.get("code") not in (ROTATION, POSITIONS):
        return None
    return SiteAngles(state=PARITY, reason=Reason(ANGLES_UNKNOWN, reason["text"]))
