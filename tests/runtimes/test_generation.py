"""Tokens of exported decoders compared with transformers' `generate`, and the sampling of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from small_decoders import NATIVE, PROMPTS, TRAINED, VOCABULARY, exported_model, greedy, small_checkpoint

from posexport.artifact import graph_file
from posexport.errors import RequestError
from posexport.runtimes import generation_process
from posexport.runtimes.generation import BUFFER, Decoder, Generated, GenerationOptions, generate
from posexport.runtimes.generation_process import generate_in_child

pytest.importorskip("transformers")

COUNT = 24

FILES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "grown": ("Llama", NATIVE, "grown"),
    "decomposed": ("Llama", (), "grown"),
    "buffers": ("Llama", (*NATIVE, "--kv-cache", "shared"), "buffers"),
    "contrib": ("Llama", ("--form", "contrib", "--target", "ort"), "grown"),
    "fp16": ("Llama", ("--dtype", "fp16", "--form", "native"), "grown"),
    "no caches": ("Llama", ("--kv-cache", "none"), "none"),
    "learned": ("GPT2", ("--form", "native"), "grown"),
    "no positions": ("Bloom", (), "grown"),
}
"""By name: a model, the options of its export, and the kind of its caches."""

Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A function that returns the file of a row of FILES and its model in transformers. Each is made once."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            kind, options, _ = FILES[name]
            model = small_checkpoint(folder / kind, kind)
            (folder / str(len(known))).mkdir()
            known[name] = exported_model(folder / kind, folder / str(len(known)) / "model.onnx", *options), model
        return known[name]

    return make


def run(path: Path, prompts: Any = PROMPTS, trained_length: int | None = None, **options: Any) -> Generated:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    settings = GenerationOptions(**{"max_new_tokens": COUNT, **options})
    return generate(Decoder(session, trained_length=trained_length), prompts, settings)


QUICK = {"buffers"}
"""Rows of FILES in the usual run. The others run with `scripts/test slow`."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in FILES])
def test_greedy_tokens_are_those_of_transformers(name: str, made: Callable[[str], Made]) -> None:
    path, model = made(name)
    if name == "fp16":
        model = model.half().float()  # only weights are rounded; activations differ little
    found = run(path)
    assert [list(row) for row in found.tokens] == greedy(model, count=COUNT)
    assert len({token for row in found.tokens for token in row}) > 4  # otherwise every file would pass
    assert found.cache == FILES[name][2]
    assert len(found.step_seconds) == COUNT - 1


@pytest.mark.slow
def test_a_row_alone_has_the_same_tokens(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    assert [run(path, [prompt]).tokens[0] for prompt in PROMPTS] == list(run(path).tokens)


def reads_the_other_cache(model: onnx.ModelProto) -> None:
    """The second layer reads the cache of the first."""
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            node.input[at] = name.replace("past_key_values.1.", "past_key_values.0.")


def forgets_positions(model: onnx.ModelProto) -> None:
    """Every token has the position of the first."""
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == "position_ids":
                node.input[at] = "wrong_positions"
    node = helper.make_node("Sub", ["position_ids", "position_ids"], ["wrong_positions"])
    model.graph.node.insert(0, node)


def sees_padding(model: onnx.ModelProto) -> None:
    """The mask says that nothing is padding."""
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == "attention_mask":
                node.input[at] = "wrong_mask"
    node = helper.make_node("Equal", ["attention_mask", "attention_mask"], ["same"])
    cast = helper.make_node("Cast", ["same"], ["wrong_mask"], to=TensorProto.INT64)
    model.graph.node.insert(0, cast)
    model.graph.node.insert(0, node)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plant", [reads_the_other_cache, forgets_positions, sees_padding])
def test_planted_faults_give_other_tokens(
    plant: Callable[[onnx.ModelProto], None], made: Callable[[str], Made], tmp_path: Path
) -> None:
    path, model = made("grown")
    graph = onnx.load(path)
    plant(graph)
    onnx.save(graph, tmp_path / "wrong.onnx")
    assert [list(row) for row in run(tmp_path / "wrong.onnx").tokens] != greedy(model, count=COUNT)


def test_a_row_ends_with_its_stop_token(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    whole = run(path).tokens
    stop = whole[1][5]
    found = run(path, stop=(stop,)).tokens
    for row, full in zip(found, whole, strict=True):
        assert row == full[: full.index(stop) + 1] if stop in full else row == full


def test_all_rows_stopped_is_the_end(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    first = [row[0] for row in run(path, max_new_tokens=1).tokens]
    found = run(path, stop=tuple(first))
    assert [list(row) for row in found.tokens] == [[token] for token in first]
    assert found.step_seconds == ()


def test_the_same_seed_draws_the_same(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    first, second, other = (run(path, temperature=1.0, seed=seed).tokens for seed in (3, 3, 4))
    assert first == second != other


LOGITS = np.array([0.3, 2.0, -1.0, 1.5, 0.3, -4.0, 1.9, 0.0])
DRAWS: dict[str, tuple[dict[str, float], set[int]]] = {
    "all": ({}, set(range(8))),
    "cold": ({"temperature": 0.4}, set(range(8))),
    "top_k": ({"top_k": 3}, {1, 6, 3}),
    "top_p": ({"top_p": 0.7}, {1, 6, 3}),  # the two most likely tokens have probability 0.62
    "top_p of top_k": ({"top_k": 3, "top_p": 0.6}, {1, 6}),  # 0.38 and 0.35 among the three
    "top_p of 0": ({"top_p": 0.0}, {1}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRAWS)
def test_tokens_are_drawn_by_their_probability(name: str) -> None:
    """With 20,000 rows of the same logits, counts are within 5 standard deviations of the softmax probabilities."""
    options, kept = DRAWS[name]
    rows = 20_000
    found = generate(Constant(np.tile(LOGITS, (rows, 1))), [[0]] * rows, sampling(1, **options))  # type: ignore[arg-type]
    counts = np.bincount([row[0] for row in found.tokens], minlength=8)
    weights = np.exp(LOGITS / options.get("temperature", 1.0)) * [index in kept for index in range(8)]
    expected = rows * weights / weights.sum()
    assert set(np.flatnonzero(counts)) <= kept
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 1e-9).all()


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 5e-324])
def test_a_temperature_of_almost_0_draws_the_likeliest(temperature: float) -> None:
    found = generate(Constant(np.tile(LOGITS, (5, 1))), [[0]] * 5, sampling(1, temperature=temperature))  # type: ignore[arg-type]
    assert found.tokens == ((1,),) * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_minus_infinity_are_no_answer(temperature: float) -> None:
    hidden = np.full((2, 8), -np.inf)
    hidden[:, :2] = 1
    options = {"max_new_tokens": 2, "temperature": temperature}
    with pytest.raises(RequestError, match="the logits of all tokens that may be chosen are minus infinity"):
        generate(Constant(hidden), [[0]] * 2, GenerationOptions(**options, suppressed=(0, 1)))  # type: ignore
    found = generate(Constant(hidden), [[0]] * 2, GenerationOptions(**options, suppressed=(0,)))  # type: ignore
    assert found.tokens == ((1, 1),) * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_infinity_are_no_answer(temperature: float, tmp_path: Path) -> None:
    path = decoder(tmp_path / "x.onnx")
    model = onnx.load(path)
    model.graph.initializer[0].CopyFrom(helper.make_tensor("zero", 1, (1, 1, 1, 2), [1.0, np.inf]))
    onnx.save(model, path)
    assert refusal(path, prompts=[[3, 4]], temperature=temperature).startswith("the logits are NaN or infinity")


def test_buffers_are_used_to_their_last_slot(tmp_path: Path) -> None:
    """The last generated token needs no slot, because no later step reads it."""
    path = decoder(tmp_path / "x.onnx", cache=("batch", 2, 16, 4))
    assert len(run(path, [[1] * 16], max_new_tokens=1).tokens[0]) == 1
    assert len(run(path, [[1] * 12], max_new_tokens=5).tokens[0]) == 5
    assert "are 17 together, and the caches have room for 16" in refusal(path, prompts=[[1] * 12], max_new_tokens=6)


def test_buffers_larger_than_memory_are_refused(tmp_path: Path) -> None:
    path = decoder(tmp_path / "x.onnx", cache=("batch", 2**20, BUFFER, 2**10))
    assert "memory ran out for caches of 1000000006 tokens" in refusal(path, max_new_tokens=10**9)


class Constant:
    """A decoder that always gives the same logits."""

    vocabulary, cache = 8, "none"

    def __init__(self, logits: np.ndarray[Any, Any]) -> None:
        self._logits = logits.astype(np.float32)

    def start(self, rows: int, room: int) -> None:
        pass

    def step(self, input_ids: Any, mask: Any) -> Any:
        return self._logits


def sampling(count: int, **options: float) -> GenerationOptions:
    return GenerationOptions(**{"max_new_tokens": count, "temperature": 1.0, **options})


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(RequestError) as raised:
        run(path, **options)
    return str(raised.value)


def decoder(
    path: Path, more: tuple[str, ...] = (), cache: Any = ("batch", 2, "past", 4), lacking: str = "", kind: int = 1
) -> Path:
    """A file with the inputs and outputs of a decoder that computes nothing."""
    shapes: dict[str, Any] = {"input_ids": ("batch", "seq"), "attention_mask": ("batch", "total")}
    inputs = [helper.make_tensor_value_info(name, 7, shape) for name, shape in shapes.items() if name != lacking]
    inputs += [helper.make_tensor_value_info(name, 1, ("batch",)) for name in more]
    inputs.append(helper.make_tensor_value_info("past_key_values.0.key", kind, cache))
    names = {"logits": (kind, ("batch", "seq", 9)), "present.0.key": (kind, cache)}
    outputs = [helper.make_tensor_value_info(name, *what) for name, what in names.items() if name != lacking]
    one = helper.make_tensor("zero", kind, (1, 1, 1, 1), [0.0])
    nodes = [helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"])]
    nodes.append(helper.make_node("Squeeze", ["zero", "axis"], ["logits"]))
    axis = helper.make_tensor("axis", 7, (1,), [0])
    nodes = [node for node in nodes if node.output[0] != lacking]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, [one, axis])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path


COUNTER = """<ir_version: 10, opset_import: ["": 18]>
decoder (int64[b, s] input_ids, int64[b, t] attention_mask, float[b, 1] IN)
    => (float[b, s, 9] logits, float[b, 1] OUT)
    <float nine = {9}, int64 width = {9}, float[2] ends = {0, 1}, int64[1] last = {1}, int64[1] nine_ = {9}> {
    numbers = Cast<to = 1>(input_ids)
    sum = ReduceSum(numbers, last)
    OUT = Add(IN, sum)
    rest = Mod<fmod = 1>(OUT, nine)
    token = Cast<to = 7>(rest)
    one = OneHot<axis = -1>(token, width, ends)
    tokens = Shape(input_ids)
    shape = Concat<axis = 0>(tokens, nine_)
    logits = Expand(one, shape)
}"""
"""A decoder whose state is the sum of all tokens. The next token is this sum modulo 9."""


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.recurrent_state", "present.0.recurrent_state"),
        ("past_ssm.0", "present_ssm.0"),
        ("past.0.conv", "present.0.conv"),
    ],
)
def test_states_are_handed_on(past: str, present: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(COUNTER)
    for value in (*model.graph.input, *model.graph.output):
        value.name = {"IN": past, "OUT": present}.get(value.name, value.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [{"IN": past, "OUT": present}.get(name, name) for name in names]
    onnx.save(model, tmp_path / "x.onnx")
    made = run(tmp_path / "x.onnx", [[3, 4], [1, 1]], max_new_tokens=4)
    assert made.tokens == ((7, 5, 1, 2), (2, 4, 8, 7))
    assert made.cache == "states"


NO_DECODERS: dict[str, tuple[dict[str, Any], str]] = {
    "merged": ({"more": ("use_cache_branch",)}, "'use_cache_branch', it is a merged decoder"),
    "encoder-decoder": ({"more": ("encoder_hidden_states",)}, "it computes keys and values of an encoder"),
    "vectors": ({"more": ("inputs_embeds",)}, "it takes vectors in place of tokens"),
    "another input": ({"more": ("whatever",)}, "'whatever', decoders that can be run here have no such input"),
    "no tokens": ({"lacking": "input_ids"}, "the file has no input 'input_ids'"),
    "no logits": ({"lacking": "logits"}, "the file has no output 'logits'"),
    "no present": ({"lacking": "present.0.key"}, "the file has no output 'present.0.key'"),
    "bfloat16": ({"kind": 16}, "is tensor(bfloat16): give a decoder in fp32 or fp16"),
    "unknown heads": ({"cache": ("batch", "heads", "past", 4)}, "heads and their size must be numbers"),
    "caches of two axes": ({"cache": ("batch", 4)}, "['batch', 4]: it must be ['batch', 'heads', 'tokens', 'size']"),
    "logits of one row": ({}, "the logits of 3 rows have the shape [1, 1, 1]"),
    "small buffers": ({"cache": ("batch", 2, 16, 4)}, "are 30 together, and the caches have room for 16"),
}


@pytest.mark.parametrize("name", NO_DECODERS)
def test_what_is_no_decoder_is_refused(name: str, tmp_path: Path) -> None:
    options, said = NO_DECODERS[name]
    assert said in refusal(decoder(tmp_path / "x.onnx", **options))


def test_tokens_that_are_not_there(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    said = refusal(path, prompts=[[3, VOCABULARY]])
    assert said == f"the token {VOCABULARY} is none of the model's: give ids from 0 to {VOCABULARY - 1}."


@pytest.mark.slow
def test_positions_behind_a_learned_table(made: Callable[[str], Made]) -> None:
    path, _ = made("learned")
    prompts = [[7] * (TRAINED - 4)]
    assert len(run(path, prompts, trained_length=TRAINED, max_new_tokens=5).tokens[0]) == 5
    said = refusal(path, prompts=prompts, trained_length=TRAINED, max_new_tokens=6)
    assert said.startswith(f"prompt and new tokens reach position {TRAINED}, and the model has the positions 0 to 95")


def test_a_table_of_positions_that_the_file_computes_goes_on(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    assert len(run(path, [[7] * TRAINED], trained_length=TRAINED, max_new_tokens=6).tokens[0]) == 6


def test_logits_that_are_nan_are_no_answer(tmp_path: Path, made: Callable[[str], Made]) -> None:
    graph = onnx.load(made("grown")[0])
    (norm,) = (tensor for tensor in graph.graph.initializer if tensor.name == "model.norm.weight")
    norm.CopyFrom(onnx.numpy_helper.from_array(np.full(32, np.nan, np.float32), norm.name))
    onnx.save(graph, tmp_path / "nan.onnx")
    assert refusal(tmp_path / "nan.onnx").startswith("the logits are NaN")


def test_the_child_process_gives_the_same(made: Callable[[str], Made]) -> None:
    path, _ = made("grown")
    steps: list[list[int | None]] = []
    found = generate_in_child(path, {}, PROMPTS, GenerationOptions(max_new_tokens=4), told=steps.append)
    assert found.tokens == run(path, max_new_tokens=4).tokens
    assert [list(row) for row in zip(*found.tokens, strict=True)] == steps


def test_attention_that_counts_from_the_left_takes_no_padding_on_the_left(tmp_path: Path) -> None:
    path = decoder(tmp_path / "grouped.onnx")
    model = onnx.load(path)
    model.graph.node.append(helper.make_node("GroupQueryAttention", ["zero"], ["unused"], domain="com.microsoft"))
    onnx.save(model, path)
    with pytest.raises(RequestError, match="takes no padding on the left: give one prompt, or several of as many"):
        generate_in_child(path, {}, [[1, 2], [3]], GenerationOptions())


def test_torch_is_not_needed() -> None:
    """Generation needs only ONNX Runtime."""
    import subprocess
    import sys

    code = "import sys, posexport.runtimes.generation; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch is not None


def test_a_file_is_checked_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise memory would contain the weights twice: once for the check and once in the session."""
    weight = onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "weight")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 64]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])], "graph", values[:1], values[1:], [weight]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "a.onnx")
    checked: list[graph_file.GraphFile] = []
    monkeypatch.setattr(generation_process, "_check_dtypes", checked.append)
    generation_process._check_file(tmp_path / "a.onnx", uneven=False)
    assert [len(each.raw_data) for each in checked[0].model.graph.initializer] == [0]
