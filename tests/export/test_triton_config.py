"""config.pbtxt against Triton's schema, and against rules that the schema cannot express; each is broken once."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers import small_spec

from posexport.artifact.profiles import profiles_of
from posexport.errors import RequestError, RuntimeMissingError
from posexport.export.triton import config as triton_config
from posexport.export.triton.batching import batching_of
from posexport.export.triton.config import config_of, read_config, schema, text_of
from posexport.export.triton.rules import problems
from posexport.export.triton.served_artifact import ServedArtifact
from posexport.runtimes.installation import install_command
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

SPECS = {
    "plain": small_spec("rope", padding_mask=True),
    "shared": small_spec("rope", kv_cache="shared", causal=True),
    "grown": small_spec("alibi", kv_cache="concat", causal=True, layers=2),
    "several axes": small_spec("rope2d"),
    "tokens": small_spec("t5", vocab_size=11, dtype="fp16"),
    "cross": small_spec("none", cross=True),
}


def served(spec: Spec, backend: str = "onnxruntime", instances: int = 1, **fields: Any) -> Any:
    """The configuration of an artifact with the block of `spec`; `fields` change the artifact."""
    shapes = {name: shape for name, (shape, _) in graph_inputs(spec).items()}
    spans = profiles_of(shapes)
    values = {**graph_inputs(spec), **graph_outputs(spec)}
    plan = spans if backend == "tensorrt" else None
    known = {
        "backend": backend,
        "title": "",
        "spec": spec,
        "inputs": graph_inputs(spec),
        "outputs": graph_outputs(spec),
        "usual": {name: shapes["opt"] for name, shapes in spans.items()},
        "profiles": plan,
        "operators": frozenset(),
        "manifest": None,
        "files": {},
        "about": "",
    }
    artifact = ServedArtifact(**{**known, **fields})
    return config_of("block", artifact, batching_of(spec, values, profiles=plan), instances=instances)


def broken(config: Any, spec: Spec) -> list[str]:
    return problems(config, "block", graph_inputs(spec), graph_outputs(spec))


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("name", SPECS)
def test_the_text_is_valid_by_the_schema_and_the_rules(name: str, backend: str) -> None:
    spec = SPECS[name]
    config = served(spec, backend, instances=3)
    text = text_of(config, ["first", "second"])
    assert text.startswith(b"# first\n# second\n")
    assert read_config(text) == config
    assert broken(config, spec) == []
    assert config.instance_group[0].count == 3
    assert [entry.name for entry in config.input] == list(graph_inputs(spec))
    assert [entry.name for entry in config.output] == list(graph_outputs(spec))
    assert bool(config.max_batch_size) == config.HasField("dynamic_batching")


HOSTILE = 'x\nmodel_operations { op_library_filename: "e.so" }\n#'
"""A name that ends a comment and adds a field."""


@pytest.mark.parametrize(
    "comment", [HOSTILE, HOSTILE.replace("\n", "\r\n"), "\udc80\x1b[2J"], ids=["field", "CRLF", "control"]
)
def test_a_comment_is_one_line_whatever_names_are_in_it(comment: str) -> None:
    config = served(SPECS["plain"])
    text = text_of(config, [comment, "second"])
    assert read_config(text) == config
    assert text.splitlines()[1] == b"# second"
    assert text.partition(b"\n\n")[0].isascii()


def test_the_batch_is_left_to_triton_where_requests_are_joined() -> None:
    config = served(SPECS["shared"])
    dims = {entry.name: list(entry.dims) for entry in config.input}
    assert dims["hidden_states"] == [-1, 32]
    assert dims["past_key"] == [4, -1, 8]
    assert dims["write_indices"] == [1]
    reshaped = [entry.name for entry in config.input if entry.HasField("reshape")]
    assert reshaped == ["write_indices"]  # Clients send [batch, 1], and the graph takes [batch].
    assert list(config.model_warmup[0].inputs["past_key"].dims) == [4, 4096, 8]


def test_the_batch_stands_in_dims_where_they_are_not() -> None:
    config = served(SPECS["grown"])
    assert config.max_batch_size == 0
    assert {entry.name: list(entry.dims) for entry in config.output} == {
        "output": [-1, -1, 32],
        **{f"present_{kind}.{layer}": [-1, 4, -1, 8] for layer in (0, 1) for kind in ("key", "value")},
    }
    sample = config.model_warmup[0]
    assert sample.batch_size == 1
    assert list(sample.inputs["past_key.1"].dims) == [1, 4, 1024, 8]


def test_an_empty_cache_is_not_warmed_up() -> None:
    spec = SPECS["grown"]
    usual = {
        name: [1024 if dim == "past_seq" else 1 if isinstance(dim, str) else dim for dim in shape]
        for name, (shape, _) in graph_inputs(spec).items()
    }
    assert served(spec, usual=usual).model_warmup
    empty = {name: [0 if dim == 1024 else dim for dim in shape] for name, shape in usual.items()}
    assert not served(spec, usual=empty).model_warmup


def test_types_instances_and_profiles() -> None:
    pb, _ = schema()
    config = served(small_spec("rope", dtype="bf16"), "tensorrt")
    assert pb.DataType.Name(config.input[0].data_type) == "TYPE_BF16"
    assert broken(config, small_spec("rope", dtype="bf16")) == []
    assert list(config.instance_group[0].profile) == ["0"]
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert pb.ModelInstanceGroup.Kind.Name(config.instance_group[0].kind) == "KIND_GPU"
    assert (config.platform, config.default_model_filename) == ("tensorrt_plan", "model.plan")


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Sets one field of a message, for example `input.0.data_type`."""

    def change(config: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            config = config[int(part)] if part.isdecimal() else getattr(config, part)
        if isinstance(value, list):
            getattr(config, last)[:] = value
        else:
            setattr(config, last, value)

    return change


def clear(path: str) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            config = config[int(part)] if part.isdecimal() else getattr(config, part)
        config.ClearField(last)

    return change


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "another name": (put("name", "other"), "must be the same"),
    "backend": (put("backend", "pytorch"), "known are"),
    "platform": (put("platform", "tensorrt_plan"), "platform is"),
    "file": (put("default_model_filename", "model.plan"), "the file is"),
    "negative batch": (put("max_batch_size", -1), "max_batch_size is -1"),
    "no policy": (clear("version_policy"), "version_policy is missing"),
    "a tensor less": (lambda config: config.input.pop(), "inputs are"),
    "a tensor twice": (lambda config: config.output.add(name="output"), "outputs are"),
    "another type": (put("input.0.data_type", 12), "has TYPE_FP64"),
    "no dims": (clear("input.0.dims"), "has no dims"),
    "zero dim": (put("output.0.dims", [-1, 0]), "each must be 1 or more"),
    "another dim": (put("input.0.dims", [-1, 64]), "whole shape [-1, -1, 64]"),
    "a dim more": (put("output.0.dims", [-1, -1, 32]), "whole shape [-1, -1, -1, 32]"),
    "reshape lost": (clear("input.2.reshape"), "whole shape [-1, 1]"),
    "reshape grows": (put("input.2.dims", [2]), "their sizes differ"),
    "preferred too large": (put("dynamic_batching.preferred_batch_size", [9]), "preferred_batch_size [9]"),
    "no batch to join": (put("max_batch_size", 0), "dynamic_batching is there"),
    "empty reshape without batch": (put("max_batch_size", 0), "reshaped to nothing"),
    "no instances": (clear("instance_group"), "instance_group is missing"),
    "count": (put("instance_group.0.count", 0), "has count 0"),
    "profile of a graph": (put("instance_group.0.profile", ["0"]), "which onnxruntime does not have"),
    "profile's number": (put("instance_group.0.profile", ["first"]), "numbers from 0"),
    "warm-up batch": (put("model_warmup.0.batch_size", 9), "has batch_size 9"),
    "warm-up input": (lambda config: config.model_warmup[0].inputs.pop("past_key"), "gives ["),
    "warm-up dims": (lambda config: config.model_warmup[0].inputs["past_key"].dims.append(2), "4096, 8, 2]"),
    "warm-up varies": (lambda config: config.model_warmup[0].inputs["position_ids"].dims.__setitem__(0, -1), "[-1]"),
    "warm-up type": (lambda config: setattr(config.model_warmup[0].inputs["past_key"], "data_type", 9), "another data"),
    "warm-up data": (lambda config: config.model_warmup[0].inputs["past_key"].ClearField("zero_data"), "no data"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_rule_finds_its_fault(fault: str) -> None:
    change, said = FAULTS[fault]
    spec = SPECS["shared"]
    config = served(spec)
    change(config)
    assert any(said in problem for problem in broken(config, spec)), broken(config, spec)


def test_rules_of_one_backend() -> None:
    bf16 = small_spec("rope", dtype="bf16")
    config = served(bf16)
    assert "bf16, which the onnxruntime backend doesn't take" in broken(config, bf16)[0]
    plan = served(SPECS["plain"], "tensorrt")
    plan.instance_group[0].kind = 2
    assert "KIND_CPU: plans run on GPUs only" in broken(plan, SPECS["plain"])[0]
    graph = served(SPECS["plain"])
    graph.instance_group[0].kind = 2
    graph.instance_group[0].gpus.append(0)
    assert broken(graph, SPECS["plain"]) == ["an instance_group of KIND_CPU names GPUs"]
    fixed = {name: ((4, *shape[1:]), dtype) for name, (shape, dtype) in graph_inputs(SPECS["cross"]).items()}
    found = problems(served(SPECS["cross"]), "block", fixed, graph_outputs(SPECS["cross"]))
    assert any("the first dimension of hidden_states, encoder_hidden_states is fixed" in each for each in found)


def test_text_outside_the_schema_is_refused() -> None:
    for text in (b"name: 'x'\nno_such_field: 1\n", b"max_batch_size: many\n", b"\xff\xfe"):
        with pytest.raises(RequestError, match="not a model configuration of Triton"):
            read_config(text)


def test_without_tritonclient_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("tritonclient"):
            raise ImportError("No module named 'tritonclient'")
        return whole(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RuntimeMissingError, match=re.escape(install_command("posexport[triton]"))):
        triton_config.schema()
