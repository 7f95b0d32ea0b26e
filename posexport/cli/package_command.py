"""`posexport package`: an artifact as what a server loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from posexport.cli import console
from posexport.errors import RequestError


@click.command()
@click.argument("file")
@click.option("--triton", is_flag=True, help="a model repository of Triton Inference Server (the only kind so far)")
@click.option("--output", "-o", metavar="FOLDER", help="the repository, made if need be  [default: model_repository]")
@click.option("--name", metavar="NAME", help="the model's name  [default: the file's]")
@click.option("--version", metavar="N", help="the model's version  [default: 1]")
@click.option("--instances", metavar="N", help="copies of the model for each device  [default: 1]")
@click.option(
    "--max-batch-size",
    metavar="N",
    help="the most rows that Triton joins; 0: none  [default: the plan's largest batch or 8, where joining is right]",
)
@click.option("--gpu/--cpu", default=None, help="where it runs  [default: a plan on GPUs, ONNX where Triton chooses]")
@click.option("--force", is_flag=True, help="replace this version, and the configuration where no other version has it")
@click.option("--json", "as_json", is_flag=True, help="print what was written as JSON")
def package(
    file: str, triton: bool, output: str | None, gpu: bool | None, force: bool, as_json: bool, **given: Any
) -> None:
    """Write an artifact (.onnx or .plan) into a model repository of Triton Inference Server."""
    path, repository = Path(file), Path("model_repository" if output is None else output)
    if not triton:
        raise RequestError("what to package for was not given: give --triton, the only server so far.")
    with console.steps("loading") as progress:
        from posexport.export.triton.package import PackageOptions, package_triton

        numbers = {name: value for name, value in given.items() if value is not None}
        options = PackageOptions(gpu=gpu, force=force, **numbers)
        done = package_triton(path, repository, options, progress)
    if as_json:
        console.show_json(done)
    else:
        _show(done)


def _show(done: dict[str, Any]) -> None:
    home = Path(done["repository"]) / done["name"]
    rows = [
        (kind[:-1], tensor["name"], tensor["data_type"], str(tensor["dims"]))
        for kind in ("inputs", "outputs")
        for tensor in done[kind]
    ]
    dims = "dims of one row" if done["max_batch_size"] else "dims"
    console.show_table(f"{home}, version {done['model_version']}", ("", "tensor", "type", dims), rows)
    batching = done["batching"]
    joined = f"up to {done['max_batch_size']} rows" if batching["joined"] else "not joined"
    warmup = ", ".join(f"{name} {dims}" for name, dims in done["warmup"].items())
    console.show_facts(
        f"wrote {home}",
        [
            ("backend", f"{done['backend']}: {done['about']}"),
            ("batches", f"{joined}: {batching['reason']}"),
            ("instances", f"{done['instances']['count']} of {done['instances']['kind']}"),
            ("warm-up", warmup or "none: a request of the usual shape has nothing in it"),
            ("files", ", ".join(done["files"])),
            ("serve", f"tritonserver --model-repository {done['repository']}"),
        ],
    )
