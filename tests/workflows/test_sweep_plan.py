"""From tables to jobs: which jobs they become, when two jobs are the same, and the texts of refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers import cli, refused
from manifest_data import onnx_manifest, plan_manifest, write_manifest_data

from posexport.cli.sweep_command import _options_of as options_of
from posexport.errors import RequestError
from posexport.runtimes import cuda
from posexport.spec.spec import DTYPES
from posexport.verify.matrix.table import MODES, Entry
from posexport.workflows.sweep import job_plan
from posexport.workflows.sweep.job_plan import JobTable, Plan, plan, read_tables, read_text
from posexport.workflows.sweep.jobs import JobResources
from posexport.workflows.sweep.kinds import KINDS
from posexport.workflows.sweep.local_jobs import Local


def planned(folder: Path = Path(), **keys: Any) -> Plan:
    return plan([JobTable(keys, folder)], options_of)


def artifact(folder: Path, name: str = "a.onnx", content: bytes = b"graph", **manifest: Any) -> Path:
    """A file with a manifest. Only the command would judge its contents."""
    path = folder / name
    path.write_bytes(content)
    write_manifest_data(path, manifest)
    return path


def test_a_matrix_is_a_job_for_each_entry_that_is_not_refused() -> None:
    axes = {
        "encoding": ["rope", "swin"],
        "form": ["native", "contrib"],
        "dtype": ["fp32"],
        "mode": ["prefill", "decode"],
    }
    found = planned(kind="matrix", runtime=["ort-cpu", "build"], **axes)
    entries = [Entry(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
    assert any(entry.refusal("portable") for entry in entries), "none is refused, so that shows nothing"
    kept = [entry for entry in entries if entry.refusal("portable") is None]
    assert [job.label for job in found.jobs] == [f"matrix {e.encoding} {e.form} {e.dtype} {e.mode}" for e in kept]
    assert len(found.refused) == len(entries) - len(kept)
    assert found.jobs[0].arguments[-4:] == ("--runtime", "ort-cpu", "--runtime", "build")
    assert found.jobs[0].needs == JobResources(cpus=1)


def test_a_matrix_without_names_is_all_of_it() -> None:
    found = planned(kind="matrix", encoding="none", form="decomposed")
    assert len(found.jobs) + len(found.refused) == len(DTYPES) * len(MODES)


def test_an_id_is_of_what_is_done_and_with_what(tmp_path: Path) -> None:
    artifact(tmp_path)
    first = planned(tmp_path, kind="verify", artifact="a.onnx").jobs[0]
    assert first.id == planned(tmp_path, artifact=["*.onnx"], kind="verify").jobs[0].id
    others = [
        planned(tmp_path, kind="verify", artifact="a.onnx", seed=1),
        planned(tmp_path, kind="verify", artifact="a.onnx", runtime="ort-cpu"),
        planned(tmp_path, kind="verify", artifact="a.onnx", gpu="H100"),
        planned(tmp_path, kind="bench", artifact="a.onnx"),
    ]
    artifact(tmp_path, content=b"other")
    others.append(planned(tmp_path, kind="verify", artifact="a.onnx"))
    assert len({first.id, *(each.jobs[0].id for each in others)}) == 6


def test_ids_stay_from_process_to_process() -> None:
    job = planned(kind="tune", preset="llama-3.1-8b", scenario="prefill:512").jobs[0]
    code = (
        "from posexport.cli.sweep_command import _options_of; from posexport.workflows.sweep.job_plan import *;"
        "print(plan([read_text('tune preset=llama-3.1-8b scenario=prefill:512')], _options_of).jobs[0].id)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == job.id


def test_the_same_job_twice_is_one() -> None:
    said = {"kind": "matrix", "encoding": "rope", "form": "native", "dtype": "fp32"}
    twice = plan([JobTable(said), JobTable(said)], options_of)
    assert [job.label for job in twice.jobs] == [job.label for job in planned(**said).jobs]


def test_an_artifact_takes_what_belongs_to_it(tmp_path: Path) -> None:
    source, plan_ = artifact(tmp_path, "big.onnx"), artifact(tmp_path, "big.plan")
    write_manifest_data(source, onnx_manifest(source, external_data={"more": "0", "missing": "0"}))
    write_manifest_data(plan_, plan_manifest(plan_, source))
    for name in ("big.onnx.data", "more", "other"):
        (tmp_path / name).write_bytes(b"weights")
    artifact(tmp_path, "odd.onnx").with_name("odd.onnx.json").write_text("no JSON")
    jobs = {job.arguments[0]: job for job in planned(tmp_path, kind="bench", artifact=".").jobs}
    names = {name: {file.name for file in job.files} for name, job in jobs.items()}
    assert names["big.onnx"] == {"big.onnx", "big.onnx.json", "big.onnx.data", "more"}
    assert names["big.plan"] == {"big.plan", "big.plan.json"} | names["big.onnx"]
    assert names["odd.onnx"] == {"odd.onnx", "odd.onnx.json"}
    assert jobs["big.onnx"].needs.alone


def test_files_are_looked_for_beside_the_table(tmp_path: Path) -> None:
    artifact(tmp_path)
    (tmp_path / "x.npz").write_bytes(b"inputs")
    path = tmp_path / "sweep.toml"
    path.write_text('[[job]]\nkind = "verify"\nartifact = "a.onnx"\ninputs = "x.npz"\nproperties = true\ngpu = "L4"\n')
    job = plan(read_tables(path), options_of).jobs[0]
    assert job.arguments == ("a.onnx", "--properties", "--inputs", "x.npz")
    assert job.needs == JobResources(cpus=1, gpu="L4", gpus=1)
    as_json = tmp_path / "sweep.json"
    table = {"kind": "verify", "artifact": "a.onnx", "inputs": ["x.npz"], "gpu": "L4", "properties": "true"}
    as_json.write_text(json.dumps({"job": [table]}))
    assert plan(read_tables(as_json), options_of).jobs[0].id == job.id


def test_words_are_a_table_too() -> None:
    table = read_text("bench artifact='my model.onnx' scenario=prefill:8 scenario=decode:9 cpus=all")
    assert table.keys == {
        "kind": "bench", "artifact": ["my model.onnx"], "scenario": ["prefill:8", "decode:9"], "cpus": ["all"],
    }  # fmt: skip


BAD = {
    "kind": ("matrx", {}, "unknown kind 'matrx': did you mean 'matrix'?"),
    "no kind": (None, {}, "job: it has no kind: give one of matrix, verify"),
    "key": ("matrix", {"encodings": "rope"}, "unknown key of a matrix job 'encodings': did you mean 'encoding'?"),
    "name": ("matrix", {"encoding": "rop"}, "unknown encoding 'rop': did you mean 'rope'?"),
    "empty": ("matrix", {"encoding": []}, "encoding is an empty list: leave it out, or give it a value."),
    "number": ("verify", {"artifact": "a.onnx", "seed": -1}, "seed is '-1': it must be a whole number from 0 to"),
    "truth": ("verify", {"artifact": "a.onnx", "seed": True}, "seed is True: it must be text or a number."),
    "flag": ("verify", {"artifact": "a.onnx", "properties": "yes"}, "properties is 'yes': it must be true or false."),
    "scenario": ("tune", {"encoding": "rope", "scenario": "decod:9"}, "unknown scenario 'decod': did you mean"),
    "nothing": ("bench", {}, "a bench job needs an artifact: give artifact = ['model.onnx']."),
    "missing": ("bench", {"artifact": "b.onnx"}, "b.onnx' is not there: give the path of a file."),
    "pattern": ("bench", {"artifact": "*.plan"}, "artifact '*.plan' matches no .onnx or .plan"),
    "ending": ("bench", {"artifact": "a.onnx.json"}, "a.onnx.json' is neither .onnx nor .plan"),
    "cpus": ("matrix", {"cpus": 0}, "cpus is 0: it must be a whole number from 1 to"),
    "gpu": ("matrix", {"gpu": 1}, "gpu is 1: give the name of a type, such as 'H100'."),
    "gpus": ("matrix", {"gpus": 2}, "gpus is 2 without a type: add gpu = 'H100'."),
    "value": ("bench", {"artifact": "a.onnx", "runtime": [["x"]]}, "runtime is ['x']: it must be text or a number."),
    "path": ("verify", {"artifact": [3]}, "artifact is 3: it must be the path of a file."),
    "twice": ("verify", {"artifact": "a.onnx", "seed": [1, 2]}, "seed has 2 values, 1, 2: a job takes one"),
    "files": ("verify", {"artifact": "a.onnx", "inputs": ["x", "y"]}, "inputs has 2 values, x, y: a job takes one"),
    "long": ("matrix", {"cpus": "9" * 5000}, "it must be a whole number from 1 to"),
    "large": ("matrix", {"cpus": 10**30}, "it must be a whole number from 1 to"),
    "timed on": ("bench", {"artifact": "a.onnx", "runtime": "ort-gpu"}, "unknown runtime 'ort-gpu': did you mean"),
    "a block": ("tune", {"encoding": "rope", "hidden-size": 7}, "hidden_size"),
    "a block's number": ("tune", {"encoding": "rope", "batch": 0}, "batch is '0': it must be a whole number from 1"),
    "a parameter": ("tune", {"encoding": "rope", "set": "thta=1"}, "unknown parameter of rope 'thta': did you mean"),
    "all refused": ("matrix", {"encoding": "swin", "mode": "decode"}, "its forms refuse every combination"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str, tmp_path: Path) -> None:
    artifact(tmp_path)
    kind, said, sentence = BAD[name]
    with pytest.raises(RequestError) as error:
        planned(tmp_path, **({} if kind is None else {"kind": kind}), **said)
    assert sentence in str(error.value)
    assert str(error.value).endswith(".")


def test_artifacts_of_one_name_are_told_apart_and_brackets_are_no_pattern(tmp_path: Path) -> None:
    (folder := tmp_path / "run[1]").mkdir()
    for place in ("a", "b"):
        (folder / place).mkdir()
        artifact(folder / place, content=place.encode())
    for given in (["a", "b"], "*/a.onnx", str(folder / "?" / "a.onnx").replace("[", "[[]")):
        jobs = planned(folder, kind="verify", artifact=given).jobs
        assert [job.label for job in jobs] == ["verify a/a.onnx", "verify b/a.onnx"], given
        assert {job.arguments[0] for job in jobs} == {"a.onnx"}
    assert len(planned(tmp_path, kind="verify", artifact="run[1]/a/a.onnx").jobs) == 1


def test_a_switch_is_said_either_way() -> None:
    words = {said: planned(kind="tune", encoding="rope", causal=said).jobs[0].arguments for said in (True, "false")}
    assert words == {True: ("--encoding", "rope", "--causal"), "false": ("--encoding", "rope", "--no-causal")}


@pytest.mark.parametrize("key", ["weights", "from", "layer", "output"])
def test_a_config_names_no_other_files(key: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("encoding = 'rope'\n")
    assert planned(tmp_path, kind="tune", config="c.toml").jobs[0].arguments == ("--config", "c.toml")
    (tmp_path / "c.toml").write_text(f"encoding = 'rope'\n{key} = 'x'\n")
    with pytest.raises(RequestError, match=f"has '{key}', which doesn't travel with a job"):
        planned(tmp_path, kind="tune", config="c.toml")


FILES = {
    "job = 3": "has no jobs: write at least one [[job]] table",
    "": "has no jobs",
    "[job]\nkind = 'matrix'": "has one table [job]: write [[job]], with two brackets",
    "[[jobs]]\nkind = 'matrix'": "unknown key of sweep.toml 'jobs': did you mean 'job'?",
    "[[job]\n": "is not TOML",
}


@pytest.mark.parametrize("text", FILES)
def test_files_that_hold_no_jobs(text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(text)
    refused(cli("sweep", tmp_path / "sweep.toml", "-o", tmp_path / "out"), FILES[text])
    assert not (tmp_path / "out").exists()


def test_requests_that_are_no_sweep(tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    refused(cli("sweep", *out), "there are no jobs: give a TOML file, or --job")
    refused(cli("sweep", tmp_path / "none.toml", *out), "can't be read (No such file or directory)")
    refused(cli("sweep", "--job", "matrix rope", *out), "has 'rope': give a kind and then key=value")
    refused(cli("sweep", "--job", "matrix 'rope", *out), "can't be read (No closing quotation): close its quotes.")
    refused(cli("sweep", "--job", "matrix", "--workers", 0, *out), "workers is '0': it must be a whole number from 1")
    refused(cli("sweep", "--job", "matrix", "--workers", 1, "--ray", "auto", *out), "give one.")
    assert not (tmp_path / "out").exists()


def test_a_sweep_of_too_many_jobs_is_refused_before_they_are_listed(tmp_path: Path) -> None:
    artifact(tmp_path)
    many = {"scenario": [f"prefill:{n}" for n in range(1, 5000)], "shape": [f"batch=1,seq={n}" for n in range(1, 5000)]}
    with pytest.raises(RequestError, match="it asks for 24,990,001 jobs, and a sweep has 100,000 at most"):
        planned(tmp_path, kind="bench", artifact="a.onnx", **many)


def test_jobs_of_all_tables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [JobTable({"kind": "matrix", "encoding": name, "form": "native"}) for name in ("rope", "swin", "t5")]
    made = plan(tables, options_of)
    count = len(made.jobs) + len(made.refused)
    for most, fits in ((count, True), (count - 1, False)):
        monkeypatch.setattr(job_plan, "MOST_JOBS", most)
        if fits:
            assert len(plan(tables, options_of).jobs) == len(made.jobs)
            continue
        with pytest.raises(RequestError, match="those of other tables included"):
            plan(tables, options_of)


def test_an_error_names_its_job(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text("[[job]]\nkind = 'matrix'\n[[job]]\nkind = 'tune'\nencoding = 'rop'\n")
    refused(cli("sweep", tmp_path / "sweep.toml", "--dry-run"), "sweep.toml, job 2: unknown encoding 'rop'")
    refused(cli("sweep", "--job", "tune encoding=rop", "--dry-run"), "--job 'tune encoding=rop': unknown encoding")


def test_what_a_kind_adds_are_options_of_its_command() -> None:
    for name, kind in KINDS.items():
        known = {f"--{option}" for option in options_of(name)}
        known |= {text for option in options_of(name).values() for text in option.secondary_opts}
        keys = {f"--{key}" for key in (*kind.axes, *kind.whole, *kind.names, *kind.files, *kind.excluded)}
        assert keys | {word for word in kind.always if word.startswith("--")} <= known, name


def test_options_are_those_that_click_knows() -> None:
    options = options_of("tune")
    assert (options["set"].multiple, options["seed"].multiple) == (True, False)
    assert (options["causal"].is_flag, options["causal"].secondary_opts) == (True, ["--no-causal"])
    properties = options_of("verify")["properties"]
    assert (properties.is_flag, properties.secondary_opts) == (True, [])
    assert not options["kv-cache"].is_flag


@pytest.mark.parametrize(
    ("gpu", "gpus", "reason"),
    [
        ("H200", 1, None),
        ("h200", 2, None),
        ("H200", 3, "it needs 3 GPUs H200, and this machine has 2"),
        ("H100", 1, "it needs a GPU H100, and this machine has NVIDIA H200"),
    ],
)
def test_a_machine_has_as_many_gpus_as_a_job_needs(
    gpu: str, gpus: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "device", lambda: ("NVIDIA H200", "9.0"))
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    machine = Local(1)
    assert machine.refusal(JobResources(cpus=1, gpu=gpu, gpus=gpus)) == reason
    machine.close()
