"""`posexport compile`: an ONNX artifact becomes a TensorRT plan with its manifest, and what the builder chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from posexport.cli import console
from posexport.errors import RequestError
from posexport.files import check_artifact, check_writable
from posexport.runtimes.tensorrt.options import capabilities, memory_size

_NODES, _ROWS = 4, 40  # names of nodes per kernel, and kernels, that people are shown; the manifest has all


@click.command()
@click.argument("file")
@click.option("--output", "-o", metavar="FILE", help="the plan to write  [default: FILE.plan beside FILE.onnx]")
@click.option("--runtime", metavar="NAME", help="tensorrt or tensorrt-rtx  [default: the one that can build here]")
@click.option(
    "--profile",
    metavar="NAME=SIZES",
    multiple=True,
    help="shapes to build for, repeatable: seq=1:1024:4096, or position_ids=1x1,1x1024,8x4096 (min, opt, max)  "
    "[default: batch=1:1:8 and seq=1:1024:4096; posexport shows what it chose]",
)
@click.option(
    "--compute-capability",
    metavar="X.Y",
    multiple=True,
    help="build for these GPUs alone, repeatable or 8.9,12.0  [default: all that the runtime serves]",
)
@click.option("--memory-limit", "--workspace", metavar="SIZE", help="scratch a kernel may take, such as 512M or 2G")
@click.option("--timing-cache", metavar="FILE", help="read and extend the builder's timings (tensorrt only)")
@click.option("--runtime-cache", metavar="FILE", help="write the kernels for this machine's GPU (tensorrt-rtx only)")
@click.option("--tf32", is_flag=True, help="let fp32 products round their inputs to 11 bits: faster, and not at parity")
@click.option("--require-fused-attention", is_flag=True, help="exit 1 unless each layer's attention is one kernel")
@click.option("--json", "as_json", is_flag=True, help="print the manifest and the build time as JSON")
def compile(
    file: str,
    output: str | None,
    runtime: str | None,
    profile: tuple[str, ...],
    compute_capability: tuple[str, ...],
    memory_limit: str | None,
    timing_cache: str | None,
    runtime_cache: str | None,
    tf32: bool,
    require_fused_attention: bool,
    as_json: bool,
) -> int:
    """Build an ONNX artifact into a TensorRT plan, with its manifest <plan>.json."""
    path = Path(file)
    if path.suffix != ".onnx":
        raise RequestError(f"{file!r} does not end in .onnx: give an artifact of 'posexport export'.")
    check_artifact(path)
    target = Path(output) if output is not None else path.with_suffix(".plan")
    if target.suffix != ".plan":
        raise RequestError(f"output {str(target)!r} must end in .plan: name it like {target.stem}.plan.")
    if not target.parent.is_dir():
        raise RequestError(f"output folder {str(target.parent)!r} is not there: make it first, or give another.")
    check_writable(target)
    options = {
        "profile": profile,
        "capabilities": capabilities(compute_capability),
        "memory_limit": None if memory_limit is None else memory_size(memory_limit),
        "timing_cache": None if timing_cache is None else Path(timing_cache),
        "runtime_cache": None if runtime_cache is None else Path(runtime_cache),
        "tf32": tf32,
    }
    manifest_warnings: list[str] = []
    manifest, seconds = _compile(path, target, runtime, options, manifest_warnings)
    kernels = manifest["kernels"]
    if as_json:
        console.show_json({**manifest, "build_seconds": round(seconds, 3)})
    else:
        _show(target, manifest, seconds)
    for doubt in manifest_warnings:
        console.warn(f"{file}: {doubt}.")
    if kernels.get("decomposed_attention"):
        click.echo(
            f"Warning: {manifest['runtime']['name']} has no fused kernel for {kernels['decomposed_attention']} of "
            f"{kernels['attention_layers']} Attention nodes in {manifest['spec']['dtype']}: they are written out, "
            "which is slower and takes more memory.",
            err=True,
        )
    if require_fused_attention and kernels["fused_attention"] is not True:
        click.echo(f"attention is not fused as required ({_fusion(manifest)}); {target} is written.", err=True)
        return 1
    return 0


def _compile(
    path: Path, target: Path, runtime: str | None, options: dict[str, Any], manifest_warnings: list[str]
) -> tuple[dict[str, Any], float]:
    from posexport.runtimes.tensorrt import api

    name = api.choose(runtime)
    with console.steps(f"loading {name}") as progress:
        from posexport.export.compile import BuildOptions, compile_plan

        return compile_plan(
            path,
            target,
            BuildOptions(runtime=name, **options),
            lambda phase: progress.update(f"{path.name}: {phase}"),
            manifest_warnings.append,
        )


def _fusion(manifest: dict[str, Any]) -> str:
    """Whether attention is fused, in words."""
    kernels = manifest["kernels"]
    if kernels["fused_attention"] is None:
        return f"not known: {kernels['unknown']}"
    layers = "1 layer" if kernels["attention_layers"] == 1 else f"{kernels['attention_layers']} layers"
    if kernels["fused_attention"]:
        return f"yes, one kernel in {layers}" if layers == "1 layer" else f"yes, one kernel in each of {layers}"
    why = "; fp32 has none, export with --dtype fp16" if manifest["spec"]["dtype"] == "fp32" else ""
    return f"no, {kernels['attention_kernels']} fused kernels in {layers}{why}"


def _show(target: Path, manifest: dict[str, Any], seconds: float) -> None:
    from posexport.artifact import profiles

    kernels, sizes = manifest["kernels"], manifest["sizes"]
    if kernels["rows"]:
        console.show_table(
            f"Kernels of {target}",
            ("", "kernel", "type", "ONNX nodes"),
            [
                (str(number), row["name"], row["type"], _nodes(row["nodes"]))
                for number, row in enumerate(kernels["rows"][:_ROWS], 1)
            ],
            right=("",),
        )
    if len(kernels["rows"]) > _ROWS:
        click.echo(f"and {len(kernels['rows']) - _ROWS} more kernels, which {target}.json lists\n")
    steps = f" and {kernels['host_steps']} host steps" if kernels["host_steps"] else ""
    count = kernels["count"]
    console.show_facts(
        f"wrote {target}",
        [
            ("kernels", f"not known: {kernels['unknown']}" if count is None else f"{count}{steps}"),
            ("fused attention", _fusion(manifest)),
            ("built by", f"{manifest['runtime']['name']} {manifest['runtime']['version']}"),
            ("for GPUs", ", ".join(manifest["target_gpus"])),
            *((f"profile {name}", text) for name, text in profiles.describe(manifest["profiles"])),
            ("plan", console.megabytes(sizes["plan"])),
            *((key, _size(sizes[key])) for key in ("weights", "activation", "scratch")),
            ("tf32", "on" if manifest["tf32"] else "off"),
            ("build time", f"{seconds:.2f} s"),
            ("manifest", f"{target}.json"),
        ],
    )


def _nodes(names: list[str]) -> str:
    rest = f" and {len(names) - _NODES} more" if len(names) > _NODES else ""
    return (", ".join(names[:_NODES]) or "-") + rest


def _size(size: int | None) -> str:
    return "not known" if size is None else console.megabytes(size)
