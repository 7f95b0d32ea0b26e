"""`posexport list`: shows encodings with their parameters, forms with their limits, runtimes, and presets."""

from __future__ import annotations

from typing import Any

import attrs
import click

from posexport.cli import console
from posexport.custom_ops.unsupported import REFUSALS
from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.models.scaling import NEEDED, SCALINGS
from posexport.models.scaling import parameters as scaling_parameters
from posexport.runtimes import RUNTIMES
from posexport.runtimes.tensorrt.api import BUILDERS, can_build
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.input_roles import ROLES


@click.command("list")
@click.option("--presets", is_flag=True, help="show only the presets, which are layers of public models")
@click.option("--roles", is_flag=True, help="show only the roles of inputs of ONNX files (--input NAME=ROLE)")
@click.option("--json", "as_json", is_flag=True, help="print everything as JSON")
def list(presets: bool, roles: bool, as_json: bool) -> None:
    """Show encodings with their parameters, forms, and runtimes."""
    if presets and roles:
        raise RequestError("both --presets and --roles were given: each shows one table alone, so drop one.")
    if roles:
        if as_json:
            console.show_json({"roles": ROLES})
        else:
            console.show_table("Roles of inputs (--input NAME=ROLE)", ("role", "what the input holds"), ROLES.items())
        return
    if presets:
        _show_presets(as_json)
        return
    tables = _everything()
    if as_json:
        console.show_json(tables)
        return
    console.show_table(
        "Encodings (posexport export --encoding NAME --set KEY=VALUE)",
        ("name", "acts by", "parameters", "summary"),
        [
            (name, row["touches"] or "-", _parameters(row), f"{row['summary']}\n{row['source']}")
            for name, row in tables["encodings"].items()
        ],
    )
    console.show_table(
        "Scalings of rope and mrope (--set scaling=NAME)",
        ("name", "parameters", "summary"),
        [(name, _scaling_parameters(row), row["summary"]) for name, row in tables["scalings"].items()],
    )
    console.show_table("Forms (--form NAME)", ("name", "summary"), tables["forms"].items())
    console.show_table("Targets (--target NAME)", ("name", "summary"), tables["targets"].items())
    console.show_table(
        "Limits of forms",
        ("form", "target", "what", "why, and what to do"),
        [(row["form"], ", ".join(row["targets"]), row["what"], row["why"]) for row in tables["refusals"]],
    )
    console.show_table(
        "Runtimes",
        ("name", "summary", "here"),
        [(name, row["summary"], _here(name, row["missing"])) for name, row in tables["runtimes"].items()],
    )


def _here(name: str, missing: str | None) -> str:
    """Whether a runtime is installed, why it isn't, and whether it can build plans all the same."""
    if missing is None:
        return "there"
    return f"builds plans, runs none: {missing}" if name in BUILDERS and can_build(name) is None else missing


def _show_presets(as_json: bool) -> None:
    from posexport.export.block_options import preset_options, spec_of
    from posexport.spec.presets import preset_names, read_preset

    presets = {name: attrs.asdict(read_preset(name)) for name in preset_names()}
    if as_json:
        console.show_json({"presets": presets})
        return
    rows = []
    for name, row in presets.items():
        options = preset_options(name)
        spec = spec_of(options, options.pop("set", {}))
        kinds = dict.fromkeys(layer.encoding.name for layer in spec.layer_pattern) or [spec.encoding.name]
        heads = f"{spec.num_heads}" if spec.num_heads == spec.num_kv_heads else f"{spec.num_heads}/{spec.num_kv_heads}"
        sizes = f"{spec.hidden_size}, {heads} x {spec.head_dim}"
        rows.append((name, ", ".join(kinds), sizes, f"{row['summary']}\n{row['source']}"))
    columns = ("name", "encoding", "width, heads x dim", "layer, and where its numbers come from")
    console.show_table("Presets (posexport export --preset NAME)", columns, rows)


def _parameters(row: dict[str, Any]) -> str:
    """The parameters of an encoding without those of its scalings, which have their own table."""
    defaults = {name: entry["default"] for name, entry in row["parameters"].items()}
    excluded = scaling_parameters() if "scaling" in defaults else ()
    return _written({name: value for name, value in defaults.items() if name not in excluded})


def _scaling_parameters(row: dict[str, Any]) -> str:
    return _written({key: "..." if key in row["needed"] else value for key, value in row["parameters"].items()})


def _written(defaults: dict[str, Any]) -> str:
    """A line for each parameter, with its default if it has one."""
    return "\n".join(name if value is None else f"{name}={value}" for name, value in defaults.items()) or "-"


def _parameter(field: attrs.Attribute[Any]) -> dict[str, Any]:
    return {"default": field.default, "allowed": field.metadata["allowed"], "help": field.metadata["help"]}


def _everything() -> dict[str, Any]:
    return {
        "encodings": {
            name: {
                "summary": cls.summary,
                "source": cls.source,
                "touches": cls.hook,
                "axes": cls.axes,
                "parameters": {field.name: _parameter(field) for field in attrs.fields(cls)},
            }
            for name, cls in ENCODINGS.items()
        },
        "scalings": {
            name: {
                "summary": row.summary,
                "parameters": {key: None if value is NEEDED else value for key, value in row.takes.items()},
                "needed": [key for key, value in row.takes.items() if value is NEEDED],
            }
            for name, row in SCALINGS.items()
        },
        "forms": dict(FORMS),
        "targets": dict(TARGETS),
        "refusals": [
            {"form": row.form, "targets": [*row.targets], "what": row.feature, "why": f"{row.reason}."}
            for row in REFUSALS
        ],
        "runtimes": {
            name: {"summary": row.summary, "missing": reason.text if (reason := row.missing()) else None}
            for name, row in RUNTIMES.items()
        },
    }
