"""The lower bound counts the products and bytes of a block, and runs them."""

from typing import Any

import pytest
import torch
from helpers import run_block, small_spec, weights_for

from posexport.bench import bare_products, lower_bound
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.bench.work import Heads, Layer, Product, Work, work_on
from posexport.spec.spec import Spec


def made(spec: Spec, **sizes: int) -> Work:
    inputs = seeded_inputs(spec, Sizes(**sizes), 0)
    return work_on(spec, inputs)


def test_a_prompt_counts_four_projections_and_two_products_of_heads() -> None:
    spec = small_spec("rope", hidden_size=32, num_heads=4)
    found = made(spec, batch=2, seq=5)
    assert found.layers == (Layer((Product(1, 10, 32, 32),) * 4, Heads(8, 5, 8, 5, 8)),)
    assert found.bytes == 4 * 4 * 32 * 32
    assert found.operations == 2 * (4 * 10 * 32 * 32 + 2 * 8 * 5 * 8 * 5)


CASES: dict[str, tuple[dict[str, Any], dict[str, int], Any, int]] = {
    "step": ({"kv_cache": "concat"}, {"seq": 1, "past_seq": 7}, (4, 1, 8, 8), 4 * (4 * 32 * 32 + 2 * 7 * 32)),
    "buffer": (
        {"kv_cache": "shared"},
        {"seq": 1, "past_seq": 7, "max_seq": 64},
        (4, 1, 8, 8),
        4 * (4 * 32 * 32 + 2 * 7 * 32),
    ),
    "groups": ({"num_kv_heads": 2}, {"seq": 3}, (2, 6, 8, 3), 4 * (2 * 32 * 32 + 2 * 32 * 16)),
    "half": ({"dtype": "fp16"}, {"seq": 3}, (4, 3, 8, 3), 2 * 4 * 32 * 32),
    "layers": ({"layers": 3}, {"seq": 3}, (4, 3, 8, 3), 3 * 4 * 4 * 32 * 32),
    "mlp": (
        {"block": "transformer", "mlp": "swiglu", "intermediate_size": 40},
        {"seq": 3},
        (4, 3, 8, 3),
        4 * (4 * 32 * 32 + 3 * 32 * 40),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_work_is_that_of_the_block(name: str) -> None:
    over, sizes, attention, size = CASES[name]
    spec = small_spec("none", hidden_size=32, num_heads=4, **over)
    found = made(spec, **sizes)
    assert found.attentions == [Heads(*attention, attention[2])] * spec.layers
    assert found.bytes == size


SEEN: dict[str, tuple[dict[str, Any], dict[str, int], list[int], int]] = {
    "window": ({"window": 4}, {"seq": 1, "past_seq": 9}, [4], 3),
    "window of a prompt": ({"window": 4}, {"seq": 6, "past_seq": 0}, [4], 0),
    "both sides": ({"window": 4, "causal": False, "kv_cache": None}, {"seq": 20}, [7], 0),
    "chunk": ({"attention_chunk_size": 4}, {"seq": 1, "past_seq": 9}, [2], 1),
    "wide": ({"window": 99}, {"seq": 1, "past_seq": 9}, [10], 9),
    "pattern": ({"layers": 3, "pattern": "none:window=4,none"}, {"seq": 1, "past_seq": 9}, [4, 10, 4], 3 + 9 + 3),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_no_query_sees_is_not_in_the_lower_bound(name: str) -> None:
    over, sizes, keys, cached = SEEN[name]
    spec = small_spec("none", **{"causal": True, "kv_cache": "concat", **over})
    found = made(spec, **sizes)
    assert [each.keys for each in found.attentions] == keys
    assert found.bytes == 4 * (spec.layers * 4 * 32 * 32 + 2 * 32 * cached)


@pytest.mark.parametrize("window", [None, 4])
def test_the_lower_bound_is_no_more_than_torch_computes(window: int | None) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    spec = small_spec("none", causal=True, window=window)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_block(spec, weights_for(spec), seeded_inputs(spec, Sizes(seq=12), 0), "fp32")
    operations = made(spec, seq=12).operations
    assert (operations == counter.get_total_flops()) is (window is None)
    assert 0 < operations <= counter.get_total_flops()


def test_an_encoder_gives_the_keys() -> None:
    found = made(small_spec("none", hidden_size=32, num_heads=4, cross=True), seq=3, encoder_seq=9)
    (layer,) = found.layers
    assert layer.attention == Heads(4, 3, 8, 9, 8)
    assert [one.rows for one in layer.products] == [3, 9, 9, 3]


PROJECTIONS = (Product(1, 3, 8, 8), Product(1, 3, 8, 4))
WORK = Work(
    layers=(
        Layer(PROJECTIONS, Heads(2, 3, 4, 5, 4)),
        Layer(PROJECTIONS, Heads(2, 3, 4, 2, 6)),
        Layer((Product(2, 3, 4, 5),)),
    ),
    bytes=1000,
)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_products_run_in_torch(one_by_one: bool) -> None:
    assert bare_products.by_torch(WORK, torch.float32, one_by_one)() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_products_run_in_onnxruntime(dtype: torch.dtype) -> None:
    assert bare_products.by_ort(WORK, dtype, 1)() > 0


def test_all_products_are_nodes_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    seen = []
    real = onnxruntime.InferenceSession

    def session(model: bytes, *args: Any, **more: Any) -> Any:
        seen.append(model)
        return real(model, *args, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    bare_products.by_ort(WORK, torch.float32, 1)
    import onnx

    graph = onnx.load_from_string(seen[0]).graph
    assert [node.op_type for node in graph.node] == [
        "MatMul"
    ] * 9  # (2 projections and 2 products of heads) in 2 layers, and one more product


def test_what_cannot_run_is_left_out_while_something_can() -> None:
    def broken() -> Any:
        raise RuntimeError("not implemented for 'Half'")

    _, name, _ = lower_bound._fastest({"broken": broken, "slow": lambda: lambda: 2.0, "fast": lambda: lambda: 1.0})
    assert name == "fast"
    with pytest.raises(RuntimeError, match="Half"):
        lower_bound._fastest({"broken": broken})


def test_the_lower_bound_is_the_larger_of_products_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec("none", kv_cache="concat")
    inputs = seeded_inputs(spec, Sizes(seq=1, past_seq=7), 0)
    for products, read, bound in ((2.0, 1.0, "products"), (1.0, 2.0, "bytes")):
        for name, seconds in (("by_torch", products), ("by_ort", products), ("by_sum", read), ("by_vector", read)):
            monkeypatch.setattr(lower_bound, name, lambda *args, seconds=seconds: lambda: seconds)
        runner = lower_bound.of_spec(spec, "cpu", None)
        assert runner.prepare(inputs)() == 2.0
        assert runner.describe()["method"].startswith(bound)


def test_a_method_that_is_known_is_taken_and_no_other_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec("none")
    made = []
    for name in ("by_torch", "by_ort", "by_sum", "by_vector"):
        monkeypatch.setattr(lower_bound, name, lambda *args, name=name: made.append((name, *args[1:])) or (lambda: 1.0))
    runner = lower_bound.of_spec(spec, "cpu", None)
    runner.method = "products by torch, float32, a head at a time"
    runner.prepare(seeded_inputs(spec, Sizes(seq=3), 0))
    assert made == [("by_torch", torch.float32, True)]
    assert runner.describe()["method"] == runner.method
    made.clear()
    monkeypatch.setattr(lower_bound, "by_torch", lambda todo, kind, single: 1 / 0)
    runner.prepare(seeded_inputs(spec, Sizes(seq=3), 0))
    assert "onnxruntime" in runner.describe()["method"]  # That method cannot run here.
    runner.method = "by another machine's engine"
    runner.prepare(seeded_inputs(spec, Sizes(seq=3), 0))
    assert len(made) > 2


def test_the_roofline_is_the_larger_of_operations_and_bytes_at_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1e-9, 1e-9, 1.0])  # a product and a read, twice
    monkeypatch.setattr(bare_products, "timed", lambda call, device: lambda: next(seconds))
    monkeypatch.setattr(bare_products, "PEAK_SIDE", 8)
    monkeypatch.setattr(bare_products, "PEAK_BYTES", 64)
    call = bare_products.roofline(WORK, torch.float32, torch.device("cpu"))
    assert call() == pytest.approx(WORK.operations / (2 * 8**3))
    assert call() == pytest.approx(WORK.bytes / 64)


def test_large_weights_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    operands = bare_products._Operands(lambda shape: made.append(shape) or len(made), 4)
    monkeypatch.setattr(bare_products, "DISTINCT", 4 * 64)
    assert [operands.next(4, 8) for _ in range(5)] == [1, 2, 2, 1, 2]  # There is only room for two operands.
    assert operands.next(2, 2) == 3  # The first operand of another shape is always made.
