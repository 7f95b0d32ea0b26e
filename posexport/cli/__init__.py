"""The command line: one command per stage, each in its own file, which is loaded when the command is called.

`main` turns posexport's and click's errors into one sentence on stderr and an exit code: 0 fine, 1 checked and not
equal, 2 the request or the input is wrong, 3 a required runtime is not installed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from posexport import __version__
from posexport.cli.console import fail, say
from posexport.cli.surroundings import Interrupts, drop_output, open_streams
from posexport.errors import FieldError, PosexportError, RequestError, advice_for, check_known
from posexport.temporary import registered, remove_since

COMMANDS = {
    "list": "show encodings with their parameters, forms, and runtimes",
    "export": "write a block, a torch module or a whole model as an ONNX file",
    "rewrite": "rewrite the attention of any ONNX file in a form",
    "build": "make the artifacts of a project that are out of date",
    "compile": "build a TensorRT plan from an ONNX file",
    "verify": "compare files with a float64 reference on each runtime",
    "matrix": "measure what works where: every encoding, form, dtype and runtime",
    "positions": "write the positions of a grid of patches",
    "generate": "generate tokens with an exported decoder",
    "bench": "time an artifact and compare it with torch",
    "tune": "find the fastest form of a block, verify it and write it",
    "plot": "draw encodings, and the errors of their angles",
    "package": "write a model for Triton or onnxruntime-genai",
    "sweep": "run many jobs, on this machine or on a Ray cluster",
    "report": "write a page of results: what is fastest, wrong or not run",
    "inspect": "show the inputs, operators and attention of a file",
}
"""Every command, in the order in which an artifact passes through them; the code is in
`posexport.cli.<name>_command`."""

_OTHER_NAMES = {"--runtime": "--for", "--for": "--runtime", "--jobs": "--workers", "--workers": "--jobs"}
"""Options with another name in other commands; they are spelled too differently for click to suggest them."""


_OUTPUTS = {"output", "junit", "markdown", "save", "cache", "timing_cache", "runtime_cache"}
"""Parameters that name what a command writes. All other files that a parameter names are inputs."""

INTERRUPTED = 130
"""The code that a command returns if it itself reports how far it came before a signal.

`main` then exits with the code of the signal: 128 + its number.
"""

_EXIT_CODE_OF_SIGPIPE = 141
"""The shell's code for a command whose reader closed the pipe: 128 + SIGPIPE."""


def typed_options(command: click.Command, ctx: click.Context, arguments: list[str]) -> dict[str, str]:
    """The options among the arguments of a command as they were typed, by the names of their parameters.

    RequestError for an option with a single value that is given twice, since the first value would be lost; for an
    empty text, such as an unset variable; for an option name of another command; for more arguments than the command
    takes; and for a character that neither a file name nor a text of the system can contain.
    """
    for argument in arguments:
        try:
            possible = b"\0" not in os.fsencode(argument)
        except UnicodeEncodeError:
            possible = False
        if not possible:
            raise RequestError(f"{argument!r} holds a character that no name of a file can have: leave it out.")
    try:
        values, extra, order = command.make_parser(ctx).parse_args(list(arguments))
    except click.NoSuchOption as error:
        name = _OTHER_NAMES.get(error.option_name)
        if not any(name in parameter.opts for parameter in command.params):
            raise
        raise RequestError(
            f"posexport {ctx.info_name} has no option {error.option_name}: use {name} instead."
        ) from None
    options = {}
    for option, times in Counter(parameter for parameter in order if isinstance(parameter, click.Option)).items():
        switch = option.is_flag and not option.secondary_opts
        if times > 1 and not (option.multiple or switch):
            names = "/".join(names[0] for names in (option.opts, option.secondary_opts) if names)
            raise RequestError(f"{names} was given {times} times: give it once.")
        value = values.get(option.name)
        if "" in (value if isinstance(value, list | tuple) else (value,)):
            raise RequestError(f"{option.opts[0]} was given an empty text: give it a value, or leave it out.")
        options[str(option.name)] = option.opts[0]
    given = (values[name] for name in values.keys() - _OUTPUTS)
    for value in (item for one in given for item in (one if isinstance(one, list | tuple) else (one,))):
        if isinstance(value, str):
            from posexport.files import protect

            protect(Path(value))
    if extra and not set(options.values()) & set(ctx.help_option_names):
        raise RequestError(_too_many(command, ctx, extra))
    return options


def _too_many(command: click.Command, ctx: click.Context, extra: list[str]) -> str:
    """The sentence about arguments beyond those that a command takes: one, or none."""
    name, values = ctx.info_name, ", ".join(map(repr, extra))
    arguments = [str(parameter.name).upper() for parameter in command.params if isinstance(parameter, click.Argument)]
    if arguments:
        return f"posexport {name} takes one {arguments[0]}, and {values} was given beside it: run it once for each."
    return f"posexport {name} takes options only, but {values} was given: write it after the option that it belongs to."


_UNLIMITED = ("list", "sweep")
"""Commands that read no artifact themselves. `list` is fast; with `sweep`, Ray's child processes would keep a limit."""


def _limited(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """The limit on the memory of this process, which reads files from others."""
    if not arguments or arguments[0] in _UNLIMITED or {"-h", "--help"} & set(arguments):
        return nullcontext()
    from posexport.cli.memory_limit import check_limit
    from posexport.machine import limited_to_what_is_free

    if arguments[0] in COMMANDS:
        check_limit(arguments[0])
    return limited_to_what_is_free()


def _protected(arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Ensure that no file that the command reads is overwritten."""
    if not arguments or arguments[0] not in COMMANDS or arguments[0] == "list":  # list imports very little
        return nullcontext()
    from posexport.files import protected_inputs

    return protected_inputs()


def _is_short(error: BaseException) -> bool:
    from posexport.machine import is_short

    return is_short(error)


class Commands(click.Group):
    """Commands whose file is imported when they are called, so that `--help` and `list` load no engine."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        check_known("command", name, COMMANDS)
        command: click.Command = getattr(import_module(f"posexport.cli.{name}_command"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, arguments = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:  # shell completion parses like this
            ctx.meta[__name__] = typed_options(command, click.Context(command, info_name=name, parent=ctx), arguments)
        return name, command, arguments

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _writing():  # --help and --version print here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _writing():
                _check_working_folder()
                code = super().invoke(ctx)
                sys.stdout.flush()
        except FieldError as error:
            raise error.named(ctx.meta[__name__].get(error.field, error.field)) from None
        return code

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
            kwargs.setdefault("color", False)
        open_streams()
        interrupts, made_before = Interrupts(), registered()
        signals = interrupts.received
        in_process = bool(args) or kwargs.get("args") is not None  # called by a program, not by the shell
        try:
            given = (args[0] if args else kwargs.get("args")) or sys.argv[1:]
            try:
                interrupts.begin()
                with _limited(given), _protected(given):
                    code = super().main(*args, **kwargs)
            except Exception:
                if signals:  # another package turned the signal into its own error
                    raise KeyboardInterrupt from None
                raise
            finally:
                interrupts.held = True
                remove_since(made_before)
                if in_process:  # else signals are caught to the very end of the process
                    interrupts.end()
            if signals and code != INTERRUPTED:  # another package swallowed it, so later results may be wrong
                raise KeyboardInterrupt
            code = 128 + signals[0] if signals else code
        except PosexportError as error:
            code = fail(str(error), error.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            say(error.ctx.get_help() if error.ctx else "")
            code = 2
        except click.MissingParameter as error:
            what = error.param.make_metavar(error.ctx) if error.param and error.ctx else "an argument"
            command = error.ctx.command_path.replace("main", "posexport", 1) if error.ctx else "posexport"
            code = fail(f"{what} is missing: give it, as '{command} --help' shows.", 2)
        except click.ClickException as error:
            text = error.format_message()
            code = fail(f"{text}." if text.endswith(")") else text, 2)
        except (click.Abort, KeyboardInterrupt):
            number = signals[0] if signals else signal.SIGINT
            how = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
            code = fail(f"{how}: no file is half-written; files written before are kept.", 128 + number)
        except SystemExit:
            raise
        except BaseException as error:  # a panic in Rust code is not an Exception
            if not _is_short(error):
                raise
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
            code = fail(f"there is not enough memory ({problem}): free some, or ask for less.", 2)
        drop_output()
        if not in_process:
            interrupts.ignore()
            interrupts.leave(code if isinstance(code, int) else 0)
        sys.exit(code if isinstance(code, int) else 0)


def _check_working_folder() -> None:
    """RequestError if the working folder was removed: then no name refers to a file there, and libraries end the
    process."""
    try:
        os.getcwd()  # noqa: PTH109 (no path is wanted)
    except FileNotFoundError:
        raise RequestError("the working folder no longer exists: change to another folder.") from None


@contextmanager
def _writing() -> Iterator[None]:
    """Turn errors of the system into a sentence, including those of stdout, and a closed pipe into its exit code."""
    try:
        yield
    except BrokenPipeError:
        raise click.exceptions.Exit(_EXIT_CODE_OF_SIGPIPE) from None
    except OSError as error:
        what = "a file, or stdout, can't be read or written"
        if error.filename is not None:
            what = f"{os.fsdecode(error.filename)!r} can't be read or written"
        raise RequestError(f"{what} ({error.strerror or error}): {advice_for(error, 'give another')}.") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="posexport")
def main() -> None:
    """Export attention with any positional encoding to ONNX and TensorRT, and prove that it is the same function."""
