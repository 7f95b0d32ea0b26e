"""What the report page tells a reader in a minute: the confidence in a winner, the cause of a fault, the meaning of
words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from page_helpers import bench, everything, html_of, plot, shape, tune, write_all
from test_page_links import box, page_of, part, verdict

from posexport.bench.results import Result
from posexport.report.page.angles import plots
from posexport.report.page.blocks import Figure, Table
from posexport.report.page.markdown import to_markdown
from posexport.report.page.page import GLOSSARY, make_page
from posexport.report.page.summary import FAILED, Finding, Highlights, boxes
from posexport.report.plots.panels import plot_from


def winner(folder: Path, **files: dict[str, Any]) -> str:
    return box(page_of(folder, files), "fastest").points[-1].confidence


def against(low: float, high: float) -> dict[str, Any]:
    """A benchmark whose ratio to torch eager in the same rounds has this interval."""
    data = bench()
    found = next(each for each in data["shapes"][0]["results"] if each["runtime"] == "ort-cpu")
    found["ratios"]["torch"] |= {"low": low, "high": high}
    return data


def test_a_winner_is_sure_by_its_interval_against_each_other(tmp_path: Path) -> None:
    assert winner(tmp_path, a=against(0.5, 0.99)) == "clearly the fastest"
    assert winner(tmp_path, a=against(0.5, 1.0)) == "tie with torch eager (10.0 ms)"
    assert winner(tmp_path, a={**against(0.5, 0.99), "machine_load": 0.5}) == "likely the fastest"
    assert winner(tmp_path, a=against(1.1, 1.2)) == "inconclusive against torch eager (10.0 ms)"
    alone = bench()
    alone["shapes"][0]["results"] = [each for each in alone["shapes"][0]["results"] if each["runtime"] != "torch"]
    assert winner(tmp_path, a=alone) == "nothing else was timed beside it"


def test_files_with_runs_of_their_own_are_ranked_by_their_ratio_to_torch(tmp_path: Path) -> None:
    """All of the second run was three times slower, but its candidate is the faster one."""
    slow = bench("contrib", (shape("prefill:128", 128, 0.005),))
    for each in slow["shapes"][0]["results"]:
        if each["seconds"]:
            each["seconds"] |= {name: 3 * each["seconds"][name] for name in ("median", "p10", "p90", "p99")}
    (point,) = box(page_of(tmp_path, {"a": bench(), "b": slow}), "fastest").points
    assert (point.head, point.figure, point.confidence) == ("ort-cpu · contrib", "15.0 ms", "clearly the fastest")
    assert point.text.endswith("; next ort-cpu · native (0.60× of torch eager, 0.57 to 0.63, in its own run)")
    slow["shapes"][0]["results"] = [each for each in slow["shapes"][0]["results"] if each["runtime"] != "torch"]
    assert box(page_of(tmp_path, {"a": bench(), "b": slow}), "fastest").points[0].head == "ort-cpu · native"


def test_whoever_ties_unverified_is_told(tmp_path: Path) -> None:
    alike = bench("contrib", (shape("prefill:128", 128, 0.0061),))
    (point,) = box(page_of(tmp_path, {"a": bench(), "b": alike, "v": verdict("passed")}), "fastest").points
    assert point.text.endswith("; ✓ verified; ort-cpu · contrib: ⚠ not verified on ort-cpu here")


def test_those_that_left_a_race_early_count_beside_a_tie(tmp_path: Path) -> None:
    data = raced(0.99, 1.02, 1.2)
    early = next(each for each in data["candidates"] if each["state"] == "dropped")
    early["ratio"] = {"median": 1.1, "low": 0.9, "high": 1.3, "confidence": 0.95}
    assert winner(tmp_path, t=data) == "tie with contrib · fp32 · opset 23 (1.02×); 1 dropped early may be as fast"


def test_few_rounds_make_nobody_sure(tmp_path: Path) -> None:
    data = against(0.5, 0.99)
    for each in data["shapes"][0]["results"]:
        for ratio in each["ratios"].values():
            ratio["confidence"] = 0.75
    assert winner(tmp_path, a=data) == "too few rounds to rank it against torch eager (10.0 ms)"


def test_ratios_to_the_peers_of_another_device_are_not_compared(tmp_path: Path) -> None:
    data = bench()
    results = data["shapes"][0]["results"]
    (own,) = [each for each in results if each["runtime"] == "ort-cpu"]
    results[-1] = {**own, "runtime": "ort-cuda", "seconds": {key: 2 * value for key, value in own["seconds"].items()}}
    assert winner(tmp_path, a=data) == "clearly the fastest"  # both have the same ratio to the torch of their own run


def scaled(seconds: dict[str, Any], factor: float) -> dict[str, Any]:
    return {key: value if key == "count" else factor * value for key, value in seconds.items()}


def test_a_peer_counts_by_the_rounds_beside_the_winner(tmp_path: Path) -> None:
    def with_optimizer(form: str, slower: float, **direct: dict[str, float]) -> dict[str, Any]:
        data = against(0.5, 0.6) | {"form": form}
        results = data["shapes"][0]["results"]
        own = next(each for each in results if each["runtime"] == "ort-cpu")
        own["ratios"] |= direct
        own["seconds"] = scaled(own["seconds"], slower)
        peer = {**own, "runtime": "ort-optimizer", "ratios": {"torch": own["ratios"]["torch"]}}
        results.append({**peer, "seconds": scaled(own["seconds"], 1.5)})
        return data

    beside = {"ort-optimizer": {"median": 0.7, "low": 0.6, "high": 0.8, "confidence": 0.95}}
    fast, slow = with_optimizer("native", 1.0, **beside), with_optimizer("decomposed", 1.1)
    assert "ORT's optimizer" not in winner(tmp_path, a=fast, b=slow)


def raced(low: float, median: float, high: float, **over: Any) -> dict[str, Any]:
    """A tuning whose second candidate has this ratio to the winner."""
    data = tune()
    found = {"median": median, "low": low, "high": high, "confidence": 0.95}
    data["candidates"][1] |= {"ratio": found, **over}
    return data


def test_how_sure_a_tuned_winner_is(tmp_path: Path) -> None:
    assert winner(tmp_path, t=raced(1.01, 1.16, 1.2)) == "clearly the fastest"
    assert winner(tmp_path, t=raced(0.99, 1.02, 1.2)) == "tie with contrib · fp32 · opset 23 (1.02×)"
    assert winner(tmp_path, t=raced(0.99, 1.02, 1.2, state="dropped")) == "likely the fastest"
    assert winner(tmp_path, t={**raced(1.01, 1.16, 1.2), "machine_load": 0.5}) == "likely the fastest"
    text = box(page_of(tmp_path, {"t": tune()}), "fastest").points[0].text
    assert text.startswith("of 3 timed (4 candidates), in a run of tune's own; ")
    few = raced(1.01, 1.16, 1.2)
    few["candidates"][1]["ratio"]["confidence"] = 0.875  # as with four rounds
    assert winner(tmp_path, t=few) == "too few rounds to rank it against contrib · fp32 · opset 23 (1.16×)"
    halved = raced(1.01, 1.16, 1.2)
    halved["candidates"][2] |= {"reason": "behind", "reason_code": "slower-half"}
    assert winner(tmp_path, t=halved) == "likely the fastest"


def test_a_tuning_is_told_by_ratio_and_by_what_was_never_timed(tmp_path: Path) -> None:
    data = raced(0.9, 1.16, 1.2, state="dropped", rounds=4, reason_code="slower-half")
    data["candidates"][2] |= {"ratio": {"median": 1.1, "low": 1.05, "high": 1.2, "confidence": 0.95}}
    twin = {
        **data["candidates"][3],
        "name": "twin",
        "state": "dropped",
        "reason": "the same graph as native: timed once",
        "reason_code": "same-graph",
    }
    data["candidates"].append(twin)
    section = part(page_of(tmp_path, {"t": data}), "tune")
    assert section.lead.startswith("1 won, 2 raced and dropped; 2 never timed (1 refused, 1 the same as another). ")
    first, away, _ = [each for each in section.blocks if isinstance(each, Table)]
    assert first.columns[:5] == ("candidate", "state", "×\u00a0winner", "interval", "median")
    assert [(row[2].text, row[-1].text) for row in first.rows[1:]] == [
        ("1.10×", "1.9x of native"), ("1.16×", "slower half in the median, after 4 rounds")
    ]  # fmt: skip
    assert {row[0].text: row[1].text for row in away.rows}["twin"] == "left out"


def test_times_of_tune_and_of_bench_are_said_to_be_of_different_runs(tmp_path: Path) -> None:
    said = "Times by tune and by bench are of different runs: don't compare them."
    assert part(page_of(tmp_path, {"t": tune(), "b": bench()}), "artifacts").lead.endswith(said)
    assert said not in part(page_of(tmp_path, {"b": bench(), "c": bench("contrib")}), "artifacts").lead


DEPARTS = "RotaryEmbedding 'rotary_0', node 12 of the graph, has interleaved=0, in a fresh export interleaved=1"


@pytest.mark.parametrize("where", [DEPARTS, "the graph ends before Add 'n', which a fresh export has"])
def test_a_fault_leads_with_its_cause(where: str, tmp_path: Path) -> None:
    data = verdict("failed")
    one = {**data["verdicts"][0], "where": f"{where}; its values differ", "departure": where}
    data["verdicts"] = [{**one, "reason": "off by 1"}, {**one, "runtime": "torch", "reason": "off by 2"}]
    (point,) = box(page_of(tmp_path, {"v": data}), "wrong").points
    assert (point.label, point.head) == ("rope-native.onnx", where)
    assert point.text == "one file, on 2 runtimes: ort-cpu and torch; off by 1"


def test_one_cause_in_several_files_is_told_once() -> None:
    findings = tuple(
        Finding(state=FAILED, who="ort-cpu", reason=f"off by {name}", where=name, cause="Add 'n'") for name in "ab"
    )
    found = boxes([Highlights(findings=findings)])[1]
    assert found.verdict == "2 results failed, all by one fault."
    (point,) = found.points
    assert (point.label, point.text) == ("a and b", "2 files, on ort-cpu; off by a")
    other = Finding(state=FAILED, who="ort-cpu", reason="off by c", where="c", cause="Mul 'n'")
    assert (
        boxes([Highlights(findings=(*findings, other), checked=9)])[1].verdict
        == "3 results failed, by 2 faults; 9 checks ran."
    )


def test_what_torch_proves_is_said_beside_it(tmp_path: Path) -> None:
    for runtime, said in (("torch", True), ("ort-cpu", False)):
        table = part(page_of(tmp_path, {"v": verdict("passed", runtime=runtime)}), "parity").blocks[0]
        assert isinstance(table, Table)
        assert ("torch is the block rebuilt from the file's weights, not its graph" in table.note) == said


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("parity", "exact", "said"),
    [
        (1e-3, 1e-7, "drift with the position. Only exact angles promise to stay below, and they do."),
        (1e-3, 1e-3, "drift with the position. Exact angles above the line are a fault: they promise to stay below."),
        (1e-7, 1e-7, "across: position."),
    ],
    ids=["expected", "broken", "below"],
)
def test_lines_above_the_promise_are_judged(parity: float, exact: float, said: str) -> None:
    data = plot()
    for line, last in zip(data["rows"][0][0]["lines"], (parity, exact), strict=True):
        line["y"] = [0.0, None, last]
    section, _ = plots([Result(name="p.json", data=plot_from(data))])
    (figure,) = section.blocks
    assert isinstance(figure, Figure) and figure.note.endswith(said)


def test_words_and_colours_are_explained_on_the_page(tmp_path: Path) -> None:
    page = make_page(write_all(tmp_path, everything()))
    assert page.subtitle.startswith("Attention blocks with positional encodings, exported to ONNX: ")
    assert page.glossary.folded and to_markdown(page).count("| tensorrt-import | ") == 1
    assert {
        "alternatives",
        "lower bound",
        "native",
        "contrib",
        "decomposed",
        "ort",
        "tensorrt-import",
    } <= GLOSSARY.keys()
    bars = next(each for each in part(page, "latency").blocks if isinstance(each, Figure) and "bar best" in each.svg)
    assert re.findall(">([^<>]+)<", bars.svg)[-3:] == ["★ the fastest", "an alternative", "lower bound"]


def test_a_winner_far_ahead_after_two_rounds_is_no_tie(tmp_path: Path) -> None:
    data = against(0.0008, 0.0009)
    for each in data["shapes"][0]["results"]:
        for ratio in each["ratios"].values():
            ratio["confidence"] = 0.5
    text = to_markdown(page_of(tmp_path, {"a": data}))
    assert "too few rounds to rank it against torch eager (10.0 ms)" in text
    assert "tie with" not in text.replace("tie, too close", "")


def test_the_box_of_faults_is_one_line_where_there_are_none(tmp_path: Path) -> None:
    def shown(state: str) -> str:
        page = html_of(tmp_path, {"v": verdict(state)})
        return page[page.index('<section class="box wrong') : page.index('<section class="box not-run')]

    fine, failed = shown("passed"), shown("failed")
    assert "is-empty" in fine and fine.count("<p") == 1 and "<ul" not in fine and "<details" not in fine
    assert "is-empty" not in failed and "<ul" in failed


def test_the_checks_of_a_project_are_no_runtimes(tmp_path: Path) -> None:
    data = verdict("passed")
    one = data["verdicts"][0]
    size = {**one, "runtime": "project", "check": "size", "worst": None, "measured": "71.7 kB", "limit_text": "80 kB"}
    late = {**size, "state": "failed", "check": "up to date", "reason": "its spec changed", "measured": None}
    data["verdicts"] += [size, late]
    page = page_of(tmp_path, {"p": data})
    section = part(page, "parity")
    assert section.lead.startswith(
        "1 verdict: 1 passed, 0 failed, 0 not run. 2 checks of a project: 1 passed, 1 failed"
    )
    heat, checks, _ = [block for block in section.blocks if isinstance(block, Table)]
    assert heat.columns == ("artifact", "ort-cpu")
    assert [(row[1].text, row[2].text, row[-1].text) for row in checks.rows] == [
        ("size", "passed", "71.7 kB, limit 80 kB"), ("up to date", "failed", "its spec changed")
    ]  # fmt: skip
    wrong = box(page, "wrong")
    assert wrong.verdict == "1 result failed; 3 checks ran."
    assert [(point.head, point.text) for point in wrong.points] == [("up to date", "its spec changed")]
