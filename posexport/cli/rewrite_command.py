"""`posexport rewrite`: rewrites the attention of any ONNX file in a form, and shows what was recognised and tested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.artifact.paths import check_onnx
from posexport.cli import console
from posexport.cli.options import input_roles, roles_option, sign_option, signing_key
from posexport.errors import RequestError, shown
from posexport.files import not_a_file
from posexport.report.attentions import recognised
from posexport.runtimes import RUNTIMES
from posexport.spec.fields import stated
from posexport.spec.forms import FORMS, TARGETS

if TYPE_CHECKING:
    from posexport.artifact.rewrite_record import WholeGraph
    from posexport.rewrite.request import RewriteOptions
    from posexport.rewrite.result import RewriteResult
    from posexport.verify.result import Verdict
    from posexport.verify.rewritten import RewrittenFile

COLUMNS = ("attention", "recognised", "state", "error", "cases", "reason")


@click.command()
@click.argument("file")
@click.option("--output", "-o", metavar="FILE", required=True, help="the ONNX file to write")
@click.option("--form", metavar="FORM", help=f"one of: {', '.join(FORMS)}  [default: decomposed]")
@click.option("--target", metavar="TARGET", help=f"one of: {', '.join(TARGETS)}  [default: portable]")
@click.option("--opset", metavar="N", help="the opset of the new file  [default: the file's, or the form's lowest]")
@click.option(
    "--kv-cache", metavar="shared", help="replace growing caches by buffers of a fixed length, which changes the inputs"
)
@click.option(
    "--angles", metavar="exact", help="compute recognised angles exactly, which changes the outputs at far positions"
)
@click.option("--require-all", is_flag=True, help="write nothing and exit with 1 if an attention is left as it was")
@click.option("--only", metavar="NAME", multiple=True, help="rewrite only this attention; repeatable  [default: all]")
@roles_option
@click.option("--seed", metavar="N", help="seed of the tested inputs  [default: 0]")
@sign_option
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def rewrite(file: str, output: str, roles: tuple[str, ...], sign: str | None, as_json: bool, **given: Any) -> int:
    """Rewrite the attention of any ONNX file in a form, and test that the new file computes the same function.

    The replacement of each attention is first tested alone, in float64. If it differs, the attention stays as it was.
    Then the whole file is compared with the original, in float64 and on each installed runtime. Everything else in the
    file stays as it is.

    Exit codes: 0 if the file was written, 1 if a runtime failed, or if an attention was left with --require-all, 2 if
    the file can't be read. Nothing is written unless the exit code is 0.
    """
    path, target = Path(file), Path(output)
    if path.suffix != ".onnx":
        raise RequestError(f"{file!r} does not end in .onnx: give an ONNX file.")
    if problem := not_a_file(path):
        raise RequestError(f"{file!r} is {problem}: give an ONNX file.")
    check_onnx(path)
    from posexport.rewrite.request import RewriteOptions

    options = RewriteOptions(roles=input_roles(roles), **stated(given))
    key = signing_key(sign)
    with console.steps("starting") as progress:
        from posexport.verify.rewritten import rewrite_and_verify

        done = rewrite_and_verify(path, target, options, key=key, progress=progress)
    if as_json:
        _show_json(file, output, options, done)
    else:
        _show(file, output, options, done)
    if done.refusal is not None:
        return console.fail(f"{output} is not written, {done.refusal.text.rstrip('.')}.", 1)
    return 0


def _show_json(file: str, output: str, options: RewriteOptions, done: RewrittenFile) -> None:
    from posexport.jsondata import unstructure

    result = done.result
    console.show_json(
        {
            "kind": "rewrite",
            "file": file,
            "output": None if done.manifest is None else output,
            "form": result.form,
            "target": result.target,
            "opset": result.opset,
            "seed": options.seed,
            "angles": options.angles,
            "changed": result.changed,
            "attentions": unstructure(result.attentions),
            "whole": unstructure(result.whole),
            "verdicts": unstructure(done.verdicts),
            "refusal": unstructure(done.refusal),
        }
    )


def _show(file: str, output: str, options: RewriteOptions, done: RewrittenFile) -> None:
    from posexport.rewrite.result import REWRITTEN

    result, manifest = done.result, done.manifest
    if result.attentions:
        title, rows = f"Attention of {file}, to the form {result.form}", [_row(one) for one in result.attentions]
        columns: tuple[str, ...] = COLUMNS
        if options.angles is not None:
            columns = (*COLUMNS[:-1], "angles", COLUMNS[-1])
            rows = [
                (*row[:-1], angles_text(one["angles"]), row[-1])
                for row, one in zip(rows, result.attentions, strict=True)
            ]
        console.show_table(title, columns, rows, right=("error", "cases"))
    rewritten = sum(one["state"] == REWRITTEN for one in result.attentions)
    facts = [
        (
            "attention",
            f"{rewritten} of {len(result.attentions)} rewritten" if result.attentions else "no attention found",
        )
    ]
    if options.angles is not None and result.attentions and not any(one["angles"] for one in result.attentions):
        chosen = " of those that were chosen" if options.only else ""
        facts.append(("angles", f"no attention{chosen} is rotated: there was nothing to make exact"))
    if rewritten and options.kv_cache == "shared" and result.form == "contrib":
        facts.append(("shared caches", _GROUPED))
    if result.whole is not None:
        facts.append(("whole graph", _whole(result.whole)))
    facts += [(verdict.runtime, _verdict(verdict)) for verdict in done.verdicts]
    if manifest is not None:
        facts += console.manifest_facts(output, manifest.signer)
    console.show_facts(f"{output} is {'not written' if manifest is None else 'written' + _unchanged(result)}", facts)


_GROUPED = (
    "GroupQueryAttention takes several tokens behind cached ones for one row only; --form native takes them for any "
    "number of rows"
)


def _unchanged(result: RewriteResult) -> str:
    """Why the new file is a copy, if it is one."""
    if result.changed:
        return ""
    every, refused, angles = result.attentions, result.refused, result.angles_left
    parts = []
    if refused:
        parts.append(f"{len(refused)} of {len(every)} could not be rewritten, the reasons are in the table")
    elif every:
        chosen = "what was chosen" if any(_is_not_chosen(one) for one in every) else "all attention"
        parts.append(f"{chosen} is in the form {result.form} already")
    else:
        parts.append("no attention was found in it")
    if angles and not refused:
        parts.append(f"angles of {len(angles)} of {len(every)} could not be made exact, the reasons are in the table")
    return f", a copy of {result.source.file}: {'; '.join(parts)}"


def _is_not_chosen(one: Mapping[str, Any]) -> bool:
    from posexport.rewrite.result import NOT_CHOSEN

    return (one["reason"] or {}).get("code") == NOT_CHOSEN


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    error, reason = one["error"], one["reason"] or {"text": ""}
    texts = ("-" if error is None else f"{error:.1e}", str(one["cases"] or "-"))
    return one["name"], recognised(one), one["state"], *texts, reason["text"]


def angles_text(angles: Mapping[str, Any] | None) -> str:
    """What became of the angles of an attention: `exact, error 1.1e-07, was 2.6e-01 up to 16777215`."""
    if angles is None:
        return "-"
    if angles["reason"] is not None:
        return f"{angles['state']}, {angles['reason']['text']}"
    error, before = f"{angles['error']:.1e}", f"{angles['original_error']:.1e}"
    change = f"error {error}" if error == before else f"error {error}, was {before}"
    return f"{angles['state']}, {change} up to {angles['positions']}"


def _whole(whole: WholeGraph) -> str:
    if whole.error is None:
        return f"not tested: {whole.untested}"
    left = f"; not compared: {', '.join(map(shown, whole.left))}, which is not finite in float64" if whole.left else ""
    return f"tested in float64: error {whole.error:.1e}, {_sets(whole.cases)}{left}"


def _sets(cases: int) -> str:
    return "1 set of inputs" if cases == 1 else f"{cases} sets of inputs"


def _verdict(verdict: Verdict) -> str:
    worst, parts = verdict.worst, []
    if worst is not None and worst.max_error is not None:
        _, error, _, limit = worst.texts()
        parts.append(f"error {error}, limit {limit}, {_sets(verdict.cases)}")
        parts += filter(None, [RUNTIMES[verdict.runtime].note])
    parts += filter(None, (verdict.reason, verdict.where, *verdict.not_shown))
    return f"{verdict.state}: {'; '.join(parts)}" if parts else verdict.state
