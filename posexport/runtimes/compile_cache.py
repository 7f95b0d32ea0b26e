"""The folder in which torch.compile keeps its results, and from which it loads code (shared libraries, pickles).

Its name in the temporary folder can be guessed. Another user of the machine could create it first and put code there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from posexport.errors import RequestError

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def claim_compile_cache() -> None:
    """Create the folder for this user only; RequestError if it belongs to another user or is a link."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    named = os.environ.get(VARIABLE, str(folder))  # torch itself sets it to its default
    if named != str(folder) or not hasattr(os, "geteuid"):
        return
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RequestError(
            f"torch.compile loads code from {str(folder)!r}, which belongs to somebody else: set {VARIABLE} to a "
            "folder of your own."
        )
    folder.chmod(0o700)
