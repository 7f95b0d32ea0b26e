"""Mutated files for every reader: `python fuzz_files.py READER FOLDER SEED COUNT` prints the faults as JSON.

A mutant is made from a sound file by its structure (a field of protobuf, a node of a JSON tree, a value of TOML, the
header of an array) or by its bytes (cut short, bits flipped). A reader must either read it or refuse it with one clean
sentence. Everything else is a fault: another exception, a sentence that is too long or contains control characters,
more than LONGEST seconds, or more than MOST_MEMORY bytes. This process may crash: the file of the last mutant stays in
the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from file_mutator import Mutator
from fuzz_tokenizers import tokenizer_reader

LONGEST = 10
"""The CPU seconds that one file may take."""

MOST_MEMORY = 1_500_000_000
"""The bytes that one file may add to the memory of the process."""

Read = Callable[[Path], object]
Make = Callable[[Mutator], bytes]


def cli(*arguments: str | Path) -> None:
    """Run a command in this process and check what it prints. Raises its refusal."""
    from click.testing import CliRunner

    from posexport.cli import main

    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code not in (0, 1, 2, 3):
        raise AssertionError(f"exit code {done.exit_code}")
    check_text(done.output.replace("\n", " "), 100_000)
    if done.exit_code == 2:
        raise _error()(done.stderr.strip())


def check_text(text: str, longest: int = 8000) -> None:
    """Raise AssertionError for what `bad_text` finds."""
    fault = bad_text(text, longest)
    assert fault is None, fault


def bad_text(text: str, longest: int = 8000) -> str | None:
    """What is wrong with printed text: it could control a terminal, or it is too long. None if nothing is wrong."""
    bad = [character for character in text if not character.isprintable()]
    if bad:
        return f"{bad[:3]} reaches the terminal"
    return f"a text of {len(text)} characters" if len(text) > longest else None


def try_all(*readers: Callable[[], object]) -> None:
    """Call several readers of one file and check the texts of their refusals. Raises the last refusal if all readers
    refuse."""
    refusals: list[Exception] = []
    for read in readers:
        try:
            read()
        except _error() as error:
            check_text(str(error))
            refusals.append(error)
    if len(refusals) == len(readers):
        raise refusals[-1]


def onnx_reader(folder: Path) -> tuple[str, Make, Read]:
    import onnx

    sound = onnx.load(folder / "sound.onnx")
    data = sound.SerializeToString()

    def make(mutator: Mutator) -> bytes:
        if mutator.random.randrange(3) == 0:
            return mutator.raw(data)
        model = onnx.ModelProto()
        model.CopyFrom(sound)
        for _ in range(mutator.random.choice((1, 1, 2, 4))):
            if mutator.random.randrange(4) == 0 and model.metadata_props:  # the spec and the rest
                entry = mutator.random.choice(list(model.metadata_props))
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    entry.value = mutator.tree(json.loads(entry.value)).decode()
            else:
                mutator.message(model)
        made = model.SerializeToString()
        if mutator.random.randrange(6) == 0:  # names that are not UTF-8
            made = made.replace(
                mutator.random.choice((b"q_proj", b"output", b"MatMul", b"posexport")), b"\xff\xfe\xfdq_p"[:6]
            )
        return made

    inspect_in_process()

    def read(path: Path) -> None:
        from posexport.artifact.graph_shape import read_graph_shape
        from posexport.artifact.loaded import load_artifact

        cli("inspect", path)
        cli("inspect", path, "--json")
        artifact = load_artifact(path)
        check_text(artifact.contract_violation or "")
        weights = artifact.source.weights()
        for name in weights:
            weights[name]
        read_graph_shape(path, path.name)

    return "mutant.onnx", make, read


def inspect_in_process() -> None:
    """Let `inspect` work without its child process, which takes seconds to start, and without engines."""
    from posexport.graphs import inspection
    from posexport.processes import explain

    def inspect(graph: Any, *_: Any, **__: Any) -> Any:
        try:
            return inspection.inspected(graph, {}, attention=False)
        except Exception as error:  # the child reports it the same way
            return inspection.Inspection(roles={}, reason=explain(error))

    inspection.inspect_graph = inspect


def manifest_reader(folder: Path) -> tuple[str, Make, Read]:
    inspect_in_process()
    data = json.loads((folder / "sound.onnx.json").read_bytes())
    name = "mutant.onnx"
    (folder / name).write_bytes((folder / "sound.onnx").read_bytes())
    data["file"] = name

    def read(path: Path) -> None:
        from posexport.artifact.loaded import load_artifact
        from posexport.artifact.manifest import matches_manifest

        cli("inspect", folder / name)
        load_artifact(folder / name)
        matches_manifest(folder / name)

    return f"{name}.json", _json(data), read


def plan_reader(folder: Path) -> tuple[str, Make, Read]:
    data = json.loads((folder / "sound.plan.json").read_bytes())
    (folder / "mutant.plan").write_bytes((folder / "sound.plan").read_bytes())
    data["file"] = "mutant.plan"

    def read(path: Path) -> None:
        from posexport.artifact.loaded import load_artifact

        cli("inspect", folder / "mutant.plan")
        cli("inspect", folder / "mutant.plan", "--json")
        artifact = load_artifact(folder / "mutant.plan")
        check_text(artifact.contract_violation or "")

    return "mutant.plan.json", _json(data), read


def safetensors_reader(folder: Path) -> tuple[str, Make, Read]:
    data = (folder / "sound.safetensors").read_bytes()

    def read(path: Path) -> None:
        from posexport.models import read_spec
        from posexport.models.checkpoints import read_checkpoint
        from posexport.models.weights import read_weights

        spec = read_spec({"encoding": {"name": "rope"}, "hidden_size": 16, "num_heads": 2})

        def look_up(weights: Any) -> None:
            for name in weights:
                weights[name]

        try_all(
            lambda: look_up(read_weights(path, spec)[1]),
            lambda: look_up(read_checkpoint(path.parent / "checkpoint", 0, 1, {}).weights),
        )

    (folder / "checkpoint").mkdir(exist_ok=True)
    (folder / "checkpoint" / "config.json").write_bytes((folder / "config.json").read_bytes())
    link = folder / "checkpoint" / "model.safetensors"
    if not link.is_symlink():
        link.symlink_to("../mutant.safetensors")
    return "mutant.safetensors", lambda mutator: mutator.safetensors(data), read


def config_reader(folder: Path) -> tuple[str, Make, Read]:
    data = json.loads((folder / "config.json").read_bytes())
    more = [
        {**data, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {**data, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
        {**data, "model_type": "gemma3_text", "layer_types": ["sliding_attention"], "sliding_window": 8, "head_dim": 8},
        {"model_type": "t5", "d_model": 16, "num_heads": 2, "d_kv": 8, "num_layers": 2, "d_ff": 32, "vocab_size": 9},
        {"model_type": "llama4", "text_config": data},
    ]

    def read(path: Path) -> None:
        from posexport.models.checkpoints import read_checkpoint

        read_checkpoint(path, None, 1, {})

    return "mutant.json", lambda mutator: _json(mutator.random.choice([data, *more]))(mutator), read


def toml_reader(folder: Path) -> tuple[str, Make, Read]:
    texts = [path.read_text() for path in sorted(folder.glob("*.sound.toml"))]

    def read(path: Path) -> None:
        from posexport.export.request import read_request
        from posexport.workflows.project.file import find_project
        from posexport.workflows.sweep.job_plan import read_tables

        try_all(
            lambda: read_request(str(path), None, {}, {}),
            lambda: find_project(str(path)),
            lambda: cli("sweep", path, "--dry-run", "-o", path.parent / "sweep"),
            lambda: read_tables(path),
        )

    def make(mutator: Mutator) -> bytes:
        text = mutator.random.choice(texts)
        return mutator.toml(text) if mutator.random.randrange(6) else mutator.raw(text.encode())

    return "mutant.toml", make, read


def result_reader(folder: Path) -> tuple[str, Make, Read]:
    sound = [json.loads(path.read_bytes()) for path in sorted((folder / "results").glob("*.json"))]

    def read(path: Path) -> None:
        from posexport.bench.result import read_benchmark
        from posexport.report.page.page import make_page, to_html
        from posexport.verify.matrix.table import read as read_matrix

        try_all(lambda: read_benchmark(path), lambda: read_matrix(path), lambda: to_html(make_page([path])))

    return "mutant.json", lambda mutator: _json(mutator.random.choice(sound))(mutator), read


def npz_reader(folder: Path) -> tuple[str, Make, Read]:
    import numpy as np

    arrays = {"hidden_states": np.ones((2, 5, 16), np.float32), "position_ids": np.tile(np.arange(5), (2, 1))}

    def read(path: Path) -> None:
        from posexport.artifact.loaded import load_artifact
        from posexport.runtimes.npz import read_arrays
        from posexport.verify.user_inputs import fit_inputs

        artifact = load_artifact(folder / "sound.onnx")
        fit_inputs(path, read_arrays(path), artifact.spec, artifact.inputs, artifact.bounds)

    return "mutant.npz", lambda mutator: mutator.npz(arrays), read


def _json(data: Any) -> Make:
    text = json.dumps(data).encode()
    return lambda mutator: mutator.tree(data) if mutator.random.randrange(8) else mutator.raw(text)


def _error() -> type[Exception]:
    """The base class of posexport's own errors."""
    from posexport.errors import PosexportError

    return PosexportError


def planted(read: Read) -> Callable[[Path], tuple[str, Make, Read]]:
    """A reader with a planted fault, for any bytes."""
    return lambda folder: ("mutant.bin", lambda mutator: mutator.raw(b"posexport" * 10), read)


def _raises(path: Path) -> None:
    raise KeyError(path.name)


def _escapes(path: Path) -> None:
    class Loud(_error()):  # type: ignore[misc]
        def __str__(self) -> str:
            return "\x1b[2J"

    raise Loud


def _hangs(path: Path) -> None:
    while True:
        pass


def _grows(path: Path) -> None:
    bytearray(MOST_MEMORY + 2**28)[::4096] = b"x" * len(range(0, MOST_MEMORY + 2**28, 4096))


def _crashes(path: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


READERS: dict[str, Callable[[Path], tuple[str, Make, Read]]] = {
    "onnx": onnx_reader,
    "manifest": manifest_reader,
    "plan-manifest": plan_reader,
    "safetensors": safetensors_reader,
    "config": config_reader,
    "toml": toml_reader,
    "result": result_reader,
    "npz": npz_reader,
    "tokenizer": tokenizer_reader,
}
PLANTED: dict[str, Read] = {
    "planted-raise": _raises,
    "planted-escape": _escapes,
    "planted-hang": _hangs,
    "planted-memory": _grows,
    "planted-crash": _crashes,
}


class Late(BaseException):
    """A file took too long. It is a BaseException, so that no `except Exception` catches it."""


def _late(*_: object) -> None:
    raise Late


def fuzz(reader: str, folder: Path, seed: int, count: int, longest: float = LONGEST) -> dict[str, Any]:
    """Read `count` mutants. Returns how many were refused and read, and the faults with the seeds of their mutants."""
    name, make, read = READERS[reader](folder) if reader in READERS else planted(PLANTED[reader])(folder)
    from posexport import machine

    error = _error()
    signal.signal(signal.SIGVTALRM, _late)
    result: dict[str, Any] = {"reader": reader, "files": 0, "refused": 0, "read": 0, "faults": []}
    for number in range(seed, seed + count):
        path = folder / name
        path.write_bytes(make(Mutator(number)))
        fault, before = None, machine.forget_peak()
        start = time.process_time()
        try:
            # Stopped in here: the outer handlers also catch a signal that arrives while the timer is being stopped.
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, longest)
                read(path)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            result["read"] += 1
        except error as refused:
            result["refused"] += 1
            fault = bad_text(str(refused))
        except Late:
            fault = f"no end within {longest} s"
        except BaseException as raised:
            fault = f"{type(raised).__name__}: {raised}"[:300]
            result["where"] = _where(raised)
        if fault is None and (grown := machine.peak() - before) > MOST_MEMORY:
            fault = f"it took {grown / 1e9:.1f} GB"
        result["files"] += 1
        if fault is not None:
            seconds = time.process_time() - start
            result["faults"].append([number, fault, round(seconds, 1), result.pop("where", "")])
    return result


def _where(error: BaseException) -> str:
    import traceback

    frames = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return " ".join(frames[-6:])


if __name__ == "__main__":
    given = sys.argv[1:]
    seconds = float(given[4]) if len(given) > 4 else LONGEST
    print(json.dumps(fuzz(given[0], Path(given[1]), int(given[2]), int(given[3]), seconds)))  # noqa: T201
