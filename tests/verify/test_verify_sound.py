"""No false alarms: sound blocks of every kind, form, target and dtype pass on every runtime that takes them."""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
import pytest
from form_helpers import ROWS, spec_of
from helpers import CASES, case, weights_for

from posexport.artifact.onnx_artifact import Artifact, read_onnx, write_onnx
from posexport.export import export
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES
from posexport.verify import verify
from posexport.verify.result import PASSED

ENGINES = tuple(
    name for name in ("torch", "ort-cpu", "onnx-reference", "tensorrt-import") if RUNTIMES[name].missing() is None
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every case in every dtype (forms take turns) and all pairs of options (dtypes take turns)."""
    made = tmp_path_factory.mktemp("sound")
    forms = itertools.cycle([*FORMS, FORMS_AGAIN])
    for name, dtype in itertools.product(CASES, DTYPES):
        spec, form = case(name, dtype=dtype), next(forms)
        write_onnx(export(spec, weights_for(spec), form=form), made / f"{name}-{form}-{dtype}.onnx")
    for index, (row, dtype) in enumerate(zip(ROWS, itertools.cycle(DTYPES), strict=False)):
        spec, (form, target) = attrs.evolve(spec_of(row), dtype=dtype), row["how"]
        write_onnx(export(spec, weights_for(spec), form=form, target=target), made / f"pairs-{index}.onnx")
    return made


FORMS_AGAIN = "decomposed"
"""A fifth turn in the cycle of forms, so that each case gets other forms for its three dtypes than the case before."""


def _takes(artifact: Artifact, runtime: str) -> bool:
    dtype, form = artifact.spec.dtype, artifact.form
    if runtime == "ort-cpu":
        return dtype != "bf16"  # the CPU provider has no bf16 kernels
    if runtime == "onnx-reference":  # it lacks com.microsoft operators, and sums Attention in half precision
        return form != "contrib" and (form != "native" or dtype == "fp32")
    return runtime != "tensorrt-import" or artifact.target != "ort"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_sound_artifacts_pass_whatever_the_seed(folder: Path, seed: int) -> None:
    report = verify([folder], runtimes={name: RUNTIMES[name] for name in ENGINES}, seed=seed, reach={"seq": 64})
    assert report.unreadable == ()
    failed = [(each.artifact, each.runtime, each.reason) for each in report.verdicts if each.state == "failed"]
    assert failed == []
    artifacts = {str(path): read_onnx(path) for path in sorted(folder.glob("*.onnx"))}
    assert len(report.verdicts) == len(artifacts) * len(ENGINES)
    unrun = {(each.artifact, each.runtime) for each in report.verdicts if each.state != PASSED}
    assert unrun == {(path, name) for path, one in artifacts.items() for name in ENGINES if not _takes(one, name)}


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "length", "heads"), [(8, 512, 2), (4, 2048, 1)])
def test_frequencies_of_wide_heads_that_are_powers_at_run_time_are_no_fault(
    factor: int, length: int, heads: int, tmp_path: Path
) -> None:
    """With 4 pairs, the second pair rotates too slowly to show anything. With 64 pairs it shows."""
    scaled = {"scaling": "dynamic", "factor": factor, "original_max_position_embeddings": length}
    spec = case("rope", layout="half", hidden_size=128 * heads, num_heads=heads, causal=True, **scaled)
    spec = attrs.evolve(spec, kv_cache="concat")
    write_onnx(export(spec, weights_for(spec)), tmp_path / "wide.onnx")
    beyond = {"seq": length + 200}
    report = verify([tmp_path / "wide.onnx"], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}, reach=beyond)
    assert [verdict.state for verdict in report.verdicts] == [PASSED]
