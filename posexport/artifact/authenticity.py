"""What is known about an artifact's weights and signature: codes for programs, texts for people. Imports no engine."""

from __future__ import annotations

from posexport.artifact.manifest import Manifest
from posexport.artifact.signing import SIGNATURE
from posexport.errors import Reason

NO_MANIFEST, AS_MANIFEST, AS_ORIGINAL, DIFFERENT = "no-manifest", "as-manifest", "as-original", "different"
"""Codes of weights. In this order: nothing says what they must be; they match the manifest; they match the original
with which the file was compared; they differ."""

UNSIGNED, UNCHECKED, TRUSTED, UNTRUSTED = "unsigned", "unchecked", "trusted", "untrusted"
"""Codes of a signature. In this order: there is none; no key was given to check it; a trusted key made it; no trusted
key made it."""


def weights_of(manifest: Manifest | None, mismatch: Reason | None) -> Reason:
    """Return what is known about the weights of a file. `mismatch` says how its manifest contradicts it."""
    if manifest is None:
        return Reason(NO_MANIFEST, "not checked, no manifest")
    return Reason(AS_MANIFEST, "as its manifest says") if mismatch is None else Reason(DIFFERENT, mismatch.text)


def signature_of(manifest: Manifest | None, checked: bool) -> Reason:
    """Return who signed an artifact. `checked`: a trusted key was required and made the signature."""
    if manifest is None or manifest.signer is None:
        return Reason(UNSIGNED, "not signed")
    if checked:
        return Reason(TRUSTED, f"signed by {manifest.signer}")
    return Reason(UNCHECKED, f"not checked, its manifest names {manifest.signer}")


def of_mismatch(reason: Reason) -> dict[str, Reason]:
    """Return what the reason of a mismatch says about the weights or about the signature."""
    if reason.code == SIGNATURE:
        return {"signature": Reason(UNTRUSTED, reason.text)}
    return {"weights": Reason(DIFFERENT, reason.text)}
