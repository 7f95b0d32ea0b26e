"""Generates in a child process, `python -P -m posexport.runtimes.generation_process`: the file may be hostile.

A request is {path, session, prompts, options, trained_length, encoder, inputs, begin, usual_begin, vocabulary}: a
decoder, options of posexport.runtimes.ort, token ids of each row, GenerationOptions, and the number of positions that
the model was trained for, or null. For an encoder-decoder, `encoder` is the file of its encoder. It reads the prompts,
or the arrays in the .npz file `inputs`, with ids below `vocabulary` if that is known. Each row of new tokens begins
with the ids `begin`, or with `usual_begin` if there are none. The tokens of each step are reported as they are made, as
JSON. The answer is {generated}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport import machine
from posexport.errors import NotFiniteError, RequestError, RuntimeMissingError, shown
from posexport.jsondata import structure, unstructure
from posexport.processes import MISSING, NOT_FINITE, Worker, failure_of, report, serve

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    from posexport.artifact.graph_file import GraphFile
    from posexport.runtimes.generation import Decoder, Generated, GenerationOptions

LONGEST_STEP = 600.0
"""The seconds that a step, or opening the file, may take."""

ALLOCATION = {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**20}"}
"""Makes the C library return large memory as soon as it is freed.

Otherwise some of the memory that opening a file needs temporarily, a sixth of its weights, stays allocated. Only the
GNU C library reads this variable.
"""


def generate_in_child(
    path: Path,
    session: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    trained_length: int | None = None,
    encoder: Path | None = None,
    inputs: Path | None = None,
    begin: Sequence[int] = (),
    usual_begin: Sequence[int] = (),
    vocabulary: int | None = None,
    told: Callable[[list[int | None]], None] = lambda _: None,
) -> Generated:
    """`posexport.runtimes.generation.generate` in another process.

    RequestError if it fails in any way, and RuntimeMissingError if the runtime is missing.
    """
    from posexport.runtimes.generation import Generated

    worker = Worker("posexport.runtimes.generation_process", environment=ALLOCATION)
    request = {
        "path": str(path.absolute()),
        "session": dict(session),
        "prompts": [list(prompt) for prompt in prompts],
        "options": unstructure(options),
        "trained_length": trained_length,
        "encoder": None if encoder is None else str(encoder.absolute()),
        "inputs": None if inputs is None else str(inputs.absolute()),
        "begin": list(begin),
        "usual_begin": list(usual_begin),
        "vocabulary": vocabulary,
    }
    try:
        reply = worker.ask(request, LONGEST_STEP, lambda step: told(json.loads(step)))
    finally:
        worker.close()
    failure = failure_of(reply)
    if failure is not None:
        kind = {MISSING: RuntimeMissingError, NOT_FINITE: NotFiniteError}.get(failure.code, RequestError)
        raise kind(f"{str(path)!r} can't generate: {failure.text.rstrip('.')}.")
    return structure(reply["generated"], Generated)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Open the file and generate."""
    from posexport.runtimes.generation import GenerationOptions, generate
    from posexport.runtimes.ort import open_session

    provider = request["session"].get("provider", "CPU")
    if provider == "CPU":  # CUDA maps far more memory than it uses
        machine.limit_to_what_is_free()
    path, prompts = Path(request["path"]), request["prompts"]
    uneven = request["encoder"] is None and len({len(prompt) for prompt in prompts}) > 1
    _check_file(path, uneven)
    session, _ = open_session(path, {**request["session"], "new_lengths": True})
    decoder, prompts = _opened(request, session, "cpu" if provider == "CPU" else "cuda")
    options = structure(request["options"], GenerationOptions)
    generated = generate(decoder, prompts, options, lambda tokens: report(json.dumps(tokens)))
    return {"generated": unstructure(generated)}


def _check_file(path: Path, uneven: bool) -> None:
    """RequestError for a file that can't generate, or that can't generate from `uneven` prompts."""
    from posexport.artifact.weights_on_disk import read_with_weights_on_disk

    graph = read_with_weights_on_disk(path)
    _check_dtypes(graph)
    if uneven and _counts_from_the_left(graph.model):
        raise RequestError(
            "the file has GroupQueryAttention, which takes no padding on the left: give one prompt, or several of as "
            "many tokens."
        )


def _opened(
    request: dict[str, Any], session: onnxruntime.InferenceSession, device: str
) -> tuple[Decoder, list[list[int]]]:
    """The decoder, with the encoder's outputs if it has one, and the tokens with which each row begins."""
    from posexport.runtimes import generation_encoder as encoders
    from posexport.runtimes.generation import Decoder
    from posexport.runtimes.npz import read_arrays
    from posexport.runtimes.ort import open_session

    length, prompts, inputs = request["trained_length"], request["prompts"], request["inputs"]
    if not encoders.reads_encoder(session):
        for option, given in (("--inputs", inputs is not None), ("--decoder-input-ids", bool(request["begin"]))):
            if given:
                raise RequestError(f"it has no encoder, which {option} is for: give a prompt alone.")
        return Decoder(session, device, length), prompts
    if request["encoder"] is None:
        raise RequestError(
            "it takes what an encoder gives, and there is none beside it: name the decoder decoder_NAME.onnx and the "
            "encoder encoder_NAME.onnx, as `export --model` does."
        )
    begin = request["begin"] or request["usual_begin"]
    if not begin:
        raise RequestError("config.json beside it has no decoder_start_token_id: give --decoder-input-ids.")
    encoder, _ = open_session(Path(request["encoder"]), {**request["session"], "new_lengths": True})
    arrays = encoders.arrays_of_prompts(encoder, prompts) if inputs is None else read_arrays(Path(inputs))
    rows, encoded = encoders.encode(encoder, session, arrays, device, request["vocabulary"])
    return Decoder(session, device, length, encoded), [begin] * rows


def _check_dtypes(graph: GraphFile) -> None:
    """RequestError for a file in bf16, before a session fails at one of its operators: numpy has no such dtype."""
    for name, (_, dtype) in (*graph.inputs().items(), *graph.outputs().items()):
        if dtype == "bf16":
            raise RequestError(
                f"{shown(name)} is bf16: give a decoder in fp32 or fp16, as `export --model --dtype fp32` writes it."
            )


def _counts_from_the_left(model: onnx.ModelProto) -> bool:
    """Whether the attention of a file counts keys from the left, whatever the mask says."""
    nodes = (*model.graph.node, *(node for function in model.functions for node in function.node))
    return any(node.op_type == "GroupQueryAttention" for node in nodes)


if __name__ == "__main__":
    serve(answer)
