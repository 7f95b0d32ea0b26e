"""The options of a command as they were typed, and checks that need nothing else."""

from __future__ import annotations

from collections import Counter

import click

from posexport.errors import RequestError

_OTHER_NAMES = {"--runtime": "--for", "--for": "--runtime", "--jobs": "--workers", "--workers": "--jobs"}
"""Options with another name in other commands; their spellings are too different for click to suggest them."""


def given(command: click.Command, ctx: click.Context, arguments: list[str]) -> dict[str, str]:
    """The options among the arguments of a command as they were typed, by the names of their parameters.

    RequestError for an option of a single value that is given twice, since the first value would be dropped; for an
    empty text, as an unset variable gives; for the name of the option in another command; and for more arguments than
    the command takes.
    """
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
    if extra and not set(options.values()) & set(ctx.help_option_names):
        raise RequestError(_too_many(command, ctx, extra))
    return options


def _too_many(command: click.Command, ctx: click.Context, extra: list[str]) -> str:
    """The sentence about arguments beyond those that a command takes: one, or none."""
    name, values = ctx.info_name, ", ".join(map(repr, extra))
    arguments = [str(parameter.name).upper() for parameter in command.params if isinstance(parameter, click.Argument)]
    if arguments:
        return f"posexport {name} takes one {arguments[0]}, and {values} was given beside it: run it once for each."
    return f"posexport {name} takes options only, and {values} is none: write it after the option that it is for."
