"""What `scripts/gpu_acceptance` prepares: whole models with random weights, and blocks. The most important come first.

An item is a folder with an ONNX file, its manifest, inputs and float64 references. `prepared.json` lists all items with
the sha256 of each file. The folders are grouped into parts that can be copied one by one. Only preparing loads an
exporter.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport import temporary
from posexport.errors import PosexportError, RequestError
from posexport.files import write_json
from posexport.jsondata import DataError, read_json, structure, unstructure
from posexport.models import ENCODINGS
from posexport.spec.forms import FORMS
from posexport.verify.prepared.data import PreparedFile

LIST = "prepared.json"

PART_BYTES = 32 * 2**20
"""The approximate maximum of bytes in a part. A larger item is a part of its own."""

COMMON = ("rope", "alibi", "t5", "none", "learned", "sinusoidal", "relative", "rope2d")
"""The encodings that most models use. Their blocks have eight heads of 64 features, and they are timed."""

FORM_RANKS = ("native", "contrib", "decomposed")
DTYPE_RANKS = ("fp16", "bf16", "fp32")
MODE_RANKS = ("decode", "prefill", "decode-shared", "padding", "decode-consecutive", "prefill-consecutive")

DECODER: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 200,
    "eos_token_id": None,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
TINY: Mapping[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}

CHECKPOINTS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "decoder": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION),
}
"""The class of transformers, its configuration class, and the values set in the configuration."""

MODELS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "decoder-grown-native": ("decoder", "native", ()),
    "decoder-shared-native": ("decoder", "native", ("--kv-cache", "shared", "--opset", "24")),
    "vit-native": ("vit", "native", ()),
    "decoder-grown-decomposed": ("decoder", "decomposed", ()),
    "vit-decomposed": ("vit", "decomposed", ()),
    "decoder-grown-contrib": ("decoder", "contrib", ("--target", "ort")),
    "decoder-shared-contrib": ("decoder", "contrib", ("--target", "ort", "--kv-cache", "shared")),
}
"""Whole models: the checkpoint, the form, and further options of `posexport export --model`."""


@attrs.frozen(kw_only=True)
class Item:
    """One file to make: a whole `model`, or a block with an `encoding` in a `mode`. `quick` makes it tiny."""

    form: str
    dtype: str
    model: str = ""
    encoding: str = ""
    mode: str = ""
    quick: bool = False

    @property
    def name(self) -> str:
        """The name of the item's folder and of its rows."""
        return f"{self.model or f'{self.encoding}-{self.form}'}-{self.dtype}{self.mode and f'-{self.mode}'}"

    @property
    def shapes(self) -> tuple[str, ...] | None:
        """The sizes at which the item is timed. An empty tuple means the usual sizes; None means that it is not
        timed."""
        step, prompt = ("seq=1,past_seq=16", "seq=16") if self.quick else ("seq=1,past_seq=512", "seq=512")
        if self.model:
            return () if self.model.startswith("vit") else (step,)
        if self.encoding not in COMMON or self.mode not in ("decode", "prefill"):
            return None
        return (prompt if self.mode == "prefill" else step,)

    def refusal(self) -> str | None:
        """The reason why this block does not exist, or None."""
        from posexport.verify.matrix.table import Entry

        if self.model:
            return None
        return Entry(encoding=self.encoding, form=self.form, dtype=self.dtype, mode=self.mode).refusal("portable")

    def make(self, folder: Path, checkpoints: Path) -> Path | None:
        """Write the file into a folder. Returns the checkpoint of the model, or None for a block."""
        path = folder / "model.onnx"
        if not self.model:
            self._make_block(path)
            return None
        kind, form, options = MODELS[self.model]
        checkpoint = checkpoints / kind
        if not checkpoint.exists():
            _make_checkpoint(checkpoint, kind, self.quick)
        command = [sys.executable, "-m", "posexport", "export", "--from", str(checkpoint), "--model"]
        command += ["--form", form, "--dtype", self.dtype, *options, "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RequestError(f"{self.name} can't be exported: {done.stderr.strip()}")
        return checkpoint

    def _make_block(self, path: Path) -> None:
        from posexport.artifact.onnx_artifact import write_onnx
        from posexport.export import export
        from posexport.models import read_spec
        from posexport.models.weights import seeded_weights
        from posexport.verify.matrix.table import MODES, SIZES

        sizes = {"hidden_size": 512, "num_heads": 8} if self.encoding in COMMON else SIZES
        sizes = {"hidden_size": 64, "num_heads": 4} if self.quick else sizes
        encoding = {"name": self.encoding, **({"max_positions": 4096} if self.encoding == "learned" else {})}
        fields = MODES[self.mode].fields_for(self.encoding)
        spec = read_spec({"encoding": encoding, "dtype": self.dtype, **sizes, **fields})
        write_onnx(export(spec, seeded_weights(spec, 0), form=self.form), path)


def _make_checkpoint(folder: Path, kind: str, quick: bool) -> None:
    """Write a random checkpoint with weights large enough that every term affects the output."""
    import torch
    import transformers

    model_class, config, settings = CHECKPOINTS[kind]
    settings = {**settings, **(TINY if quick else {})}
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**settings))
    for name, parameter in model.named_parameters():
        scale = 1.0 if "embed_tokens" in name else float(parameter.shape[-1]) ** -0.5
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape) * scale)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.mul_(0.3).add_(1)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)


def items(
    *,
    model: Sequence[str] = (),
    encoding: Sequence[str] = (),
    form: Sequence[str] = (),
    dtype: Sequence[str] = (),
    mode: Sequence[str] = (),
    quick: bool = False,
) -> Iterator[Item]:
    """All items, the most important first. Names given for an axis select items. If only models are named, blocks are
    left out. If only encodings or modes are named, models are left out."""
    models = list[Item]()
    if model or not (encoding or mode):
        models = [
            Item(model=name, form=MODELS[name][1], dtype=one_dtype, quick=quick)
            for one_dtype, name in itertools.product(("fp16", "fp32"), MODELS)
            if (not model or name in model)
            and (not dtype or one_dtype in dtype)
            and (not form or MODELS[name][1] in form)
        ]
    yield from (one for one in models if one.dtype == "fp16")
    blocks = [] if model and not (encoding or mode) else _blocks(encoding, form, dtype, mode, quick)
    first = (FORM_RANKS[0], DTYPE_RANKS[0], MODE_RANKS[0])
    yield from (one for one in blocks if (one.form, one.dtype, one.mode) == first)
    yield from (one for one in models if one.dtype != "fp16")
    yield from (one for one in blocks if (one.form, one.dtype, one.mode) != first)


def _blocks(
    encoding: Sequence[str], form: Sequence[str], dtype: Sequence[str], mode: Sequence[str], quick: bool
) -> list[Item]:
    """The blocks, the most important first. All encodings in one form, dtype and mode stand together, and the encodings
    that most models use come first."""
    encodings = (*COMMON, *(name for name in ENCODINGS if name not in COMMON))
    forms = (*FORM_RANKS, *(name for name in FORMS if name not in FORM_RANKS))
    ranked = sorted(
        itertools.product(forms, DTYPE_RANKS, MODE_RANKS),
        key=lambda one: forms.index(one[0]) + DTYPE_RANKS.index(one[1]) + MODE_RANKS.index(one[2]),
    )
    return [
        Item(encoding=name, form=one_form, dtype=one_dtype, mode=one_mode, quick=quick)
        for (one_form, one_dtype, one_mode), name in itertools.product(ranked, encodings)
        if (not encoding or name in encoding)
        and (not form or one_form in form)
        and (not dtype or one_dtype in dtype)
        and (not mode or one_mode in mode)
    ]


@attrs.frozen(kw_only=True)
class Prepared:
    """A prepared item in the folder `place`, relative to the folder of the list. `error` says why preparing failed."""

    name: str
    place: str
    is_model: bool
    shapes: tuple[str, ...] | None = None
    file: PreparedFile | None = None
    error: str = ""

    @property
    def sha256(self) -> str | None:
        """The sha256 of its ONNX file; None if there is no file."""
        return None if self.file is None else self.file.sha256[self.file.model]


@attrs.frozen(kw_only=True)
class PreparedList:
    """The prepared items, and the versions that made them. `quick` items are timed in few rounds."""

    made_by: Mapping[str, str]
    quick: bool
    items: tuple[Prepared, ...]


def prepare(folder: Path, chosen: Iterator[Item], most_bytes: float, quick: bool) -> Iterator[PreparedList]:
    """Prepare items into a folder until it holds `most_bytes` bytes. Yields the list after each new item."""
    from posexport.runtimes.pool import Pool
    from posexport.verify.matrix.table import makers
    from posexport.verify.prepared.make import prepare_file

    listed = PreparedList(made_by=makers(), quick=quick, items=())
    part, part_bytes, total = 1, 0, 0
    with temporary.folder() as work, Pool(300.0) as pool:
        for item in chosen:
            if item.refusal() is not None:
                continue
            made = work / item.name
            made.mkdir()
            file, error = None, ""
            try:
                checkpoint = item.make(made, work / "checkpoints")
                file = prepare_file(made / "model.onnx", pool, checkpoint=checkpoint, most_bytes=2**17)
            except PosexportError as wrong:
                error = str(wrong)
            size = sum(one.stat().st_size for one in made.iterdir())
            if total and total + size > most_bytes:
                return
            if part_bytes and part_bytes + size > PART_BYTES:
                part, part_bytes = part + 1, 0
            part_bytes, total = part_bytes + size, total + size
            place = f"part-{part:02}/{item.name}"
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made, folder / place)
            about: dict[str, Any] = {
                "name": item.name,
                "place": place,
                "is_model": bool(item.model),
                "shapes": item.shapes,
            }
            row = Prepared(**about, file=file, error=error)
            listed = attrs.evolve(listed, items=(*listed.items, row))
            write_json(folder / LIST, unstructure(listed))
            yield listed


def read_list(folder: Path) -> PreparedList:
    """The list in a folder. Raises RequestError if the folder has no list."""
    try:
        return structure(read_json(folder / LIST), PreparedList)
    except OSError as error:
        raise RequestError(
            f"{str(folder / LIST)!r} can't be read ({error.strerror}): give --prepare's folder."
        ) from None
    except DataError as error:
        raise RequestError(f"{str(folder / LIST)!r} is no list of what was prepared ({error}).") from None
