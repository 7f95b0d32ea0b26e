"""Options of a block beside its spec, which `export` and `tune` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def block_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field of BlockOptions except the output; options that are not given are None."""
    for option in (
        click.option("--seed", metavar="N", help="make random weights from this seed  [default: 0]"),
        click.option("--weights", metavar="FILE", help="take weights from a .safetensors file  [default: random]"),
        click.option("--max-seq", metavar="N", help="fix the length of shared caches  [default: dynamic]"),
        click.option("--seq", metavar="N", help="fix the sequence length  [default: dynamic]"),
        click.option("--batch", metavar="N", help="fix the batch size  [default: dynamic]"),
    ):
        command = option(command)
    return command
