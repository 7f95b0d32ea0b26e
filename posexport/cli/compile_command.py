"""`posexport compile`: turns an ONNX file into a TensorRT plan with its manifest, and shows what the builder chose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from posexport.artifact.manifest import PlanKernels, PlanManifest
from posexport.artifact.paths import check_artifact
from posexport.artifact.profiles import default_requests, describe
from posexport.cli import console
from posexport.cli.options import input_roles, roles_option, sign_option, signing_key, trust_option, trusted_keys
from posexport.errors import Reason, RequestError
from posexport.files import check_output
from posexport.jsondata import unstructure
from posexport.machine import size_text
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.options import BuildOptions

_NODES, _ROWS = 4, 40  # the most nodes of a kernel, and kernels, in the table; the manifest has all

_PROFILE_HELP = (
    "shapes to build for, repeatable: seq=1:1024:4096, or position_ids=1x1,1x1024,8x4096 (min, opt, max)  "
    f"[default: {default_requests(['batch', 'seq'])}; with a cache "
    f"{default_requests(['batch', 'seq', 'past_seq'])}, with a shared one "
    f"{default_requests(['batch', 'seq', 'max_seq'])}]"
)


@click.command()
@click.argument("file")
@click.option(
    "--output", "-o", metavar="FILE", help="the plan to write  [default: FILE.plan in the folder of FILE.onnx]"
)
@click.option("--runtime", metavar="NAME", help="tensorrt or tensorrt-rtx  [default: the one that can build here]")
@click.option("--profile", metavar="NAME=SIZES", multiple=True, help=_PROFILE_HELP)
@click.option(
    "--compute-capability",
    metavar="X.Y",
    multiple=True,
    help="build only for these GPUs; repeatable, or a list such as 8.9,12.0  [default: all that the runtime supports]",
)
@click.option(
    "--memory-limit", "--workspace", metavar="SIZE", help="scratch memory allowed for a kernel, such as 512M or 2G"
)
@click.option("--timing-cache", metavar="FILE", help="read and extend the builder's timings (tensorrt only)")
@click.option("--runtime-cache", metavar="FILE", help="write the kernels for this machine's GPU (tensorrt-rtx only)")
@click.option("--tf32", is_flag=True, help="round inputs of fp32 products to 11 bits: faster, but not at parity")
@click.option("--require-fused-attention", is_flag=True, help="exit with 1 unless each attention is one kernel")
@roles_option
@sign_option
@trust_option
@click.option("--json", "as_json", is_flag=True, help="print the manifest, the build time and warnings as JSON")
def compile(
    file: str,
    output: str | None,
    runtime: str | None,
    require_fused_attention: bool,
    roles: tuple[str, ...],
    sign: str | None,
    trust: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> int:
    """Build any ONNX file into a TensorRT plan, with its manifest <plan>.json."""
    path = Path(file)
    if path.suffix != ".onnx":
        raise RequestError(f"{file!r} does not end in .onnx: give an ONNX file.")
    check_artifact(path)
    target = Path(output) if output is not None else path.with_suffix(".plan")
    check_output(target, ".plan")
    key, trusted, given_roles = signing_key(sign), trusted_keys(trust), input_roles(roles)
    options = attrs.evolve(BuildOptions(**given), runtime=api.choose(runtime))
    warnings: list[Reason] = []
    with console.steps(f"loading {options.runtime}") as progress:
        from posexport.export.compile import compile_plan

        manifest, seconds = compile_plan(
            path, target, options, progress, warnings.append, key=key, trusted=trusted, roles=given_roles
        )
    if as_json:
        build = {"build_seconds": round(seconds, 3), "warnings": unstructure(warnings)}
        console.show_json({**unstructure(manifest), **build})
    else:
        _show_summary(target, manifest, seconds, {warning.code for warning in warnings}, not options.profile)
        attentions = [
            (str(one.layer), one.name, _FUSED[one.fused], "" if one.reason is None else one.reason.text)
            for one in manifest.kernels.attentions
        ]
        _show_rows(target, "attention", "attentions", ("", "attention", "one kernel", "reason"), attentions)
        kernels = [
            (str(number), kernel.name, kernel.type, _nodes(kernel.nodes))
            for number, kernel in enumerate(manifest.kernels.rows, 1)
        ]
        _show_rows(target, "kernels", "kernels", ("", "kernel", "type", "ONNX nodes"), kernels)
    for warning in warnings:
        console.warn(f"{file}: {warning}.")
    if require_fused_attention and manifest.kernels.fused_attention is not True:
        console.say(f"attention is not fused as required ({_fusion(manifest.kernels)}); {target} is written.")
        for one in manifest.kernels.attentions:
            if one.fused is not True:
                console.say(f"  {one.name}: {one.reason or 'not known'}")
        return 1
    return 0


def _fusion(kernels: PlanKernels) -> str:
    """Whether attention is fused; if not, why not and what to change."""
    if kernels.fused_attention is None:
        return f"not known: {kernels.unknown}"
    if kernels.attentions:
        fused = sum(one.fused is True for one in kernels.attentions)
        return f"{'yes' if kernels.fused_attention else 'no'}, {fused} of {len(kernels.attentions)} attentions"
    layers = "1 layer" if kernels.attention_layers == 1 else f"{kernels.attention_layers} layers"
    if kernels.fused_attention:
        return f"yes, one kernel in {layers}" if layers == "1 layer" else f"yes, one kernel in each of {layers}"
    return f"no, {kernels.attention_kernels} fused kernels in {layers}; {kernels.unfused}"


def _show_summary(
    target: Path, manifest: PlanManifest, seconds: float, warned: Collection[str], is_default: bool
) -> None:
    """Show what was built. `warned` are the codes of warnings; `is_default` is true if no profile was given."""
    from posexport.export.compile import SCRATCH_MEMORY

    much = {"scratch": ", see the warning: lower largest sizes of --profile"} if SCRATCH_MEMORY in warned else {}
    kernels, sizes, runtime = manifest.kernels, manifest.sizes, manifest.runtime
    steps = f" and {kernels.host_steps} host steps" if kernels.host_steps else ""
    console.show_facts(
        f"wrote {target}",
        [
            ("kernels", f"not known: {kernels.unknown}" if kernels.count is None else f"{kernels.count}{steps}"),
            ("fused attention", _fusion(kernels)),
            ("built by", f"{runtime.name} {runtime.version}"),
            ("for GPUs", ", ".join(manifest.target_gpus)),
            *((f"profile {name}", text) for name, text in describe(manifest.profiles)),
            *([("profile", "the default, give --profile NAME=MIN:OPT:MAX for another")] if is_default else []),
            *((key, _size(sizes[key]) + much.get(key, "")) for key in ("plan", "weights", "activation", "scratch")),
            ("tf32", "on" if manifest.tf32 else "off"),
            ("build time", f"{seconds:.2f} s"),
            *console.manifest_facts(target, manifest.signer),
        ],
    )


_FUSED = {True: "yes", False: "no", None: "not known"}


def _show_rows(target: Path, what: str, several: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Show a table of the first rows of a plan, if it has any."""
    if not rows:
        return
    console.write()
    console.show_table(f"{what.capitalize()} of {target}", columns, rows[:_ROWS], right=("",))
    if len(rows) > _ROWS:
        console.write(f"and {len(rows) - _ROWS} more {several}, which {target}.json lists")


def _nodes(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NODES} more" if len(names) > _NODES else ""
    return (", ".join(names[:_NODES]) or "-") + more


def _size(size: int | None) -> str:
    return "not known" if size is None else size_text(size)
