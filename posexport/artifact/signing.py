"""Detached signatures of manifests: `<file>.json.sig`, 64 bytes of Ed25519 over the bytes of `<file>.json`.

A manifest contains the sha256 of its file and of the weights beside it, so its signature covers all of them. `openssl
pkeyutl -sign -rawin` makes the same plain signature. Keys are PEM files, as `openssl genpkey` writes them. The
cryptography package loads when a key is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport.errors import MismatchError, Reason, RequestError, system_error
from posexport.files import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "signature"
"""The failure code of a file that no trusted key signed."""

SIZE = 64
"""Bytes of a signature (RFC 8032)."""

_KEY_LIMIT = 2**16  # maximum bytes of a key or a signature

_MAKE = "make one with 'openssl genpkey -algorithm ed25519 -out key.pem'"
_MAKE_PUBLIC = "make it with 'openssl pkey -in key.pem -pubout -out key.pub'"


@attrs.frozen
class SigningKey:
    """A private key that signs manifests."""

    _key: Ed25519PrivateKey = attrs.field(repr=False)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its public key."""
        return fingerprint_of(self._key.public_key())

    def trusted(self) -> TrustedKey:
        """Return its public key."""
        return TrustedKey(self.fingerprint, self._key.public_key())

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, which is always the same."""
        return self._key.sign(data)


@attrs.frozen
class TrustedKey:
    """A public key whose signatures are accepted."""

    fingerprint: str
    _key: Ed25519PublicKey = attrs.field(repr=False)

    def signed(self, data: bytes, signature: bytes) -> bool:
        """Whether `signature` is this key's signature of `data`."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


def fingerprint_of(key: Ed25519PublicKey) -> str:
    """Return `sha256:` and the sha256 of the public key as DER.

    It equals `openssl pkey -pubin -in key.pub -outform DER | sha256sum`.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return "sha256:" + hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read_signing_key(path: Path) -> SigningKey:
    """Read the private key in a PEM file. RequestError for any other file and for a key with a passphrase."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_key(path, "--sign")
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        raise RequestError(
            f"--sign {str(path)!r} has a passphrase, which is not supported: give a key without one, from a place that "
            "nobody else can read."
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise RequestError(f"--sign {str(path)!r} is not a private key in PEM: {_MAKE}.") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise RequestError(f"--sign {str(path)!r} is a key of another kind than Ed25519: {_MAKE}.")
    return SigningKey(key)


def read_trusted_keys(paths: Sequence[Path]) -> tuple[TrustedKey, ...]:
    """Read the public keys in PEM files, each once. RequestError for any other file."""
    keys = (_read_trusted_key(path) for path in paths)
    return tuple({key.fingerprint: key for key in keys}.values())


def _read_trusted_key(path: Path) -> TrustedKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = _read_key(path, "--trust")
    if b"PRIVATE KEY" in data:
        raise RequestError(f"--trust {str(path)!r} is a private key: give its public key, {_MAKE_PUBLIC}.")
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise RequestError(f"--trust {str(path)!r} is not a public key in PEM: {_MAKE_PUBLIC}.") from None
    if not isinstance(key, Ed25519PublicKey):
        raise RequestError(f"--trust {str(path)!r} is a key of another kind than Ed25519: {_MAKE_PUBLIC}.")
    return TrustedKey(fingerprint_of(key), key)


def _read_key(path: Path, option: str) -> bytes:
    with system_error(f"{option} {str(path)!r} can't be read", "give a key in PEM"):
        return read_bytes(path, _KEY_LIMIT)


def signature_path(manifest: Path) -> Path:
    """Return the path `<file>.json.sig` for the manifest `<file>.json`."""
    return manifest.with_name(manifest.name + ".sig")


def check_signature(
    path: Path, manifest: Path, data: bytes, signer: str | None, trusted: Sequence[TrustedKey]
) -> TrustedKey:
    """Return the one of the `trusted` keys that signed `data`, the bytes of the `manifest` of the artifact at `path`.

    `signer` is the fingerprint that the manifest names, or None. Raises MismatchError if no trusted key signed it.
    """
    file = signature_path(manifest)
    if not file.is_file():
        raise untrusted(path, f"its signature {file.name} is not there" if signer else "it is not signed")
    with system_error(f"the signature {str(file)!r} can't be read", "sign the artifact again"):
        signature = read_bytes(file, _KEY_LIMIT)
    if len(signature) != SIZE:
        raise untrusted(path, f"its signature {file.name} is damaged: it has {len(signature)} bytes, not {SIZE}")
    key = next((key for key in trusted if key.signed(data, signature)), None)
    if key is None and signer is not None and all(key.fingerprint != signer for key in trusted):
        raise untrusted(path, f"its signer {signer} is not one of the trusted keys")
    if key is None:
        raise untrusted(
            path, f"its signature {file.name} was not made by a trusted key for its manifest {manifest.name}"
        )
    if signer not in (None, key.fingerprint):
        raise untrusted(path, f"its manifest names {signer} as its signer, but {key.fingerprint} signed it")
    return key


def untrusted(path: Path, clause: str) -> MismatchError:
    """Return the error of an artifact that no trusted key signed."""
    return MismatchError(path, Reason(SIGNATURE, clause), "make it again with --sign, or trust the key of its builder")
