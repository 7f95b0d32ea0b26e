"""Options that several commands have, and checks of the files that they name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.spec.input_roles import ROLES, WHERE, check_role
from posexport.spec.spec import CACHES, Spec

if TYPE_CHECKING:
    from posexport.artifact.signing import SigningKey, TrustedKey

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_FLAGS = ("causal", "padding_mask", "cross", "qk_norm", "sinks", "bias", "scale_embedding")


def _options(*options: Decorator) -> Decorator:
    """Add options to a command, which shows them in this order."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


project_options = _options(
    click.option(
        "--project",
        "project_file",
        metavar="FILE",
        help="project file  [default: the nearest one, in this folder or above]",
    ),
    click.option("--allow-outside", is_flag=True, help="allow the project's folder to be outside the project"),
)

sign_option = click.option(
    "--sign", "sign", metavar="KEY", help="sign the manifest with this private key (Ed25519, PEM, without a passphrase)"
)

trust_option = click.option(
    "--trust",
    "trust",
    metavar="KEY",
    multiple=True,
    help="refuse files that this public key (PEM) did not sign; repeatable",
)


roles_option = click.option(
    "--input",
    "roles",
    metavar="NAME=ROLE",
    multiple=True,
    help="the role of an input of the file; repeatable; 'posexport list --roles' shows the roles",
)


def input_roles(pairs: Sequence[str]) -> dict[str, str]:
    """The roles of inputs by name, from `--input NAME=ROLE`; RequestError for other text and unknown roles."""
    roles: dict[str, str] = {}
    for pair in pairs:
        name, equals, role = pair.rpartition("=")  # a name may contain the sign, a role doesn't
        if not equals or not name or not role:
            raise RequestError(f"--input {pair!r} is not NAME=ROLE, such as --input tokens=token_ids: {WHERE}.")
        if roles.setdefault(name, role) != role:
            raise RequestError(f"--input gives {name!r} two roles, {roles[name]!r} and {role!r}: keep one of them.")
    for name, role in roles.items():
        if name not in ROLES:  # else the two may be swapped; the inputs of the file show that later
            check_role(name, role)
    return roles


def signing_key(path: str | None) -> SigningKey | None:
    """The key that `--sign` names; RequestError if the file has no key."""
    if path is None:
        return None
    from posexport.artifact.signing import read_signing_key

    return read_signing_key(Path(path))


def trusted_keys(paths: Sequence[str]) -> tuple[TrustedKey, ...]:
    """The keys that `--trust` names; RequestError if a file has no key."""
    if not paths:
        return ()
    from posexport.artifact.signing import read_trusted_keys

    return read_trusted_keys([Path(path) for path in paths])


module_option = click.option(
    "--module",
    metavar="FILE.py:NAME",
    help="a torch module, its class, or a function that returns one; the file is executed",
)

encoding_option = click.option("--encoding", metavar="NAME", help="one of: " + ", ".join(ENCODINGS))

source_options = _options(
    click.option(
        "--config", metavar="FILE", help="read options from a TOML file; options on the command line override it"
    ),
    click.option(
        "--preset",
        metavar="NAME",
        help="a layer of a public model; options override it; 'posexport list --presets' shows all",
    ),
    click.option(
        "--from",
        metavar="PATH",
        help="a layer of a Hugging Face checkpoint: its folder, or its config.json (then without its weights)",
    ),
    click.option("--layer", metavar="N", help="with --from FOLDER, the number of the layer  [default: 0]"),
)
"""The source of a block; other options override what it says."""

block_options = _options(
    click.option("--batch", metavar="N", help="fix the batch size  [default: dynamic]"),
    click.option("--seq", metavar="N", help="fix the sequence length  [default: dynamic]"),
    click.option("--max-seq", metavar="N", help="fix the length of shared caches  [default: dynamic]"),
    click.option("--weights", metavar="FILE", help="take weights from a .safetensors file  [default: random]"),
    click.option("--seed", metavar="N", help="make random weights from this seed  [default: 0]"),
)
"""An option for each field of BlockOptions except the output; options that are not given are None."""


def field_options(names: Collection[str]) -> Decorator:
    """`--set`, and an option for each of the named fields of a spec except its encoding, made from the field itself."""
    options: list[Decorator] = [
        click.option(
            "--set",
            "parameters",
            metavar="KEY=VALUE",
            multiple=True,
            help="a parameter of the encoding; repeatable; 'posexport list' shows the parameters",
        )
    ]
    for field in attrs.fields(Spec):
        if field.name == "encoding" or field.name not in names:
            continue
        name, help = field.name.replace("_", "-"), field.metadata["help"]
        if field.name in _FLAGS:
            options.append(click.option(f"--{name}/--no-{name}", default=None, help=f"{help}  [default: no]"))
            continue
        shown = "" if field.default in (None, ()) else f"  [default: {field.default}]"
        kinds = field.metadata["allowed"].split(" or ")
        metavar = "PATTERN" if field.name == "layer_pattern" else "|".join(kinds) if len(kinds) > 1 else "N"
        # `--kv-cache` without a value is the first kind
        bare: dict[str, Any] = {"is_flag": False, "flag_value": CACHES[0]} if field.name == "kv_cache" else {}
        options.append(click.option(f"--{name}", metavar=metavar, help=help + shown, **bare))
    return _options(*options)


def check_no_project(what: str, project_file: str | None, allow_outside: bool) -> None:
    """RequestError for an option of a project together with `what`, such as "files"."""
    name = "--project" if project_file is not None else "--allow-outside" if allow_outside else None
    if name is not None:
        raise RequestError(f"both {what} and {name} were given: without {what} the project's are meant; drop one.")


def report_file(option: str, text: str, taken: Collection[str], endings: Collection[str] = ()) -> Path:
    """The path of a report to write.

    RequestError unless it has one of the `endings` (none: any), and none of those that are `taken`.
    """
    path = Path(text)
    if endings and path.suffix not in endings:
        raise RequestError(f"{option} is {text!r}: give a name that ends in {' or '.join(endings)}.")
    if path.suffix in taken:
        raise RequestError(
            f"{option} {text!r} has the name of an artifact, of inputs or of results: give another, not {path.suffix}."
        )
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"{option} {text!r} can't be written: give the name of a file in a folder that is there.")
    return path
