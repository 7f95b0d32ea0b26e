"""An artifact that is not what its manifest, a signature or an original says: it fails everywhere without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from posexport.artifact.authenticity import of_mismatch
from posexport.errors import MismatchError
from posexport.progress import Progress, silent
from posexport.runtimes import RUNTIMES, Runtime
from posexport.runtimes.tensorrt.api import BUILDERS
from posexport.verify.result import FAILED, Verdict


@attrs.frozen(kw_only=True)
class MismatchedJob:
    """Such an artifact, as a job of verify."""

    path: Path
    runtimes: Mapping[str, Runtime]
    error: MismatchError
    memory: int = 0
    held: int = 0

    def verdicts(self, step: Progress = silent) -> list[Verdict]:
        """One verdict for each runtime that was asked for.

        If all runtimes were asked for, a plan gets one only for its builder, or for each runtime that may be its
        builder.
        """
        error = self.error
        names = list(self.runtimes)
        if len(names) == len(RUNTIMES) and self.path.suffix == ".plan":
            names = list(BUILDERS) if error.runtime is None else [error.runtime]
        known = {"sha256": error.sha256, **of_mismatch(error.reason)}
        return [Verdict.of(str(self.path), name, FAILED, error.reason, **known) for name in names]
