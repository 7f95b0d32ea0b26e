"""The command that installs what is missing, from the place where posexport itself was installed from.

pip records that place in `direct_url.json` (PEP 610): a folder, a version-control URL or an archive; nothing for an
index.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

_PACKAGE = "posexport"
_SOURCE = f"in {_PACKAGE}'s source folder"


def install_command(requirement: str) -> str:
    """The command that installs a requirement such as "onnx" or "posexport[rtx]", and where to run it.

    It contains no path of this machine, because it becomes part of results.
    """
    name, bracket, extras = requirement.partition("[")
    if name != _PACKAGE:
        return f"pip install '{requirement}'"
    extras = bracket + extras
    # importlib.metadata would make `list` slow
    installed = next((folder for entry in sys.path for folder in Path(entry).glob(f"{_PACKAGE}-*.dist-info")), None)
    if installed is None:  # run from its source
        return f"pip install '.{extras}' {_SOURCE}"
    try:
        source = json.loads((installed / "direct_url.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # jsondata would make `list` slow
        source = None
    match source:
        case {"url": str(), "dir_info": {**folder}}:
            return f"pip install {'-e ' if folder.get('editable') else ''}'.{extras}' {_SOURCE}"
        case {"url": str(url), "vcs_info": {"vcs": vcs, "commit_id": commit, **version}, **others}:
            revision = version.get("requested_revision") or commit
            return f"pip install '{requirement} @ {vcs}+{url}@{revision}{_subdirectory(others)}'"
        case {"url": str(url), "archive_info": {}} if url.startswith("file:"):
            from urllib.parse import unquote, urlsplit

            archive = PurePosixPath(unquote(urlsplit(url).path)).name
            return f"pip install './{archive}{extras}' in the folder of that file"
        case {"url": str(url), "archive_info": {}, **others}:
            return f"pip install '{requirement} @ {url}{_subdirectory(others)}'"
    return f"pip install '{requirement}'"


def _subdirectory(source: Mapping[object, object]) -> str:
    return f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
