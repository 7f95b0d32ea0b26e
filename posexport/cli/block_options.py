"""What `export` and `tune` share: what a block has beside its spec, and all that was said of it, put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def block_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each of BlockOptions but the output; those not given arrive as None."""
    for option in (
        click.option("--seed", metavar="N", help="seed of the random weights  [default: 0]"),
        click.option("--weights", metavar="FILE", help="take weights from a .safetensors file  [default: from --seed]"),
        click.option("--max-seq", metavar="N", help="fix the length of shared caches  [default: dynamic]"),
        click.option("--seq", metavar="N", help="fix the sequence length  [default: dynamic]"),
        click.option("--batch", metavar="N", help="fix the batch size  [default: dynamic]"),
    ):
        command = option(command)
    return command
