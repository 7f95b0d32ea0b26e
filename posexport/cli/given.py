"""A command's arguments as they are written, and what is wrong with them at a glance."""

from __future__ import annotations

from collections import Counter

import click

from posexport.errors import RequestError

_CALLED = {"--runtime": "--for", "--for": "--runtime", "--jobs": "--workers", "--workers": "--jobs"}
"""What one command calls otherwise than another does: no spelling is near enough to be found by it."""


def given(command: click.Command, ctx: click.Context, args: list[str]) -> dict[str, str]:
    """The options among the arguments of a command, as they are written, by their parameter's name.

    RequestError for one of a single value that is given again, since the first would be dropped; for one that is given
    an empty text, as an unset variable gives; for one that the command calls otherwise; and for more arguments than it
    takes.
    """
    try:
        values, extra, order = command.make_parser(ctx).parse_args(list(args))
    except click.NoSuchOption as error:
        meant = _CALLED.get(error.option_name)
        if not any(meant in each.opts for each in command.params):
            raise
        raise RequestError(
            f"posexport {ctx.info_name} has no option {error.option_name}: it is {meant} here."
        ) from None
    options = {}
    for option, times in Counter(each for each in order if isinstance(each, click.Option)).items():
        switch = option.is_flag and not option.secondary_opts
        if times > 1 and not (option.multiple or switch):
            said = "/".join(names[0] for names in (option.opts, option.secondary_opts) if names)
            raise RequestError(f"{said} was given {times} times: give it once.")
        value = values.get(option.name)
        if "" in (value if isinstance(value, list | tuple) else (value,)):
            raise RequestError(f"{option.opts[0]} was given an empty text: give it a value, or leave it out.")
        options[str(option.name)] = option.opts[0]
    if extra and not set(options.values()) & set(ctx.help_option_names):
        raise RequestError(_too_many(command, ctx, extra))
    return options


def _too_many(command: click.Command, ctx: click.Context, extra: list[str]) -> str:
    """The sentence for arguments beyond those that a command takes: one, or none."""
    name, said = ctx.info_name, ", ".join(map(repr, extra))
    taken = [str(each.name).upper() for each in command.params if isinstance(each, click.Argument)]
    if taken:
        return f"posexport {name} takes one {taken[0]}, and {said} was given beside it: run it once for each."
    return f"posexport {name} takes options only, and {said} is none: write it behind the option that it is for."
