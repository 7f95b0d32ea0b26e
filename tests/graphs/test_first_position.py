"""Files that take only the position of each row's first new token are tested on prompts and chunks too.

The files are posexport's own exports with consecutive positions, without their metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_files import foreign
from helpers import exported, open_ort, small_spec

from posexport.graphs.attention.describe import Describer
from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.graphs.cases import cases_of
from posexport.graphs.roles import roles_of
from posexport.graphs.view import view_of
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model
from posexport.runtimes import RUNTIMES
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.result import FAILED, PASSED

pytestmark = pytest.mark.few_inputs

FIRST = "position_ids"


def spec_of(encoding: str, **over: Any) -> Spec:
    return small_spec(encoding, **{"positions": "consecutive", "causal": True, "kv_cache": "concat", **over})


@pytest.mark.parametrize("encoding", ["rope", "learned"])
def test_inputs_of_many_tokens_stay_within_the_table(encoding: str) -> None:
    model = exported(spec_of(encoding))
    roles = roles_of(model)
    assert roles[FIRST].is_first_position and roles[FIRST].axes == (BATCH, 1)
    cases = cases_of(roles, 0)
    assert {(case.sizes[SEQ] > 1, case.sizes[PAST] > 8) for case in cases} >= {(True, False), (True, True)}
    starts = [case.arrays[FIRST] for case in cases]
    assert {array.shape[1] for array in starts} == {1} and any(len(np.unique(array)) > 1 for array in starts)
    if encoding == "learned":
        assert max(int(case.arrays[FIRST].max()) + case.sizes[SEQ] for case in cases) == 64
    run = open_ort(model)
    assert all(np.isfinite(run(case.arrays)["output"]).all() for case in cases)


def test_a_graph_of_one_token_has_the_position_of_that_token() -> None:
    roles = roles_of(exported(spec_of("rope", positions="data"), seq=1))
    for case in cases_of(roles, 0):
        assert case.sizes[SEQ] == 1 and case.arrays[FIRST].shape == (case.sizes[BATCH], 1)


def test_attention_is_causal_and_is_written_as_an_operator() -> None:
    model = exported(spec_of("rope"))
    model.metadata_props.clear()
    view = view_of(model)
    (one,) = view.attentions
    said = Describer(view).describe(one)
    assert said["mask"]["kind"] == "causal" and said["encoding"]["name"] == "rope"
    (site,) = rewrite_model(model, form="native").sites
    assert site.state == REWRITTEN and site.evidence is not None
    assert site.evidence.cases >= 12


@pytest.mark.slow
@pytest.mark.parametrize(("causal", "state"), [(False, FAILED), pytest.param(True, PASSED, marks=pytest.mark.slow)])
def test_a_prompt_that_sees_what_comes_later_fails(causal: bool, state: str, tmp_path: Path) -> None:
    """With one token at a time, the fault would not show."""
    truth = foreign(tmp_path, "truth", spec_of("rope"), "native")
    foreign(tmp_path, "other", spec_of("rope", causal=causal), "decomposed")
    report = verify([tmp_path / "other.onnx"], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, against=truth)
    assert [each.state for each in report.verdicts] == [state], report
