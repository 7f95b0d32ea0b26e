"""Verdicts as JUnit XML for CI systems.

"Not run" is a separate state: in JUnit it is "skipped", with its reason, and never counts as passed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from posexport.jsondata import writable
from posexport.verify.result import INCONCLUSIVE_STATE, NOT_RUN, Report, Verdict


def to_junit(report: Report) -> bytes:
    """JUnit XML: a suite per run, a test per artifact and runtime, and an error per artifact that can't be read."""
    unreadable = len(report.unreadable)
    suite = ElementTree.Element("testsuite", name="posexport verify", tests=str(len(report.verdicts) + unreadable))
    failures = sum(map(report.fails, report.verdicts))
    skipped = sum(verdict.state == NOT_RUN and not report.fails(verdict) for verdict in report.verdicts)
    suite.attrib |= {"failures": str(failures), "errors": str(unreadable), "skipped": str(skipped)}

    def test(artifact: str, name: str) -> ElementTree.Element:
        return ElementTree.SubElement(suite, "testcase", classname=writable(artifact), name=name)

    for verdict in report.verdicts:
        case = test(verdict.artifact, verdict.label)
        if report.fails(verdict):
            failure = ElementTree.SubElement(case, "failure", message=writable(verdict.reason or INCONCLUSIVE_STATE))
            failure.text = writable(verdict.note)
        elif verdict.state == NOT_RUN:
            ElementTree.SubElement(case, "skipped", message=writable(verdict.reason or "not run"))
        ElementTree.SubElement(case, "system-out").text = writable(verdict.measurement or _numbers(verdict))
    for file in report.unreadable:
        ElementTree.SubElement(test(file.artifact, "read"), "error", message=writable(file.error))
    ElementTree.indent(suite)
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _numbers(verdict: Verdict) -> str:
    known = {"weights": verdict.weights, "signature": verdict.signature}
    return "; ".join([_errors(verdict), *(f"{name}: {reason}" for name, reason in known.items() if reason is not None)])


def _errors(verdict: Verdict) -> str:
    if verdict.worst is None:
        return f"error -, torch error -, limit -, sets of inputs {verdict.cases or '-'}"
    _, error, torch_error, limit = verdict.worst.texts()
    text = f"error {error}, torch error {torch_error}, limit {limit}, sets of inputs {verdict.cases or '-'}"
    text += f", worst case {verdict.worst.case}"
    if verdict.reach is not None:
        text += f", reach {verdict.reach}"
    if verdict.inconclusive:
        text += f"; {INCONCLUSIVE_STATE}: {'; '.join(verdict.not_shown)}"
    if verdict.worst.far_out and verdict.worst_usual is not None:
        case, error, torch_error, limit = verdict.worst_usual.texts()
        text += f"; in the usual range: error {error}, torch error {torch_error}, limit {limit}, worst case {case}"
    return text
