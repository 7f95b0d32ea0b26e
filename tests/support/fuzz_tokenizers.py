"""The reader of tokenizers for fuzz_files.py, and sound tokenizers of three kinds from which mutants are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from file_mutator import Mutator

_FIELDS: dict[str, Any] = {
    **{"version": "1.0", "added_tokens": [], "decoder": {"type": "ByteLevel"}, "post_processor": None},
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        **{"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
    },
}
_SPLIT = {"type": "Split", "pattern": {"Regex": "\\s+|\\w+"}, "behavior": "Isolated", "invert": False}
_LETTERS = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "bpe": {
        **_FIELDS,
        "model": {"type": "BPE", "vocab": {**_LETTERS, "th": 26, "the": 27}, "merges": [["t", "h"], ["th", "e"]]},
    },
    "words": {
        **_FIELDS,
        "pre_tokenizer": _SPLIT,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            **{"type": "WordPiece", "vocab": {**_LETTERS, "[UNK]": 26, "##at": 27}, "unk_token": "[UNK]"},
            **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        },
    },
    "unigram": {
        **_FIELDS,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([one, -1.5] for one in "abcdeht")]},
    },
}
REQUESTS: dict[str, Any] = {"encode": ["The cat, \u00e9t\u00e9 \U0001f600."], "decode": [[0, 1, 2, 9**9]]}


def tokenizer_reader(folder: Path) -> tuple[str, Callable[[Mutator], bytes], Callable[[Path], object]]:
    """Runs the code of the child process in this process. A fault that it would report becomes a refusal."""
    from posexport.errors import RequestError
    from posexport.runtimes.tokens_process import Session

    place = folder / "tokenizer"
    place.mkdir(exist_ok=True)
    if not (place / "tokenizer.json").is_symlink():
        (place / "tokenizer.json").symlink_to("../mutant.json")

    def make(mutator: Mutator) -> bytes:
        data = mutator.random.choice([*TOKENIZERS.values()])
        return mutator.tree(data) if mutator.random.randrange(8) else mutator.raw(json.dumps(data).encode())

    def read(_: Path) -> None:
        session = Session()
        for work, given in {"open": str(place), **REQUESTS}.items():
            fault = session.answer({work: given})["fault"]
            if fault is not None:
                raise RequestError(fault)

    return "mutant.json", make, read
