"""Generates in a child process, `python -P -m posexport.runtimes.generation_process`: the file may be hostile.

A request is {path, session, prompts, options, trained_length}: a decoder, options of posexport.runtimes.ort, token ids
of each row, GenerationOptions, and how many positions the model was trained for or null. The tokens of each step are
reported as they come, as JSON. The answer is {generated}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport import machine
from posexport.errors import RequestError, RuntimeMissingError
from posexport.jsondata import structure, unstructure
from posexport.processes import MISSING, Worker, failure_of, report, serve

if TYPE_CHECKING:
    from posexport.runtimes.generation import Generated, GenerationOptions

LONGEST_STEP = 600.0
"""Seconds that a step, or opening the file, may take."""


def generate_in_child(
    path: Path,
    session: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    trained_length: int | None = None,
    told: Callable[[list[int | None]], None] = lambda _: None,
) -> Generated:
    """`posexport.runtimes.generation.generate` in another process; RequestError where it fails in whatever way, and
    RuntimeMissingError where the runtime is not there."""
    from posexport.runtimes.generation import Generated

    worker = Worker("posexport.runtimes.generation_process")
    request = {
        "path": str(path.absolute()),
        "session": dict(session),
        "prompts": [list(prompt) for prompt in prompts],
        "options": unstructure(options),
        "trained_length": trained_length,
    }
    try:
        reply = worker.ask(request, LONGEST_STEP, lambda step: told(json.loads(step)))
    finally:
        worker.close()
    failure = failure_of(reply)
    if failure is not None:
        kind = RuntimeMissingError if failure.code == MISSING else RequestError
        raise kind(f"{str(path)!r} can't generate: {failure.text.rstrip('.')}.")
    return structure(reply["generated"], Generated)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Open the file and generate."""
    from posexport.runtimes.generation import Decoder, GenerationOptions, generate
    from posexport.runtimes.ort import open_session

    provider = request["session"].get("provider", "CPU")
    if provider == "CPU":  # CUDA maps far more than it takes
        machine.limit_to_what_is_free()
    path, prompts = Path(request["path"]), request["prompts"]
    if len({len(prompt) for prompt in prompts}) > 1 and _counts_from_the_left(path):
        raise RequestError(
            "the file has GroupQueryAttention, which takes no padding on the left: give one prompt, or several of as "
            "many tokens."
        )
    session, _ = open_session(path, {**request["session"], "new_lengths": True})
    decoder = Decoder(session, "cpu" if provider == "CPU" else "cuda", request["trained_length"])
    options = structure(request["options"], GenerationOptions)
    generated = generate(decoder, prompts, options, lambda tokens: report(json.dumps(tokens)))
    return {"generated": unstructure(generated)}


def _counts_from_the_left(path: Path) -> bool:
    """Whether the attention of a file counts keys from the left, whatever the mask says."""
    from posexport.artifact.graph_file import read_graph

    model = read_graph(path).model
    nodes = (*model.graph.node, *(node for function in model.functions for node in function.node))
    return any(node.op_type == "GroupQueryAttention" for node in nodes)


if __name__ == "__main__":
    serve(answer)
