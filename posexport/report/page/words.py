"""The terms of the page, for a reader who was sent one: what candidates, forms and runtimes are called."""

from __future__ import annotations

from posexport.report.page.blocks import Table, cells

WORDS = {
    "block": "one attention layer with its positional encoding, as PyTorch computes it",
    "form": "how a block is written as ONNX: decomposed, function, native or contrib",
    "decomposed": "plain operators of the standard, which every runtime knows",
    "function": "the standard's operators inside functions that the file brings along",
    "native": "the standard's own Attention and RotaryEmbedding, since opset 23",
    "contrib": "ONNX Runtime's own operators (com.microsoft)",
    "ort": "ONNX Runtime; ort-cpu and ort-cuda are its two devices; a candidate 'for ort' runs nowhere else",
    "tensorrt-import": "TensorRT's parser reads the file and its graph is evaluated on the CPU; no GPU is needed",
    "io_binding": "inputs and outputs of ONNX Runtime are given as buffers that stay in place",
    "peers": "others' ways to run the same block: torch eager, torch.compile, torch.onnx.export, ORT's optimizer",
    "lower bound": "the bare matrix products of the block: nothing can be much faster",
    "prefill, decode": "many tokens at once, or one new token behind those in the cache",
    "clearly": "the winner's interval against every other lies below 1",
    "likely": "so it does, but the machine was busy, or others left the race early",
    "tie, too close to call": "that interval holds 1; or, across separate runs, those of the two against torch overlap",
    "stale": "a result of other bytes than those of the file on the page",
}


def table() -> Table:
    """All of them, closed until somebody asks."""
    return Table(
        caption="The words of this page", columns=("word", "meaning"), folded="What the words mean",
        rows=tuple(cells(word, meaning) for word, meaning in WORDS.items()),
    )  # fmt: skip
