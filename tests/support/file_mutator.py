"""Mutants of files, made from their structure or from their bytes. The same seed gives the same mutant."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

TEXTS = (
    *("", "x" * 6000, "\x1b]0;title\x07\x1b[2J", "a\nError: b", "\u202egnp", "\ud800", "\x00", "../../etc/passwd"),
    *("/dev/zero", "NaN", "-1", "1e999", "9" * 5000, "{}", "rope", "fp8", "é" * 300, "%s%n", "{0}", "*" * 100),
)
NUMBERS = (0, -1, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 1e308, 1e-320, 0.5)
EXTREMES: tuple[Any, ...] = (
    *TEXTS,
    *NUMBERS,
    *(None, True, False, float("nan"), float("inf"), [], {}, [None], {"": None}, {"name": 1}, [[[[]]]]),
)
"""Values that replace a value of JSON or TOML."""


class Mutator:
    """Makes mutants from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def raw(self, data: bytes) -> bytes:
        """Bytes that are cut short, have flipped bits, or have a part removed, repeated or replaced."""
        made = bytearray(data)
        at = self.random.randrange(len(made) + 1)
        size = self.random.choice((1, 2, 4, 8, 64, 1024))
        match self.random.randrange(5):
            case 0:
                del made[at:]
            case 1:
                for _ in range(self.random.choice((1, 1, 2, 8, 64))):
                    made[self.random.randrange(len(made))] ^= 1 << self.random.randrange(8)
            case 2:
                del made[at : at + size]
            case 3:
                made[at:at] = made[at : at + size] * self.random.choice((1, 2, 100))
            case _:
                made[at : at + size] = self.random.choice((b"\xff", b"\x00", b"\x80", b"{", b"[")) * size
        return bytes(made)

    def tree(self, data: Any) -> bytes:
        """JSON with one to three nodes replaced, removed, repeated or renamed."""
        data = json.loads(json.dumps(data))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self._change(data)
        text = json.dumps(data)
        match self.random.randrange(40):
            case 0:  # a duplicate key
                text = text.replace("{", '{"version": 1, "version": "1", ', 1)
            case 1:
                text = "[" * self.random.choice((70, 900, 100_000)) + text
            case 2:
                text = text[: self.random.randrange(len(text))]
        return text.encode("utf-8", "surrogatepass")

    def _change(self, data: Any) -> None:
        places = list(_places(data))
        if not places:
            return
        holder, key = self.random.choice(places)
        match self.random.randrange(7):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder[:] = holder * self.random.choice((2, 50)) if len(holder) < 1000 else holder
            case 1 | 2 if isinstance(holder, dict):
                holder[self.random.choice(TEXTS)] = holder.pop(key)
            case 3:
                other, place = self.random.choice(places)
                holder[key] = json.loads(json.dumps(other[place]))
            case _:
                holder[key] = self.random.choice(EXTREMES)

    def message(self, message: Any) -> None:
        """Change one field of a protobuf message, at any depth."""
        from google.protobuf.descriptor import FieldDescriptor as Field

        places = list(_fields(message))
        holder, field = self.random.choice(places)
        value = getattr(holder, field.name)
        repeated = field.is_repeated
        match self.random.randrange(6):
            case 0:
                holder.ClearField(field.name)
                return
            case 1 if repeated and len(value):
                for _ in range(self.random.choice((1, 1, 30))):
                    if field.type == Field.TYPE_MESSAGE:
                        value.add().CopyFrom(self.random.choice(list(value)))
                    else:
                        value.append(self.random.choice(list(value)))
                return
            case 2 if repeated and len(value):
                del value[self.random.randrange(len(value))]
                return
            case 3 if field.type == Field.TYPE_MESSAGE:
                other, more = self.random.choice(places)
                if more.message_type is field.message_type and not repeated and not more.is_repeated:
                    value.CopyFrom(getattr(other, more.name))
                return
        with contextlib.suppress(TypeError, ValueError):
            extreme: Any
            if field.type == Field.TYPE_MESSAGE:
                return
            if field.type == Field.TYPE_STRING:
                extreme = self.random.choice([text for text in TEXTS if "\ud800" not in text])
            elif field.type == Field.TYPE_BYTES:
                extreme = self.random.choice((b"", b"\xff" * 7, b"\x00" * 4096))
            elif field.type == Field.TYPE_ENUM:
                extreme = self.random.choice((0, 1, 7, 99, -1, 2**31 - 1))
            elif field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
                extreme = self.random.choice((0.0, float("nan"), float("inf"), 1e38))
            else:
                extreme = self.random.choice((0, -1, 1, 99, 2**31 - 1, 2**40, 2**62, -(2**62)))
            if repeated and len(value):
                value[self.random.randrange(len(value))] = extreme
            elif repeated:
                value.append(extreme)
            else:
                setattr(holder, field.name, extreme)

    def toml(self, text: str) -> bytes:
        """TOML with a value replaced, a line removed or repeated, or a table renamed."""
        lines = text.splitlines()
        for _ in range(self.random.choice((1, 1, 2, 3))):
            at = self.random.randrange(len(lines))
            key, equals, _value = lines[at].partition("=")
            match self.random.randrange(6):
                case 0:
                    del lines[at]
                    lines = lines or [""]
                case 1:
                    lines.insert(at, lines[at])
                case 2:
                    lines[at] = self.random.choice(
                        ("[tool]", "[[a]]", "[a.b.c]", "]", "= 1", "a" + ".a" * 3000 + " = 1")
                    )
                case _ if equals:
                    extreme = self.random.choice((*EXTREMES, "[" * 900, "{a = " * 200))
                    literal = json.dumps(extreme) if not isinstance(extreme, dict) else "{}"
                    lines[at] = f"{key}= {literal}"
        return "\n".join(lines).encode("utf-8", "surrogatepass")

    def npz(self, arrays: dict[str, Any]) -> bytes:
        """An archive in which one array has another dtype, name or values, or a changed header; or its bytes are
        mutated."""
        import numpy as np

        arrays, made = dict(arrays), io.BytesIO()
        name = self.random.choice(list(arrays))
        match self.random.randrange(4):
            case 0:
                arrays[name] = arrays[name].astype(self.random.choice(("f8", "f2", "c8", "i1", "U3", "M8[s]", "?")))
            case 1:
                arrays[self.random.choice(TEXTS)[:200] or "x"] = arrays.pop(name)
            case 2:
                arrays[name] = np.full(self.random.choice(((0,), (1, 1), (3, 1, 2, 1), (2, 7, 16))), np.nan)
        with zipfile.ZipFile(made, "w", self.random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for key, array in arrays.items():
                raw = io.BytesIO()
                np.lib.format.write_array(raw, np.asarray(array))
                data = raw.getvalue()
                if key == name and self.random.randrange(2):
                    shape = self.random.choice(("(1099511627776,)", "(-1,)", "(2, 2)", "()", "((),)", "(" * 300))
                    header = f"{{'descr': '{self.random.choice(('<f4', '|O', '<f99', 'V8', 'x'))}', "
                    header += f"'fortran_order': False, 'shape': {shape}, }}"
                    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header.encode() + b"\n" + data
                with contextlib.suppress(UnicodeEncodeError, IndexError):
                    archive.writestr(f"{key}.npy", data)
        return made.getvalue() if self.random.randrange(4) else self.raw(made.getvalue())

    def safetensors(self, data: bytes) -> bytes:
        """A file with a mutated header, with a wrong header length, or with mutated bytes."""
        size = int.from_bytes(data[:8], "little")
        header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
        match self.random.randrange(4):
            case 0:
                return self.raw(data)
            case 1:
                length = self.random.choice((0, 1, size - 1, size + 1, 2**31, 2**63 - 1, 2**64 - 1))
                return length.to_bytes(8, "little") + data[8:]
        made = self.tree(header)
        return len(made).to_bytes(8, "little") + made + rest


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key or index) of a tree."""
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield data, key
            yield from _places(value)


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every (message, field) of a message and the messages inside it. Fields that are not set are included."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from _fields(inner)
