"""The request of `posexport tune`, from the command line or a config file: the block, its scenario and its files."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.manifest import WeightSource
from posexport.artifact.weight_source import checkpoint_weights, file_weights
from posexport.bench.scenarios import Scenario, read_scenario
from posexport.bench.tune.space import CONSECUTIVE, Limits, Request
from posexport.errors import RequestError
from posexport.export.block_options import (
    BlockOptions,
    checkpoint_of,
    merge_options,
    spec_of,
    takes_weights,
    weights_of,
)
from posexport.files import check_output, real_path
from posexport.progress import Progress, silent
from posexport.spec.fields import text
from posexport.spec.spec import DTYPES, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from posexport.artifact.signing import SigningKey
    from posexport.bench.tune.programs import Block
    from posexport.bench.tune.result import Result

USUAL_TOKENS = 512
"""Tokens of the scenario if none is given."""


@attrs.frozen(kw_only=True)
class TuneOptions(BlockOptions):
    """Options that are not part of the spec, validated wherever they come from."""

    runtime: str = text("ort-cpu", "runtime to tune for")
    objective: str = text("latency", "what is made small")
    scenario: str | None = text(None, "what is timed")


@attrs.frozen(kw_only=True)
class TuneRequest:
    """A tuning that can start. Nothing has been loaded for it yet. `specs` are those of the block by dtype."""

    options: TuneOptions
    block_options: Mapping[str, Any]
    parameters: Mapping[str, Any]
    specs: Mapping[str, Spec]
    request: Request
    output: Path
    save: Path | None

    def run(
        self, cache: Path | None, resume: bool, progress: Progress = silent, key: SigningKey | None = None
    ) -> Result:
        """Tune. With `resume`, facts in the folder `cache` are reused (default: the folder of the output).

        What is written is signed with a `key`.
        """
        from posexport.bench.tune.fact_cache import Store
        from posexport.bench.tune.search import check_there, tune

        check_there(self.request.runtime)
        block = attrs.evolve(self._block(), key=key)
        return tune(block, self.request, self.output, Store(cache or self.output.parent, resume), progress)

    def _block(self) -> Block:
        """What is tuned. Weights are loaded when a program is exported, in its dtype."""
        from posexport.bench.tune.programs import Block
        from posexport.models.weights import digest_of, read_weights, seeded_weights

        options, specs = self.options, dict(self.specs)
        fixed = {name: size for name in ("batch", "seq", "max_seq") if (size := getattr(options, name)) is not None}
        block = partial(Block, specs=specs, fixed=fixed)
        if options.weights is not None:
            path = Path(options.weights)
            spec, _ = weights_of(options.weights, next(iter(specs.values())), "bias" in self.block_options)
            specs.update({dtype: attrs.evolve(typed, bias=spec.bias) for dtype, typed in specs.items()})
            source = file_weights(path)
            return block(
                load=lambda dtype: read_weights(path, specs[dtype]),
                source=f"file {source.sha256}",
                weight_source=source,
            )
        if takes_weights(self.block_options):
            dtype = next(iter(specs))
            layer = int(self.block_options.get("layer") or 0)
            return block(
                load=self._checkpoint,
                source=f"layer {digest_of(self._checkpoint(dtype)[1])} as {dtype}",
                weight_source=checkpoint_weights(Path(self.block_options["from"]), layer),
            )
        seed = options.seed or 0
        return block(
            load=lambda dtype: (specs[dtype], seeded_weights(specs[dtype], seed)),
            source=f"seed {seed}",
            weight_source=WeightSource(source="random", seed=seed),
        )

    def _checkpoint(self, dtype: str) -> tuple[Spec, Mapping[str, Tensor]]:
        """The spec and the weights of the checkpoint's layer in a dtype."""
        checkpoint = checkpoint_of({**self.block_options, "dtype": dtype}, self.parameters)
        if checkpoint is None or checkpoint.weights is None:
            raise RequestError("the checkpoint has no weights: give --weights or --seed.")
        return checkpoint.spec, checkpoint.weights


def read_tune_request(
    config: str | None, preset: str | None, parameters: Mapping[str, Any], given: Mapping[str, Any], save: Path | None
) -> TuneRequest:
    """The request for these options. RequestError for invalid options, before an engine is loaded."""
    known = ["for" if name == "runtime" else name for name in given]
    merged, parameters = merge_options(config, preset, parameters, given, known)
    if "for" in merged:
        merged.setdefault("runtime", merged.pop("for"))
    names = {field.name for field in attrs.fields(TuneOptions)}
    options = TuneOptions(**{name: value for name, value in merged.items() if name in names})
    limits = limits_of(merged)
    specs = specs_of(merged, parameters)
    first = next(iter(specs.values()))
    if CONSECUTIVE in limits.allow and not first.can_be_consecutive:
        encodings = ", ".join(dict.fromkeys(layer.encoding.name for layer in first.distinct_layers()))
        raise RequestError(
            f"--allow consecutive with {encodings}, which has no positions that can be consecutive: drop it."
        )
    scenario = _scenario(options, first)
    request = Request(scenario=scenario, runtime=options.runtime, objective=options.objective, limits=limits)
    ending = ".plan" if options.runtime.startswith("tensorrt") else ".onnx"
    output = Path(f"{preset or first.encoding.name}{ending}" if options.output is None else options.output)
    check_files(output, ending, options.runtime, save)
    return TuneRequest(
        options=options,
        block_options=merged,
        parameters=parameters,
        specs=specs,
        request=request,
        output=output,
        save=save,
    )


def check_files(output: Path, ending: str, runtime: str, save: Path | None) -> None:
    """RequestError if the files can't be written, or would replace one another."""
    if output.suffix != ending:
        raise RequestError(f"output {str(output)!r} must end in {ending} for {runtime}: name it like x{ending}.")
    if save is not None and save.suffix != ".json":
        raise RequestError(f"--save {str(save)!r} must end in .json: name it like tune.json.")
    manifests = {real_path(Path(f"{output.with_suffix(suffix)}.json")) for suffix in (ending, ".onnx")}
    if save is not None and real_path(save) in manifests:
        raise RequestError(f"--save {str(save)!r} is the manifest of the output: name it otherwise, like tune.json.")
    onnx = output.with_suffix(".onnx")  # which is written beside a plan
    for path in dict.fromkeys((output, onnx, *([] if save is None else [save]))):
        check_output(path, path.suffix)


def _several(options: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """An option that may have several values: repeated on the command line, or a list in a file."""
    value = options.get(name, ())
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def limits_of(options: Mapping[str, Any]) -> Limits:
    """What the search is held to, by the options that were given."""
    forms, targets, opsets, allow = (_several(options, name) for name in ("form", "target", "opset", "allow"))
    return Limits(forms=forms, targets=targets, opsets=opsets, allow=allow)


def specs_of(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Spec]:
    """The spec in each dtype that was given, or in every one that can hold it. RequestError if none can."""
    specs: dict[str, Spec] = {}
    errors = []
    for dtype in dict.fromkeys(_several(options, "dtype") or DTYPES):
        typed = {**options, "dtype": dtype}
        try:
            checkpoint = checkpoint_of(typed, parameters, weights=False)
            specs[dtype] = spec_of(typed, parameters) if checkpoint is None else checkpoint.spec
        except RequestError as error:
            if options.get("dtype") is not None:
                raise
            errors.append(error)
    if not specs:
        raise errors[0]
    return specs


def one_scenario(text: str) -> Scenario:
    """The scenario of a text that names one size. RequestError for several."""
    scenario, *others = read_scenario(text)
    if others or scenario.swept:
        raise RequestError(
            f"--scenario {text!r} is {1 + len(others)} sizes: tune for one, such as {scenario.kind}:512."
        )
    return scenario


def _scenario(options: TuneOptions, spec: Spec) -> Scenario:
    """The given scenario, otherwise a prompt, or a step if there is a cache, of a usual length that the block has."""
    if options.scenario is not None:
        scenario = one_scenario(options.scenario)
        if scenario.kind == "decode" and spec.kv_cache is None:
            raise RequestError(
                f"--scenario {options.scenario} is a step over a cache, and this block has none: give --kv-cache too, "
                "or a prefill."
            )
        return scenario
    room = min(limit for limit in (USUAL_TOKENS, options.max_seq, spec.token_limit()) if limit)
    if spec.kv_cache is None or (options.seq or 1) > 1:
        return Scenario("prefill", options.seq or room)
    return Scenario("decode", max(min(USUAL_TOKENS, room - 1), 1))
