"""What the benchmark of the forms makes of its series, and that its tables name what there is."""

import sys
from pathlib import Path

import pytest

from posexport.export import support as posexport_forms
from posexport.spec.forms import FORMS

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
try:
    import forms
    import forms_memory
    import kernels
    import rows
finally:
    sys.path.pop(0)

SITUATION = forms.SITUATIONS[0]


def test_every_form_is_timed_and_each_has_limits_of_its_kernels() -> None:
    assert {form for form, _ in forms.FORMS.values()} == set(FORMS)
    assert {target for _, target in forms.FORMS.values()} <= set(posexport_forms.TARGETS)
    assert {form for pair in kernels.PAIRS for form in pair} == set(FORMS)
    assert {*forms_memory.LIMITS, *forms_memory.QUICK} <= set(forms.FORMS)
    assert all(len(limits) == len(kernels.HOOKS) for _, limits in kernels.CASES.values())


def test_the_best_form_is_judged_by_other_sessions_than_those_that_choose_it() -> None:
    lucky = {"torch": [1.0] * 9, "a": [0.1] * 9, "b": [0.5] * 9}
    usual = {"torch": [1.0] * 9, "a": [0.9] * 9, "b": [0.5] * 9}
    row = forms._best(SITUATION, [lucky, usual], ["a", "b"])
    assert row.details["form"] == "a" and row.value == pytest.approx(0.9) and row.state == "failed"
    row = forms._best(SITUATION, [usual, lucky], ["a", "b"])
    assert row.details["form"] == "b" and row.value == pytest.approx(0.5) and row.state == "passed"


def test_what_has_no_target_is_measured_and_never_fails() -> None:
    slow = rows.measured("x", [9.0] * 9, [1.0] * 9)
    assert slow.state == "measured" and slow.value == 9.0 and "target" not in slow.data()
    assert rows.observed("x", 9.0, "MB").state == "measured"


def test_the_peer_of_a_shared_cache_gets_what_is_written() -> None:
    step = forms.SITUATIONS[-1]
    spec = forms.blocks.spec(forms.BLOCK, 64, 4, causal=True, kv_cache="shared")
    inputs = forms.seeded_inputs(spec, step.sizes, 0)
    given = forms._peer_inputs(step, inputs)
    assert inputs["past_key"].shape[2] == forms.PLACES and given["past_key"].shape[2] == forms.PAST
    assert "write_indices" not in given and (given["position_ids"] == forms.PAST).all()
