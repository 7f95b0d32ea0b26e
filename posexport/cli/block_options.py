"""What `export` and `tune` share: what a block has beside its spec, and all that was said of it, put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.cli.spec_options import check_layers_follow, preset_options, read_config
from posexport.errors import RequestError
from posexport.fields import integer, text

if TYPE_CHECKING:
    from torch import Tensor

    from posexport.spec import Spec

HERE = Path()


@attrs.frozen(kw_only=True)
class BlockOptions:
    """Options that are no part of the spec; validated wherever they come from."""

    batch: int | None = integer(None, "fixed batch size", optional=True)
    seq: int | None = integer(None, "fixed sequence length", optional=True)
    max_seq: int | None = integer(None, "fixed length of shared caches", optional=True)
    seed: int | None = integer(None, "seed of the weights", at_least=0, optional=True)
    weights: str | None = text(None, "a .safetensors file")
    output: str | None = text(None, "the file to write")

    def __attrs_post_init__(self) -> None:
        if self.weights is not None and self.seed is not None:
            raise RequestError(
                "both weights and seed were given: weights come from a file or from a seed, so drop one."
            )
        if self.weights is not None and not Path(self.weights).is_file():
            wrong = "no file" if Path(self.weights).exists() else "not there"
            raise RequestError(f"weights {self.weights!r} can't be read, they are {wrong}: give a .safetensors file.")


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


def gather(
    config: str | None,
    preset: str | None,
    given_set: Mapping[str, Any],
    given: Mapping[str, Any],
    known: Collection[str],
    folder: Path = HERE,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(all options, parameters of the encoding): those of a preset, or of a config, which may hold the `known`, and
    those that are `given` beside it, which win; None and () mean "not given"."""
    options: dict[str, Any] = {}
    if preset is not None:
        for name, value in (("config", config), ("encoding", given.get("encoding")), ("from", given.get("from"))):
            if value is not None:
                raise RequestError(
                    f"both preset and {name} were given: a preset is a whole block, so drop one of them."
                )
        options = preset_options(preset)
    elif config is not None:
        options = read_config(folder / config, known)
    said = {name: value for name, value in given.items() if value is not None and value != ()}
    check_layers_follow(options, {**said, **given_set})
    encoding_set = {**options.pop("set", {}), **given_set}
    return {**options, **said}, encoding_set


def weights_of(path: str, spec: Spec, bias_given: bool) -> tuple[Spec, Mapping[str, Tensor]]:
    """The weights in a file, and the spec with the biases that it has; RequestError where others were asked for."""
    from posexport.models.weights import read_weights

    found, weights = read_weights(Path(path), spec)
    if bias_given and found.bias != spec.bias:
        raise RequestError(
            f"bias was given but {path!r} has biases for {', '.join(found.bias) or 'no projection'}: with weights the "
            "file decides, so drop bias."
        )
    return found, weights
