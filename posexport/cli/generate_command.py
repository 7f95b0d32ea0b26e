"""`posexport generate`: makes tokens with an exported decoder or encoder-decoder, to try a file in one command."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.artifact.paths import check_artifact, encoder_beside
from posexport.cli import console
from posexport.errors import RequestError, check_known, shown
from posexport.runtimes import ORT, RUNTIMES
from posexport.runtimes.tokens import (
    length_of_short_frequencies,
    read_tokenizer,
    start_tokens,
    stop_tokens,
    trained_length,
    vocabulary_of,
)
from posexport.spec.fields import stated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from posexport.runtimes.generation import Generated, GenerationOptions
    from posexport.runtimes.generation_settings import GenerationSettings
    from posexport.runtimes.tokens import Tokenizer

_DRAWING = ("top_k", "top_p", "seed")
"""Options for sampling tokens, which needs a temperature above 0."""

_RUNTIMES = [name for name, row in RUNTIMES.items() if row.module == ORT]


@click.command()
@click.argument("file")
@click.option(
    "--prompt", metavar="TEXT", multiple=True, help="a text to continue; repeatable, for several rows of one batch"
)
@click.option(
    "--prompt-ids", metavar="1,2,3", multiple=True, help="a prompt as token ids, without a tokenizer; repeatable"
)
@click.option(
    "--inputs", type=Path, metavar="FILE", help="an .npz file with the inputs of an encoder, such as audio features"
)
@click.option(
    "--decoder-input-ids", metavar="1,2", help="first ids of an encoder-decoder's output  [default: from config.json]"
)
@click.option("--max-new-tokens", metavar="N", help="maximum number of tokens  [default: 64]")
@click.option(
    "--temperature", metavar="X", help="0 chooses the likeliest token; larger values sample more randomly  [default: 0]"
)
@click.option("--top-k", metavar="N", help="sample from this many of the likeliest tokens  [default: all]")
@click.option("--top-p", metavar="X", help="sample from the likeliest tokens with this total probability  [default: 1]")
@click.option("--seed", metavar="N", help="seed for sampling  [default: 0]")
@click.option("--ignore-eos", is_flag=True, help="continue after tokens that end a text")
@click.option("--runtime", "name", metavar="NAME", default="ort-cpu", help=f"one of: {', '.join(_RUNTIMES)}")
@click.option("--json", "as_json", is_flag=True, help="print tokens and times as JSON")
def generate(
    file: str,
    prompt: tuple[str, ...],
    prompt_ids: tuple[str, ...],
    inputs: Path | None,
    decoder_input_ids: str | None,
    ignore_eos: bool,
    name: str,
    as_json: bool,
    **given: Any,
) -> int:
    """Generate tokens with a decoder that `export --model` wrote, and show the speed.

    A prompt as text needs the files of the tokenizer in the folder of FILE; a prompt as ids needs nothing. For an
    encoder-decoder, FILE is the decoder. Its encoder, which reads the prompt, must be in the same folder.
    """
    path = Path(file)
    if path.suffix != ".onnx":
        raise RequestError(f"{file!r} does not end in .onnx: give the ONNX file of a decoder.")
    check_artifact(path)
    _check_prompt(prompt, prompt_ids, inputs)
    if name in RUNTIMES and name not in _RUNTIMES:
        raise RequestError(f"--runtime is {shown(name)}: tokens are made by {' and '.join(_RUNTIMES)}.")
    check_known("runtime", name, _RUNTIMES)
    row = RUNTIMES[name]
    from posexport.runtimes.generation import GenerationOptions
    from posexport.runtimes.generation_process import generate_in_child
    from posexport.runtimes.generation_settings import generation_settings

    folder, encoder = path.parent, encoder_beside(path)
    if encoder is not None:
        check_artifact(encoder)
    begin = () if decoder_input_ids is None else _ids("--decoder-input-ids", decoder_input_ids)
    usual_begin = start_tokens(folder)
    stop = () if ignore_eos else stop_tokens(folder)
    settings = generation_settings(folder)
    options = GenerationOptions(
        stop=stop,
        suppressed=settings.suppressed,
        suppressed_first=settings.suppressed_first,
        forced_last=settings.forced_last,
        **stated(given),
    )
    _warn_of_options(options, stated(given), settings)
    with read_tokenizer(folder) if prompt else nullcontext() as tokenizer:
        prompts = [_ids("--prompt-ids", text) for text in prompt_ids]
        prompts = prompts if tokenizer is None else tokenizer.encode(prompt)
        if not all(prompts):
            raise RequestError("a prompt has no tokens: give at least one.")
        first = len(begin or usual_begin) if encoder is not None else max(map(len, prompts), default=0)
        length, positions = trained_length(folder), first + options.max_new_tokens - 1
        if length is not None and positions > length:
            console.warn(f"prompt and new tokens have {positions} positions, and the model was trained for {length}.")
        stream = _Stream(tokenizer, silent=as_json)
        made = generate_in_child(
            path,
            row.options,
            prompts,
            options,
            trained_length=length,
            encoder=encoder,
            inputs=inputs,
            begin=begin,
            usual_begin=usual_begin,
            vocabulary=vocabulary_of(folder),
            told=stream.told,
        )
        _warn_of_caches(made, first, length_of_short_frequencies(folder))
        if as_json:
            console.show_json(_as_json(file, row.name, prompts, made, tokenizer))
        else:
            stream.end(made)
    return 0


def _check_prompt(prompt: Sequence[str], prompt_ids: Sequence[str], inputs: Path | None) -> None:
    """RequestError unless there is exactly one kind of prompt, and its text is Unicode."""
    for text in prompt:
        if not _is_unicode(text):
            raise RequestError(f"--prompt is {shown(text)}, which is not UTF-8: give text in UTF-8.")
    if sum(map(bool, (prompt, prompt_ids, inputs is not None))) != 1:
        several = prompt or prompt_ids or inputs is not None
        raise RequestError(
            f"{'several kinds of' if several else 'no'} prompt given: give one of --prompt TEXT and --prompt-ids "
            "1,2,3, or --inputs FILE for an encoder of something else than text."
        )


def _warn_of_options(options: GenerationOptions, given: Mapping[str, Any], settings: GenerationSettings) -> None:
    """Warn of given options that change nothing, and of settings beside the model that are not applied."""
    unread = [f"--{key.replace('_', '-')}" for key in given if key in _DRAWING]
    if unread and options.temperature == 0:
        console.warn(
            f"{' and '.join(unread)} change{'s' if len(unread) == 1 else ''} nothing at --temperature 0, which takes "
            "the likeliest token: give a --temperature above 0 to draw."
        )
    if settings.ignored:
        console.warn(
            f"{settings.file} asks for {', '.join(settings.ignored)}, which is not applied: tokens may be others than "
            "those of transformers."
        )


def _warn_of_caches(made: Generated, prompt_length: int, short: int | None) -> None:
    """Warn of missing caches, and of kept ones that transformers would compute again.

    `short` is the number of tokens from which on a model with longrope takes other angles; None for other models.
    """
    if made.cache == "none":
        console.warn("the file has no caches, so each step computes all tokens again.")
    elif short is not None and prompt_length <= short < prompt_length + max(map(len, made.tokens)) - 1:
        console.warn(
            f"the tokens went beyond {short}, where the model takes other angles (longrope): transformers computes "
            "the keys before them again, as a file with --kv-cache none does, and this file keeps them."
        )


def _is_unicode(text: str) -> bool:
    """Whether a word of the command line was UTF-8: Python keeps other bytes as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _ids(option: str, text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = [-1]
    if min(ids) < 0:
        raise RequestError(f"{option} is {shown(text)}: give whole numbers from 0 with commas between, as in 1,2,3.")
    return ids


class _Stream:
    """Shows the tokens of one row as they come; several rows are shown at the end."""

    def __init__(self, tokenizer: Tokenizer | None, silent: bool) -> None:
        self._tokenizer, self._silent = tokenizer, silent
        self._ids: list[int] = []
        self._written = ""

    def told(self, tokens: list[int | None]) -> None:
        if self._silent or len(tokens) > 1 or tokens[0] is None:
            return
        self._ids.append(tokens[0])
        text = self._text(self._ids)
        if not text.endswith("\ufffd"):  # part of a character; its other tokens follow
            console.write_part(text[len(self._written) :])
            self._written = text

    def _text(self, ids: Sequence[int]) -> str:
        return ",".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.decode([ids])[0]

    def end(self, made: Generated) -> None:
        if len(made.tokens) == 1:
            console.write_part(self._text(made.tokens[0])[len(self._written) :] + "\n")
        else:
            for number, row in enumerate(made.tokens, 1):
                console.write(f"{number}: {self._text(row)}")
        facts = [("prompt", f"{made.prompt_seconds * 1e3:.1f} ms")]
        if made.step_seconds:
            facts.append(("step", f"{statistics.median(made.step_seconds) * 1e3:.2f} ms, {_speed(made):.1f} tokens/s"))
        console.show_facts(f"{sum(map(len, made.tokens))} tokens", facts)


def _speed(made: Generated) -> float:
    """Tokens per second of a row."""
    return len(made.step_seconds) / sum(made.step_seconds)


def _as_json(
    file: str, runtime: str, prompts: list[list[int]], made: Generated, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    read: list[list[int] | None] = [*prompts] if prompts else [None] * len(made.tokens)
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "tokens": [*tokens]} for prompt, tokens in zip(read, made.tokens, strict=True)
    ]
    if tokenizer is not None:
        for row, text in zip(rows, tokenizer.decode(made.tokens), strict=True):
            row["text"] = text
    return {
        "kind": "generate",
        "file": file,
        "runtime": runtime,
        "cache": made.cache,
        "rows": rows,
        "prompt_seconds": made.prompt_seconds,
        "step_seconds": [*made.step_seconds],
        "tokens_per_second": _speed(made) if made.step_seconds else None,
    }
