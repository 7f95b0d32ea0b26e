"""Options that describe a block: one per field of Spec, made from the field itself, plus `--set`, `--config` and
`--preset`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import attrs
import click

from posexport.models import ENCODINGS
from posexport.spec.spec import CACHES, Spec

_FLAGS = ("causal", "padding_mask", "cross", "qk_norm", "sinks", "bias", "scale_embedding")
_BIAS_HELP = "every projection has a bias (with --weights: as the file has them)"


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for every field of a spec; options that are not given are None."""
    command = field_options(command, [field.name for field in attrs.fields(Spec)])
    return click.option("--encoding", metavar="NAME", help="one of: " + ", ".join(ENCODINGS))(command)


def field_options(command: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Add `--set` and an option for each of the named fields of a spec except its encoding."""
    for field in reversed(attrs.fields(Spec)):
        if field.name == "encoding" or field.name not in names:
            continue
        name = field.name.replace("_", "-")
        if field.name in _FLAGS:
            text = _BIAS_HELP if field.name == "bias" else field.metadata["help"]
            option = click.option(f"--{name}/--no-{name}", field.name, default=None, help=f"{text}  [default: no]")
        else:
            shown = "" if field.default in (None, ()) else f"  [default: {field.default}]"
            kind = field.metadata["allowed"].upper() if " or " in field.metadata["allowed"] else "N"
            kind = "PATTERN" if field.name == "layer_pattern" else kind
            metavar = kind.replace(" OR ", "|").lower() if "|" in kind.replace(" OR ", "|") else kind
            # bare `--kv-cache` is the first kind
            bare: dict[str, Any] = {"is_flag": False, "flag_value": CACHES[0]} if field.name == "kv_cache" else {}
            help = field.metadata["help"] + shown
            option = click.option(f"--{name}", field.name, metavar=metavar, help=help, **bare)
        command = option(command)
    return click.option(
        "--set",
        "parameters",
        metavar="KEY=VALUE",
        multiple=True,
        help="a parameter of the encoding, repeatable; 'posexport list' shows them",
    )(command)
