"""The builder's list of its kernels. It is read if it has the expected form; otherwise the answer is "not known", never
"fused"."""

from __future__ import annotations

import pytest

from posexport.jsondata import unstructure
from posexport.runtimes.tensorrt.kernels import read_kernels, read_memory

HEAD = "Layers:\n"
SHAPES = "Name: __mye1_myl0_0, LayerType: shape_call, Inputs: [], Outputs: [], TacticName: , StreamId: 0, Metadata: \n"
GEMM = (
    "Name: node_mha_1_myl0_1, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,256], Datatype: Half }], "
    "Outputs: [], TacticName: stub, StreamId: 0, "
    "Metadata: [ONNX Layer: node_1]\x1f[ONNX Layer: Cast_2 | node_rotate (RotaryPosition)]\n"
)
MHA = (
    "Name: _gemm_mha_v2_myl0_4, LayerType: kgen, Inputs: [], TacticName: _gemm_mha_v2_0xd1, StreamId: 0, "
    "Metadata: [ONNX Layer: Softmax_1]\n"
)
KGEN = "Name: __myl_Tran_myl0_6, LayerType: kgen, Inputs: [], TacticName: t, StreamId: 0, Metadata: \n"
TAIL = "\nI/O Tensors:\n Name: hidden_states, IOMode: Input, DataType: Half\n"


def test_rows_nodes_and_host_steps() -> None:
    found = read_kernels(["other", HEAD + SHAPES + GEMM + MHA + KGEN + TAIL], layers=1)
    assert [row.type for row in found.rows] == ["gemm", "kgen", "kgen"]
    assert found.rows[0].nodes == ("node_1", "Cast_2 | node_rotate (RotaryPosition)")
    assert found.rows[2].nodes == ()
    assert (found.host_steps, found.attention_kernels, found.fused_attention) == (1, 1, True)
    assert found.count == 3


def test_a_product_named_after_a_node_is_no_attention_kernel() -> None:
    found = read_kernels([HEAD + GEMM + KGEN + TAIL], layers=1)
    assert (found.attention_kernels, found.fused_attention) == (0, False)


@pytest.mark.parametrize(("kernels", "layers"), [(1, 2), (0, 1), (2, 1)])
def test_fused_means_one_kernel_for_each_layer(kernels: int, layers: int) -> None:
    assert read_kernels([HEAD + KGEN + MHA * kernels + TAIL], layers=layers).fused_attention is False


def test_an_unknown_type_counts_as_a_kernel() -> None:
    found = read_kernels([HEAD + KGEN.replace("kgen", "novelty") + TAIL], layers=1)
    assert found.count == 1


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["Engine Layer Information:\nLayer(Myelin): {ForeignNode[node_1...output]}, Tactic: 0x0"],
        [HEAD + MHA + TAIL, HEAD + MHA + TAIL],
        [HEAD + TAIL],
        [HEAD],
        [HEAD + SHAPES + TAIL],
        [HEAD + MHA + "Kernel: _gemm_mha_v2\n" + TAIL],
        [HEAD + "Name: _gemm_mha_v2_myl0_4, Kind: kgen, Metadata: \n" + TAIL],
    ],
)
def test_anything_else_is_not_known_with_a_reason(messages: list[str]) -> None:
    found = read_kernels(messages, layers=1)
    assert found.fused_attention is None
    assert found.attention_kernels is None
    assert found.unknown
    data = unstructure(found)
    assert (data["count"], data["fused_attention"], data["rows"]) == (None, None, [])
    assert data["unknown"] == found.unknown


def test_memory_is_read_or_not_known() -> None:
    assert read_memory(["Max Scratch Memory: 12 bytes", "Total Weights Memory: 5 bytes", "noise"]) == {
        "scratch": 12,
        "activation": None,
        "weights": 5,
    }
