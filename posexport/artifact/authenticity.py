"""What is known of an artifact's weights and of its signature: codes for code, texts for people. Imports no engine."""

from __future__ import annotations

from posexport.artifact.manifest import Manifest
from posexport.artifact.signing import SIGNATURE
from posexport.errors import Reason

NO_MANIFEST, AS_MANIFEST, AS_ORIGINAL, DIFFERENT = "no-manifest", "as-manifest", "as-original", "different"
"""Codes of weights: nobody says what they must be, they are as the manifest says, they are those of the original that
the file was held against, they are others."""

UNSIGNED, UNCHECKED, TRUSTED, UNTRUSTED = "unsigned", "unchecked", "trusted", "untrusted"
"""Codes of a signature: there is none, no key was given to check it, a trusted key made it, none did."""


def weights_of(manifest: Manifest | None, mismatch: Reason | None) -> Reason:
    """What is known of the weights of a file; `mismatch` is how its manifest contradicts it."""
    if manifest is None:
        return Reason(NO_MANIFEST, "not checked, no manifest")
    return Reason(AS_MANIFEST, "as its manifest says") if mismatch is None else Reason(DIFFERENT, mismatch.text)


def signature_of(manifest: Manifest | None, checked: bool) -> Reason:
    """Who signed an artifact; `checked` where a trusted key was asked for and made the signature."""
    if manifest is None or manifest.signer is None:
        return Reason(UNSIGNED, "not signed")
    if checked:
        return Reason(TRUSTED, f"signed by {manifest.signer}")
    return Reason(UNCHECKED, f"not checked, its manifest names {manifest.signer}")


def of_mismatch(reason: Reason) -> dict[str, Reason]:
    """What the reason of a mismatch says: of the weights, or of the signature."""
    if reason.code == SIGNATURE:
        return {"signature": Reason(UNTRUSTED, reason.text)}
    return {"weights": Reason(DIFFERENT, reason.text)}
