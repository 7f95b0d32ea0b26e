"""Checks that artifacts compute what their torch block computes."""

from typing import TYPE_CHECKING

from posexport import public_names

if TYPE_CHECKING:
    from posexport.verify.result import Report as Report
    from posexport.verify.result import Verdict as Verdict
    from posexport.verify.verifier import verify as verify

__getattr__ = public_names(__name__, {"verifier": ("verify",), "result": ("Report", "Verdict")})
