"""A whole decoder of about 100 million parameters, compared with alternatives: decoding steps with a cache, and a
prompt.

The checkpoint is a Llama with random weights in fp32. Its files come from posexport, torch's own export, the exporter
inside transformers with its fusions, the model builder of onnxruntime-genai, and mobius. All files run on ONNX
Runtime's CPU provider with the same number of threads. Growing caches are outputs that ONNX Runtime allocates. Buffers
are bound as input and output at the same time. In torch, the eager model has growing caches and the compiled one has
static caches. The floor reads all weights and caches once. A contender is timed only if it gives torch's logits.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnxruntime
import tokenizers
import torch
import transformers
from results import Row, compared, not_run
from timing import THREADS, Contender, merged, ranking, time_sessions

from posexport import temporary
from posexport.runtimes.base import Arrays

sys.path.insert(0, str(Path(__file__).parents[1] / "suite"))
from architecture import Architecture
from exporters import EXPORTERS, Export
from wrappers import wrap

CONFIG: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
QUICK: Mapping[str, Any] = {"hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
LLAMA = Architecture(
    name="llama", kind="decoder", config="LlamaConfig", model="LlamaForCausalLM", options={}, encoding="rope"
)

OURS: Mapping[str, tuple[str, ...]] = {
    "decomposed": ("--form", "decomposed", "--target", "ort"),
    "native": ("--form", "native", "--target", "ort"),
    "contrib": ("--form", "contrib", "--target", "ort"),
    "contrib, buffers": ("--form", "contrib", "--target", "ort", "--kv-cache", "shared"),
}
"""Options of `posexport export --model`, by the name of the form."""

TOOLS: Mapping[str, Export] = {
    "torch.onnx.export": EXPORTERS["dynamo23"],
    "transformers.exporters with fusions": EXPORTERS["transformers_cpu"],
}
EAGER, COMPILED, FLOOR = "torch eager", "torch.compile", "the floor"
BUILDER, MOBIUS = "onnxruntime-genai's builder", "mobius"

FARTHEST = 2e-3
"""The largest error of the logits, in units of their root mean square."""

ROOM = 64
"""The free places of a buffer after the last token."""


@attrs.frozen
class Situation:
    """`seq` new tokens after `past` cached ones. `target` is the largest ratio to the fastest alternative. If
    `among_files` is set, only alternatives in ONNX Runtime count. `floor` is the largest ratio to the floor."""

    seq: int
    past: int
    rounds: int
    burst: int
    target: float
    floor: float | None
    among_files: bool = False


SITUATIONS = {
    "a step behind 512": Situation(1, 512, 15, 3, 1.0, 1.25),
    "a step behind 2048": Situation(1, 2048, 15, 3, 1.0, 1.25),
    "a prompt of 512": Situation(512, 0, 5, 1, 1.1, None, among_files=True),
}


class File:
    """An ONNX file. Cached keys and values are buffers if it `shares` them."""

    def __init__(self, path: Path, shares: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = THREADS, 3
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._shares = shares
        self._names = [one.name for one in self._session.get_outputs()]

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        """A function that runs the file once and returns the seconds."""
        binding, held = self._session.io_binding(), dict[str, onnxruntime.OrtValue]()
        for name in (one.name for one in self._session.get_inputs()):
            array = inputs[_usual(name)]
            if self._shares and name.startswith("past"):
                batch, heads, past, size = array.shape
                room = np.zeros((batch, heads, past + inputs["input_ids"].shape[1] + ROOM, size), array.dtype)
                room[:, :, :past] = array
                array = room
            held[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, held[name])
        for name in self._names:
            past_name = name.replace("present", "past_key_values")
            if self._shares and past_name in held:
                binding.bind_ortvalue_output(name, held[past_name])
            else:
                binding.bind_output(name)
        self._binding, self._held = binding, held  # the inputs must outlive the binding

        def call() -> float:
            start = time.perf_counter()
            self._session.run_with_iobinding(binding)
            return time.perf_counter() - start

        return call

    def logits(self, inputs: Arrays) -> np.ndarray[Any, Any]:
        """The logits of the last token."""
        self.prepare(inputs)()
        values = self._binding.get_outputs()[
            next(at for at, name in enumerate(self._names) if name.endswith("logits"))
        ].numpy()
        return np.asarray(values[:, -1])


def _usual(name: str) -> str:
    """Optimum's name of an input, given the name of transformers' exporter."""
    name = re.sub(r"past_key_values\.layers\.(\d+)\.(key|value)s", r"past_key_values.\1.\2", name)
    return name.removeprefix("input.")


class Torch:
    """The module of transformers: eager with a growing cache, or compiled with a static one."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self._model, self._compiled = model, compiled
        self._call = torch.compile(model, dynamic=False) if compiled else model

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        """A function that runs the module once and returns the seconds. It restores the cache afterwards."""
        ids = torch.from_numpy(inputs["input_ids"])
        pairs = _pairs(inputs)
        past, seq = pairs[0][0].shape[2], ids.shape[1]
        cache: Any = transformers.DynamicCache()
        if self._compiled:
            cache = transformers.StaticCache(config=self._model.config, max_cache_len=past + seq)
        if past or not self._compiled:
            for layer, pair in enumerate(pairs):
                cache.update(*pair, layer)
        self._last = torch.empty(0)

        def call() -> float:
            start = time.perf_counter()
            with torch.no_grad():
                self._last = self._call(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            seconds = time.perf_counter() - start
            for layer in cache.layers:
                if self._compiled:
                    layer.cumulative_length.fill_(past)
                else:
                    layer.keys, layer.values = layer.keys[:, :, :past], layer.values[:, :, :past]
            return seconds

        return call

    def logits(self, inputs: Arrays) -> np.ndarray[Any, Any]:
        """The logits of the last token."""
        self.prepare(inputs)()
        return self._last[:, -1].numpy()


class Floor:
    """Reads as many bytes as the weights and caches take."""

    def __init__(self, weights: int) -> None:
        self._weights = weights

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        """A function that reads them once and returns the seconds."""
        caches = sum(array.size for name, array in inputs.items() if name.startswith("past"))
        values = torch.ones(self._weights + caches)

        def call() -> float:
            start = time.perf_counter()
            values.sum()
            return time.perf_counter() - start

        return call


def measure(quick: bool) -> list[Row]:
    """For each situation, the best form's ratio to each alternative, to the fastest of them and to the floor."""
    torch.set_num_threads(THREADS)
    with temporary.folder() as folder:
        checkpoint = folder / "checkpoint"
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **(QUICK if quick else {})}))
        transformers.logging.disable_progress_bar()
        model.eval().save_pretrained(checkpoint)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))  # the builder needs one
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(checkpoint)
        files, missing = dict[str, tuple[Path, bool]](), dict[str, str]()
        for name, path, shares, write in _writers(folder, checkpoint, model):
            path.parent.mkdir()
            try:
                write(path)
                files[name] = path, shares
            except Exception as error:  # an error of another tool becomes a row
                missing[name] = f"it wrote no file: {str(error).strip().splitlines()[-1][:200]}"
        return [row for name, case in SITUATIONS.items() for row in _rows(name, case, model, files, missing, quick)]


def _writers(folder: Path, checkpoint: Path, model: Any) -> Iterator[tuple[str, Path, bool, Callable[[Path], None]]]:
    for name, options in OURS.items():
        yield name, folder / name / "model.onnx", "buffers" in name, partial(write_ours, checkpoint, options)
    wrapped = wrap(LLAMA, model)
    for name, tool in TOOLS.items():
        yield name, folder / name / "model.onnx", False, partial(tool, wrapped, wrapped.draw(2, 3, 4, 0))
    yield BUILDER, folder / "builder" / "model.onnx", True, partial(_build, checkpoint, folder / "genai")
    yield MOBIUS, folder / "mobius" / "model.onnx", True, partial(_mobius, checkpoint, folder / "mobius packages")


def write_ours(checkpoint: Path, options: tuple[str, ...], path: Path) -> None:
    """Write the file with posexport's command."""
    export = ["-m", "posexport", "export", "--from", str(checkpoint), "--model", *options, "-o", str(path)]
    run_command([sys.executable, *export])


def _build(checkpoint: Path, packages: Path, path: Path) -> None:
    """Write the file with the model builder of onnxruntime-genai, which uses the installed ONNX Runtime."""
    _install(packages, "onnxruntime-genai")
    builder = ["-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu", "-c", str(packages / "hub")]
    run_command([sys.executable, *builder, "-i", str(checkpoint), "-o", str(path.parent)], PYTHONPATH=str(packages))


def _mobius(checkpoint: Path, packages: Path, path: Path) -> None:
    install_mobius(packages)
    write_mobius(checkpoint, packages, path)


def install_mobius(packages: Path) -> None:
    """Install mobius into a folder of its own."""
    _install(packages, "mobius-onnx==0.1.0", "onnx-shape-inference")


def write_mobius(checkpoint: Path, packages: Path, path: Path) -> None:
    """Write the file with mobius, in its form for ONNX Runtime's CPU provider."""
    build = ["-m", "mobius", "build", "--config", str(checkpoint), "--ep", "cpu", str(path.parent)]
    run_command([sys.executable, *build], PYTHONPATH=str(packages))


def _install(folder: Path, *packages: str) -> None:
    """Install packages into a folder, without their dependencies: the installed versions of other packages stay in
    use."""
    run_command([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages])


def run_command(command: list[str], **variables: str) -> None:
    """Run a command with additional environment variables. If it fails, raises RuntimeError with what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"exit code {done.returncode}")


def _rows(
    name: str,
    case: Situation,
    model: Any,
    files: Mapping[str, tuple[Path, bool]],
    missing: Mapping[str, str],
    quick: bool,
) -> list[Row]:
    inputs = _inputs(model, case)
    loads: dict[str, Callable[[], Any]] = {EAGER: partial(Torch, model, False), COMPILED: partial(Torch, model, True)}
    loads |= {file: partial(File, *about) for file, about in files.items()}
    reference, wrong = loads[EAGER]().logits(inputs), dict(missing)
    for one, load in list(loads.items()):
        try:
            error = float(np.abs(load().logits(inputs) - reference).max() / np.sqrt((reference**2).mean()))
            reason = None if error <= FARTHEST else f"its logits are off by {error:.2g} of their root mean square"
        except Exception as failure:  # an error of an engine becomes a row
            reason = str(failure).strip().splitlines()[0][:200]
        if reason is not None:
            del loads[one]
            wrong[one] = reason
    if case.floor is not None:
        loads[FLOOR] = partial(Floor, sum(parameter.numel() for parameter in model.parameters()))
    contenders = {one: Contender(load, inputs) for one, load in loads.items()}
    rounds = 2 if quick else case.rounds
    series = time_sessions(contenders, 2, lambda seconds: rounds, case.burst)
    others = [one for one in loads if one not in OURS and one != FLOOR]
    best = ranking(series, [one for one in OURS if one in loads], EAGER)[0]
    judged = [one for one in others if not case.among_files or one not in (EAGER, COMPILED)]
    fastest = ranking(series, judged or others, EAGER)[0]
    which = "the fastest file" if case.among_files else "the fastest"
    chosen, whole = f"{name}, {best}", merged(series, 1)  # the first session chooses, the others judge
    rows = [compared(f"{chosen} to {one}", whole[best], whole[one], None) for one in others if one != fastest]
    rows.insert(0, _judged(compared(f"{chosen} to {fastest}, {which}", whole[best], whole[fastest], case.target)))
    rows += [
        compared(f"{name}, {one} to {EAGER}", whole[one], whole[EAGER], None)
        for one in OURS
        if one in loads and one != best
    ]
    if case.floor is not None:
        rows.append(_judged(compared(f"{chosen} to {FLOOR}", whole[best], whole[FLOOR], case.floor)))
    return rows + [not_run(f"{name}, {one}", None, reason) for one, reason in wrong.items()]


def _judged(row: Row) -> Row:
    """The row, passed if its interval reaches down to the target."""
    return attrs.evolve(row, state="passed") if row.low is not None and row.low <= (row.target or 0) else row


def _inputs(model: Any, case: Situation) -> Arrays:
    """One row of tokens, and the caches that a prompt wrote."""
    tokens = torch.randint(3, model.config.vocab_size, (1, case.past + case.seq))
    cache: Any = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens[:, : max(case.past, 1)], past_key_values=cache, use_cache=True, logits_to_keep=1)
    inputs = {
        "input_ids": tokens[:, case.past :].numpy(),
        "attention_mask": np.ones((1, case.past + case.seq), np.int64),
        "position_ids": np.arange(case.past, case.past + case.seq)[None],
    }
    for number, layer in enumerate(cache.layers):
        for kind, values in (("key", layer.keys), ("value", layer.values)):
            inputs[f"past_key_values.{number}.{kind}"] = values[:, :, : case.past].numpy().copy()
    return inputs


def _pairs(inputs: Arrays) -> list[tuple[torch.Tensor, torch.Tensor]]:
    layers = sum(name.startswith("past") for name in inputs) // 2
    names = [[f"past_key_values.{layer}.{kind}" for kind in ("key", "value")] for layer in range(layers)]
    return [(torch.from_numpy(inputs[key]), torch.from_numpy(inputs[value])) for key, value in names]
