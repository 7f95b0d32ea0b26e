"""`scripts/rewrite_results near-misses`: what posexport makes of every near miss of the suite.

A near miss is a graph whose attention is wrong in one way (`draw_near_misses.py` draws them). Rewriting must keep its
fault: the rewritten file must compute what the near miss computes, not what the sound file computes. Files are compared
in ONNX Runtime on two kinds of inputs: the suite's reference inputs, for which near miss and sound file differ, and
inputs drawn here with another seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir
import torch
from limited import record_of
from make_one import one_line
from outputs import LIMITS, Arrays, difference, outputs_of, references, session_of
from score import files_of

from posexport import temporary
from posexport.errors import PosexportError
from posexport.graphs.cases import cases_of
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.roles import roles_of

FORMS = ("native", "contrib")
"""The near misses alternate between these forms: each form is tried first for half of them."""

ALONE, SAME, CORRECTED, BROKEN, CRASHED = "left alone", "rewritten, the same", "corrected", "broken", "crashed"

TIMES = 3
"""How many times its rounding error a near miss and the rewritten file may differ by."""

SEED, MORE = 1009, 8
"""The seed and number of inputs that posexport's own check does not use."""


def judge(suite: Path, row: Mapping[str, Any], record: Mapping[str, Any], forms: Sequence[str]) -> dict[str, Any]:
    """The verdict on one near miss in the first form that changes it; "left alone" if no form does."""
    result: dict[str, Any] = {}
    for form in forms:
        result = {
            **{key: row[key] for key in ("file", "of", "fault", "seed")},
            "form": form,
            "rewritten": 0,
            "kept": [],
        }
        with temporary.folder() as folder:
            result |= _judged_in_form(suite, row, record, form, folder / "out" / "rewritten.onnx")
        if result["verdict"] != ALONE:
            break
    return result


def _judged_in_form(
    suite: Path, row: Mapping[str, Any], record: Mapping[str, Any], form: str, target: Path
) -> dict[str, Any]:
    from posexport.rewrite.files import rewrite_into
    from posexport.rewrite.request import RewriteOptions

    source = suite / "near_misses" / row["file"]
    target.parent.mkdir()
    try:
        made = rewrite_into(target.parent, source, target, RewriteOptions(form=form, target="ort"))
    except PosexportError as error:  # a reason was given: nothing was rewritten
        return {"verdict": ALONE, "kept": ["refused"], "problem": str(error)}
    except Exception as error:
        return {"verdict": CRASHED, "problem": one_line(error)}
    kept = sorted(one["reason"]["code"] for one in made.attentions if one["reason"])
    if not made.changed:
        return {"verdict": ALONE, "kept": kept}
    rewritten = sum(one["state"] == "rewritten" for one in made.attentions)
    limit = LIMITS[record.get("dtype", "float32")]
    verdict = judged(source, suite / record["file"], target, [*inputs_of(suite, source, record)], limit)
    return {"rewritten": rewritten, "kept": kept, **verdict}


def inputs_of(suite: Path, source: Path, record: Mapping[str, Any]) -> Iterator[Arrays]:
    """The reference inputs, followed by drawn inputs."""
    for reference in references(suite, record):
        yield reference.feeds
    for case in cases_of(roles_of(ir.load(source)), SEED, more=MORE):
        yield case.arrays


def judged(wrong: Path, sound: Path, rewritten: Path, inputs: list[Arrays], limit: float) -> dict[str, Any]:
    """The verdict on the rewritten file.

    Beyond the limit, the files may differ by TIMES the error of an evaluation of the near miss in its own dtype: in
    half precision, some faults let tokens read what is only rounding, such as padding that sees no key. The rewritten
    file must then still be nearer to the near miss than to the sound file.
    """
    near_miss, original = (session_of(path, optimised=False) for path in (wrong, sound))
    changed, gap, others, model = session_of(rewritten), 0.0, 0.0, ir.load(wrong)
    for feeds in inputs:
        try:
            expected, right = outputs_of(near_miss, feeds), outputs_of(original, feeds)
        except Exception:  # neither file takes such inputs, for example tokens beyond a learned table
            continue
        actual = outputs_of(changed, feeds)
        own = difference(expected, actual, feeds)
        if own > limit:
            exact, narrow = (evaluated(model, feeds, [*expected], wide) for wide in (True, False))
            rounding = difference(exact, narrow, feeds)
            limit = max(limit, TIMES * rounding) if math.isfinite(rounding) else limit
        gap, others = max(gap, own), max(others, difference(right, actual, feeds))
    verdict = SAME if gap <= min(limit, others) else CORRECTED if others <= limit else BROKEN
    finite = {"error": gap, "from_sound": others}
    return {"verdict": verdict, **{name: value if math.isfinite(value) else None for name, value in finite.items()}}


def evaluated(model: ir.Model, feeds: Arrays, names: list[str], wide: bool) -> dict[str, Any]:
    """Outputs in float64 if `wide`, and otherwise in the file's own dtypes."""
    given = {name: torch.from_numpy(array) for name, array in feeds.items()}
    return {name: value.double().numpy() for name, value in Evaluator(model, wide=wide).run(given, names).items()}


def run(suite: Path, work: Path, again: bool) -> list[dict[str, Any]]:
    """The verdicts on all near misses, in the form of `rewrite_data.NearMiss`."""
    (work / "near_misses").mkdir(parents=True, exist_ok=True)
    rows = json.loads((suite / "near_misses" / "index.json").read_text(encoding="utf-8"))
    records, verdicts = {record["name"]: record for record in files_of(suite)}, []
    for number, row in enumerate(rows):
        path = work / "near_misses" / f"{Path(row['file']).stem}.json"
        if again:
            path.unlink(missing_ok=True)
        forms = FORMS[:: 1 if number % 2 else -1]
        result, done = record_of(path, judge, suite, row, records[row["of"]], forms)
        if "ended" in result:
            kept = {key: row[key] for key in ("of", "fault", "seed")}
            result = {**kept, "form": forms[0], "verdict": CRASHED, "problem": result["ended"]}
        if done:
            click.echo(f"{row['file']} {result['form']}: {result['verdict']} {result.get('kept') or ''}".rstrip())
        verdicts.append(result)
    return verdicts
