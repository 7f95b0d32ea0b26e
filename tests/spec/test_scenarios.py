"""Scenarios by name: how they are read, and which sizes an artifact gets for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import small_spec

from posexport.artifact.loaded import LoadedArtifact
from posexport.bench.benchmark import points
from posexport.bench.scenarios import SWEEPS, Scenario, read_scenario
from posexport.bench.shapes import scenario_sizes
from posexport.bench.timed_artifact import TimedArtifact
from posexport.errors import RequestError
from posexport.spec.contract import bounds_of, graph_inputs


def artifact(form: str = "function", fixed: dict[str, int] | None = None, **over: Any) -> LoadedArtifact:
    """An artifact without a file. Its dimensions are free unless `fixed` gives them."""
    spec = small_spec(over.pop("encoding", "rope"), **over)
    bounds = bounds_of(graph_inputs(spec), {}) | {dim: (size, size) for dim, size in (fixed or {}).items()}
    path = Path("block.onnx")
    source: Any = SimpleNamespace(path=path, spec=spec, form=form, opset=18)
    return LoadedArtifact(path=path, source=source, inputs={}, outputs={}, bounds=bounds)


@pytest.mark.parametrize("kind", SWEEPS)
def test_a_name_alone_is_its_whole_sweep(kind: str) -> None:
    found = read_scenario(kind)
    assert [each.size for each in found] == list(SWEEPS[kind])
    assert all(each.swept and each.kind == kind for each in found)


def test_sizes_that_are_named_are_those_alone() -> None:
    assert [str(each) for each in read_scenario(" decode:2048, 7")] == ["decode:2048", "decode:7"]
    assert not any(each.swept for each in read_scenario("batch:4,8"))
    assert read_scenario("prefill:16") == [Scenario("prefill", 16, swept=True)]  # one point, however it is requested


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefil", "unknown scenario 'prefil': did you mean 'prefill'"),
        ("", "unknown scenario ''"),
        ("prefill:", "has the size ''"),
        ("prefill:0", "has the size '0'"),
        ("decode:-1", "has the size '-1'"),
        ("decode:2k", "has the size '2k'"),
        ("batch:1,,2", "has the size ''"),
        ("batch:²", "has the size '²'"),
        ("prefill:99999999999", "has the size '99999999999'"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_scenario(text)
    assert message in str(caught.value)


CACHED = {"kv_cache": "concat"}
SIZES: dict[str, tuple[dict[str, Any], str, str]] = {
    "prompt": ({}, "prefill:1024", "batch=1,seq=1024"),
    "prompt for a cache": (CACHED, "prefill:16", "batch=1,seq=16,past_seq=0"),
    "step": (CACHED, "decode:2048", "batch=1,seq=1,past_seq=2048"),
    "step in a buffer": ({"kv_cache": "shared"}, "decode:2048", "batch=1,seq=1,past_seq=2048,max_seq=2049"),
    "early step in a buffer": ({"kv_cache": "shared"}, "decode:9", "batch=1,seq=1,past_seq=9,max_seq=1024"),
    "prompts": ({}, "batch:8", "batch=8,seq=128"),
    "prompts for a cache": (CACHED, "batch:8", "batch=8,seq=512,past_seq=0"),
    "encoder": ({"cross": True, "encoding": "none"}, "prefill:16", "batch=1,seq=16,encoder_seq=512"),
    "fixed batch": ({"fixed": {"batch": 3}}, "prefill:16", "batch=3,seq=16"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_scenario_has_sizes(name: str) -> None:
    over, text, sizes = SIZES[name]
    (scenario,) = read_scenario(text)
    assert str(scenario_sizes(artifact(**over), scenario)) == sizes


@pytest.mark.parametrize(
    ("over", "text", "message"),
    [
        ({}, "decode:8", "--scenario decode:8: 'block.onnx' has no cache"),
        (
            {"encoding": "learned", "max_positions": 64},
            "prefill:65",
            "--scenario prefill:65: seq is 65: learned knows 64",
        ),
        ({"fixed": {"seq": 196}}, "prefill:128", "--scenario prefill:128: seq is 128: 'block.onnx' takes exactly 196"),
        ({"fixed": {"batch": 1}}, "batch:2", "--scenario batch:2: batch is 2"),
        ({"kv_cache": "shared", "fixed": {"max_seq": 64}}, "decode:64", "the cache has 64 places"),
    ],
    ids=["no cache", "table", "seq", "batch", "buffer"],
)
def test_a_named_size_that_does_not_fit_is_refused(over: dict[str, Any], text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        points(TimedArtifact(artifact(**over)), (), (text,))
    assert message in str(caught.value)


def test_a_sweep_leaves_out_what_does_not_fit_and_says_why() -> None:
    one = artifact(encoding="learned", max_positions=512)
    sizes, names, left_out = points(TimedArtifact(one), (), ("prefill",))
    assert names == [("prefill:1",), ("prefill:16",), ("prefill:128",), ("prefill:512",)]
    assert [each.seq for each in sizes] == [1, 16, 128, 512]
    assert [each.scenario for each in left_out] == ["prefill:1024", "prefill:4096", "prefill:16384"]
    assert all("learned knows 512 positions" in each.reason for each in left_out)


def test_a_sweep_of_which_nothing_fits_is_refused() -> None:
    with pytest.raises(RequestError, match=r"nothing of the sweep can be timed: .*has no cache"):
        points(TimedArtifact(artifact()), (), ("decode",))


def test_scenarios_and_shapes_stand_beside_each_other_once() -> None:
    sizes, names, _ = points(TimedArtifact(artifact()), ("seq=16", "seq=5"), ("prefill:16", "prefill:16,1", "batch:1"))
    assert list(zip(map(str, sizes), names, strict=True)) == [
        ("batch=1,seq=16", ("prefill:16",)),
        ("batch=1,seq=1", ("prefill:1",)),
        ("batch=1,seq=128", ("batch:1",)),
        ("batch=1,seq=5", ()),
    ]


def test_scenarios_of_equal_sizes_keep_their_names() -> None:
    sizes, names, _ = points(TimedArtifact(artifact()), (), ("prefill:128", "batch:1"))
    assert (list(map(str, sizes)), names) == (["batch=1,seq=128"], [("prefill:128", "batch:1")])


@pytest.mark.parametrize("texts", [("prefill", "prefill:1024"), ("prefill:1024", "prefill")])
def test_a_size_that_is_named_is_refused_whatever_sweep_has_it_too(texts: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="--scenario prefill:1024"):
        points(TimedArtifact(artifact(encoding="learned", max_positions=512)), (), texts)
