"""How to install what is missing, in a way that works: from wherever posexport itself was installed from.

pip records that place in `direct_url.json` (PEP 610): a folder, a version-control URL or an archive. It records nothing
for a package of an index.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePosixPath
from typing import Any

_PACKAGE = "posexport"
_SOURCE = f"in {_PACKAGE}'s source folder"


def install_command(requirement: str) -> str:
    """The command that installs a requirement such as "onnx" or "posexport[rtx]", and where to run it.

    It holds no path of this machine, since it becomes part of results.
    """
    name, bracket, extras = requirement.partition("[")
    if name != _PACKAGE:
        return f"pip install '{requirement}'"
    extras = bracket + extras
    # importlib.metadata would make `list` slow
    installed = next((folder for entry in sys.path for folder in Path(entry).glob(f"{_PACKAGE}-*.dist-info")), None)
    if installed is None:  # run from its source
        return f"pip install '.{extras}' {_SOURCE}"
    source = _read(installed / "direct_url.json")
    if source is None:
        return f"pip install '{requirement}'"
    url, folder, version = source["url"], source.get("dir_info"), source.get("vcs_info")
    if folder is not None:
        return f"pip install {'-e ' if folder.get('editable') else ''}'.{extras}' {_SOURCE}"
    subdirectory = f"#subdirectory={source['subdirectory']}" if "subdirectory" in source else ""
    if version is not None:
        revision = version.get("requested_revision") or version["commit_id"]
        return f"pip install '{requirement} @ {version['vcs']}+{url}@{revision}{subdirectory}'"
    if url.startswith("file:"):
        from urllib.parse import unquote, urlsplit

        archive = PurePosixPath(unquote(urlsplit(url).path)).name
        return f"pip install './{archive}{extras}' in the folder of that file"
    return f"pip install '{requirement} @ {url}{subdirectory}'"


def _read(path: Path) -> dict[str, Any] | None:
    """The content of direct_url.json; None where it is missing or not as PEP 610 says. jsondata would make `list`
    slow."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("url"), str):
        return None
    version = data.get("vcs_info", {"vcs": "", "commit_id": ""})
    tables = (data.get("dir_info", {}), data.get("archive_info", {}), version)
    sound = all(isinstance(table, dict) for table in tables) and {"vcs", "commit_id"} <= set(version)
    return data if sound else None
