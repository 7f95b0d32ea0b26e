"""`posexport package`: turns an artifact into a model for a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from posexport.cli import console
from posexport.cli.options import sign_option, signing_key, trust_option, trusted_keys
from posexport.errors import RequestError
from posexport.jsondata import unstructure
from posexport.spec.fields import stated

if TYPE_CHECKING:
    from posexport.artifact.signing import SigningKey, TrustedKey
    from posexport.export.triton.package import Package


@click.command()
@click.argument("file")
@click.option("--triton", is_flag=True, help="write a model repository of Triton Inference Server")
@click.option("--genai", is_flag=True, help="write a folder for onnxruntime-genai: a decoder with caches")
@click.option(
    "--output",
    "-o",
    metavar="FOLDER",
    help="the repository  [default: model_repository] or the genai folder  [default: <file>_genai]",
)
@click.option("--name", metavar="NAME", help="the model's name  [default: the name of the file]")
@click.option("--version", metavar="N", help="the model's version  [default: 1]")
@click.option("--instances", metavar="N", help="copies of the model for each device  [default: 1]")
@click.option(
    "--max-batch-size",
    metavar="N",
    help="maximum rows that Triton batches; 0 for none  [default: the plan's largest or 8, if results stay the same]",
)
@click.option("--gpu/--cpu", default=None, help="device to run on  [default: GPU for a plan, Triton's choice for ONNX]")
@click.option(
    "--force",
    is_flag=True,
    help="replace this version, or the genai folder; also the configuration, unless another version uses it",
)
@sign_option
@trust_option
@click.option("--json", "as_json", is_flag=True, help="print what was written as JSON")
def package(
    file: str,
    triton: bool,
    genai: bool,
    output: str | None,
    gpu: bool | None,
    force: bool,
    sign: str | None,
    trust: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Write a model repository of Triton Inference Server (.onnx or .plan), or a folder for onnxruntime-genai.

    An .onnx file that posexport did not write keeps the inputs, outputs and dimensions of its graph. Triton batches
    requests only if a row gives the same outputs in a batch as alone; this is tested.
    """
    path = Path(file)
    if triton == genai:
        raise RequestError(f"give --triton or --genai, {'one of them' if genai else 'what to package for'}.")
    key, trusted = signing_key(sign), trusted_keys(trust)
    if genai:
        folder = path.with_name(f"{path.stem}_genai") if output is None else Path(output)
        _package_genai(path, folder, gpu, force, given, key, trusted, as_json)
        return
    repository = Path("model_repository" if output is None else output)
    with console.steps("loading") as progress:
        from posexport.export.triton.package import PackageOptions, package_triton

        options = PackageOptions(gpu=gpu, force=force, **stated(given))
        written = package_triton(path, repository, options, progress, key=key, trusted=trusted)
    if as_json:
        console.show_json(unstructure(written))
    else:
        _show(written)


def _package_genai(
    path: Path,
    folder: Path,
    gpu: bool | None,
    force: bool,
    given: Mapping[str, Any],
    key: SigningKey | None,
    trusted: tuple[TrustedKey, ...],
    as_json: bool,
) -> None:
    other = next(iter(stated(given)), None)
    if other is not None:
        raise RequestError(f"--{other.replace('_', '-')} belongs to --triton: drop it.")
    with console.steps("loading") as progress:
        from posexport.export.genai_folder import package_genai

        written = package_genai(path, folder, gpu=bool(gpu), force=force, progress=progress, key=key, trusted=trusted)
    if as_json:
        console.show_json(unstructure(written))
        return
    facts = [
        ("layers", str(written.layers)),
        ("caches", written.buffers),
        ("longest text", f"{written.context_length} tokens"),
        ("tokenizer", ", ".join(written.tokenizer) or "none lies beside the model: give token ids"),
        ("files", ", ".join(written.files)),
        ("load", f"onnxruntime_genai.Model({str(folder)!r})"),
    ]
    console.show_facts(f"wrote {folder}", facts)


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
