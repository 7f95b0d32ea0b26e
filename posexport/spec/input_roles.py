"""The roles that an input of any graph may have, and the names by which inputs are recognised.

This is pure data, so that `--help` and `posexport list --roles` need no engine.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator

from posexport.errors import RequestError, shown

ROLES: dict[str, str] = {
    "token_ids": "tokens of the vocabulary [batch, seq]",
    "encoder_token_ids": "tokens of an encoder [batch, encoder]",
    "token_type_ids": "the kind of each token [batch, seq], or several kinds of it [batch, seq, kinds]",
    "position_ids": "positions of the tokens [batch, seq], [axes, batch, seq] or [batch, seq, axes]",
    "attention_mask": "1 where a key may be seen [batch, keys], or what is added to scores [batch, 1, seq, keys]",
    "encoder_attention_mask": "the same for the keys of an encoder",
    "bias": "numbers added to scores, as a bias by distance [seq, keys], [heads, seq, keys], [batch, heads, seq, keys]",
    "padding_mask": "1 where a key is hidden [batch, keys] or [batch, 1, seq, keys], as torch's key_padding_mask",
    "past": "cached keys or values [batch, heads, cached, head size]",
    "encoder_past": "cached keys or values of an encoder",
    "state": "what linear attention or a convolution remembers of the tokens before, of a fixed size [batch, ...]",
    "cache_position": "places of the new tokens in their rows [seq]",
    "write_indices": "places of the first new token [batch]",
    "past_length": "the number of cached tokens",
    "total_length": "the number of cached and new tokens",
    "lengths": "the number of tokens of each row that are no padding [batch]",
    "prefix_length": "the number of first tokens of each row that all its queries see [batch]",
    "segments": "where segments of the tokens begin, and where the last ends [segments + 1], as cu_seqlens",
    "last_key": "the place of the last key [batch], as GroupQueryAttention's seqlens_k",
    "use_cache": "whether there are cached tokens",
    "logits_to_keep": "the number of tokens at the end that get logits",
    "boxes": "corners of a box for each token [batch, seq, 4]",
    "features": "numbers [batch, seq, features]",
    "encoder_features": "numbers of an encoder [batch, encoder, features]",
    "images": "pictures [batch, channels, height, width]",
    "audio": "sound [batch, samples] or [batch, channels, frames]",
    "index": "whole numbers, below the rows of the table that they are looked up in",
    "rows": "the row whose cached tokens each row goes on with [batch], as beam search chooses it",
    "picture_mask": "1 where a pixel belongs to a picture [batch, height, width], beginning at the top left",
    "mask": "zeros and ones in any order",
    "ones": "ones alone",
    "zeros": "zeros alone",
}
"""The roles that an input may have, with their meanings."""

STATE = r"(conv|recurrent|ssm)_?states?(_|$)|(conv|cnn)_?cache|(past|present)_(\d+_)?(conv|recurrent|ssm)(_|$)"
"""The pattern of plain names of states."""

NAMES: tuple[tuple[str, str, str], ...] = (
    # pattern, role, kinds of dtype: f floating, i integer, q integer of 8 bits, b bool
    (r"cache_position", "cache_position", "i"),
    (r"use_cache", "use_cache", "bi"),
    (r"write_ind|(^|_)nonpad_kv", "write_indices", "i"),
    (r"seq_?lens?_k", "last_key", "i"),
    (r"(^|_)cu_?(window_?)?seq_?lens?|^seq_?offsets$", "segments", "i"),
    (r"total_seq(uence)?_len", "total_length", "i"),
    (r"prefix_?len", "prefix_length", "i"),
    (r"past_(seq(uence)?_)?len|past_seen_tokens|cur_len|^start_pos", "past_length", "i"),
    (r"(num_)?logits_to_keep", "logits_to_keep", "i"),
    (r"beam_idx", "rows", "i"),
    (r"cache_indirection", "zeros", "i"),
    (r"(encoder|cross).*(past|cache)|(past|cache).*(encoder|cross)", "encoder_past", "fq"),
    (STATE, "state", "f"),
    (r"observed_mask", "mask", "fib"),
    (r"^past_(values|time_features)$", "features", "f"),
    (r"past|(key|value)s?_?cache|cache_?(key|value|k|v)\b|kv_?cache|^[kv]_cache|^mems?(_|$)|^present", "past", "fq"),
    (r"(^|_)caches?(_\d+)?$|(^|_)(prev(ious)?|cached)_?(key|value|k|v|kv)s?(_|$)", "past", "fq"),
    (r"key_padding_mask|(^|_)pad(ding)?(_mask)?$", "padding_mask", "bi"),
    (r"^alibi|(position|relative|rel_pos|score)s?_?bias", "bias", "f"),
    (r"(encoder|cross|memory)_?(attention_|attn_)?mask", "encoder_attention_mask", "fib"),
    (r"pixel(_attention)?_mask", "picture_mask", "fib"),
    (r"bool_masked_pos|^global_att(entio)?n_mask$", "mask", "ib"),
    (r"(input|point)_?labels$", "mask", "fi"),
    (r"att(entio)?n_?(mask|bias)|input_mask|^mask|_mask$", "attention_mask", "fib"),
    (r"encoder_?input_ids", "encoder_token_ids", "i"),
    (r"input_?ids|token_?ids|^tokens?$|^ids$|input_word_ids|input_tokens?", "token_ids", "i"),
    (r"position_?ids|^positions?$|pos_ids|input_pos|^pos$|^(img|txt)_ids$", "position_ids", "fi"),
    (r"token_?type|segment", "token_type_ids", "i"),
    (r"^bbox|boxes", "boxes", "i"),
    (r"time_?step|^task_inputs$", "index", "i"),
    (r"encoder_(hidden|output|feature|last)|^memory$|^context$|cross_states", "encoder_features", "f"),
    (r"pixel|image|^img", "images", "f"),
    (r"^((input|inputs|src|source|seq|sequence|token|tokens|valid|x|text)_?)?len(gth)?s?$", "lengths", "i"),
    (r"input_(features|values)|audio|^mel|speech|waveform|spectrogram", "audio", "f"),
)
"""Patterns of names. Each has the role of inputs whose names match it, and the kinds of dtype that they may have."""

WHERE = "'posexport list --roles' says what each role is for"
"""Where a user finds the roles with their meanings."""

_SHOWN = 8  # names of inputs in a message


def plain_name(name: str) -> str:
    """Return the name of an input as NAMES reads it: in lower case, with one underscore between words."""
    return re.sub(r"[/:.\s]+", "_", name.lower()).strip("_")


def is_state(name: str) -> bool:
    """Whether an input or an output of this name is a state, which has no dimension of tokens."""
    return re.search(STATE, plain_name(name)) is not None


def chooses_tokens(name: str) -> bool:
    """Whether an input of this name contains the keys by which sparse attention selects tokens."""
    return re.search(r"(^|_)indexer_keys?(_|$)", plain_name(name)) is not None


def check_role(name: str, role: str) -> None:
    """Raise RequestError unless `role` is one of ROLES. It names the nearest roles and their meanings."""
    if role in ROLES:
        return
    near = list(dict.fromkeys(_nearest(role)))[:2]
    hint = " or ".join(f"{one!r} ({ROLES[one]})" for one in near)
    raise RequestError(
        f"unknown role {shown(role)} of the input {shown(name)}: "
        + (f"did you mean {hint}? {WHERE}." if near else f"{WHERE}; give one of those.")
    )


def check_input(name: str, role: str, inputs: Collection[str]) -> None:
    """Raise RequestError unless `name`, which was given `role`, is one of `inputs`. It names the nearest inputs."""
    if name in inputs:
        return
    by_lower = {one.lower(): one for one in inputs}
    near = [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)]
    hint = ""
    if role in inputs:
        hint = f"did you mean {role}={name}? "
    elif near:
        hint = f"did you mean {' or '.join(map(repr, near))}? "
    names = [*inputs]
    more = f" and {len(names) - _SHOWN} more, which 'posexport inspect' shows" if len(names) > _SHOWN else ""
    raise RequestError(
        f"--input gives a role to {shown(name)}, which is no input of the file: {hint}it has "
        f"{', '.join(names[:_SHOWN]) or 'none'}{more}."
    )


def _nearest(role: str) -> Iterator[str]:
    """Yield the roles of inputs with this name, and roles with a similar name."""
    lower = plain_name(role)
    yield from difflib.get_close_matches(lower, ROLES, n=1, cutoff=0.8)
    yield from (kind for pattern, kind, _ in NAMES if re.search(pattern, lower))
    yield from difflib.get_close_matches(lower, ROLES, n=2, cutoff=0.55)
    words = {word.rstrip("s") for word in lower.split("_")}
    yield from (one for one in ROLES if words & {word.rstrip("s") for word in one.split("_")})
