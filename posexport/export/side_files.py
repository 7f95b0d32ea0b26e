"""Files of a checkpoint that loaders expect beside its model: configurations, tokenizers and preprocessors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from posexport.errors import RequestError
from posexport.files import check_regular, is_there, not_a_file, sha256_of
from posexport.runtimes import tokens

NAMES = (
    *("config.json", "generation_config.json", *tokens.FILES),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""The names of these files in checkpoints."""


def side_files(checkpoint: Path, output: Path) -> Mapping[str, Path]:
    """The files of a checkpoint that belong beside the output, by name.

    RequestError where another file has such a name there: it may belong to another model. OSError for a file of the
    checkpoint that can't be read or has almost only holes, before the work and not when it is copied.
    """
    files = {}
    for name in NAMES:
        source, target = checkpoint / name, output.parent / name
        if not_a_file(source):
            continue
        check_regular(source)
        if not is_there(target):
            files[name] = source
        elif not_a_file(target) or sha256_of(target) != sha256_of(source):
            raise RequestError(
                f"{str(target)!r} is there and is not that of {str(checkpoint)!r}, which belongs beside the model: "
                "give a folder of its own to --output, or remove the file."
            )
    return files
