"""`posexport package`: an artifact becomes a model of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.cli import console
from posexport.cli.options import sign_option, signing_key, trust_option, trusted_keys
from posexport.errors import RequestError
from posexport.jsondata import unstructure

if TYPE_CHECKING:
    from posexport.export.triton.package import Package


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
@sign_option
@trust_option
@click.option("--json", "as_json", is_flag=True, help="print what was written as JSON")
def package(
    file: str,
    triton: bool,
    output: str | None,
    gpu: bool | None,
    force: bool,
    sign: str | None,
    trust: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Write a file (.onnx or .plan) into a model repository of Triton Inference Server.

    Of an .onnx that posexport didn't write, inputs, outputs and dimensions are the graph's own. Requests are joined
    where each row comes out as it does alone, which is tried.
    """
    path, repository = Path(file), Path("model_repository" if output is None else output)
    if not triton:
        raise RequestError("what to package for was not given: give --triton, the only server so far.")
    key, trusted = signing_key(sign), trusted_keys(trust)
    with console.steps("loading") as progress:
        from posexport.export.triton.package import PackageOptions, package_triton

        numbers = {name: value for name, value in given.items() if value is not None}
        options = PackageOptions(gpu=gpu, force=force, **numbers)
        written = package_triton(path, repository, options, progress, key=key, trusted=trusted)
    if as_json:
        console.show_json(unstructure(written))
    else:
        _show(written)


def _show(written: Package) -> None:
    home, batching = Path(written.repository) / written.name, written.batching
    rows = [
        (kind, tensor.name, tensor.data_type, str(list(tensor.dims)))
        for kind, tensors in (("input", written.inputs), ("output", written.outputs))
        for tensor in tensors
    ]
    dims = "dims of one row" if written.max_batch_size else "dims"
    console.show_table(f"{home}, version {written.model_version}", ("", "tensor", "type", dims), rows)
    joined = f"up to {written.max_batch_size} rows" if batching.joined else "not joined"
    warmup = ", ".join(f"{name} {list(dims)}" for name, dims in written.warmup.items())
    console.show_facts(
        f"wrote {home}",
        [
            ("backend", f"{written.backend}: {written.about}"),
            ("batches", f"{joined}: {batching.reason}"),
            ("instances", f"{written.instances.count} of {written.instances.kind}"),
            ("warm-up", warmup or "none: no usual request is known, or it is empty"),
            ("files", ", ".join(written.files)),
            ("serve", f"tritonserver --model-repository {written.repository}"),
        ],
    )
