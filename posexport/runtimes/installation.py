"""How to install what is missing, in a way that works: from wherever posexport itself was installed from.

pip records that place in `direct_url.json` (PEP 610): a folder, a version-control URL or an archive. It records nothing
for a package of an index.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import attrs

from posexport.jsondata import DataError, structure

_PACKAGE = "posexport"
_SOURCE = f"in {_PACKAGE}'s source folder"


@attrs.frozen
class _Folder:
    editable: bool = False


@attrs.frozen
class _VersionControl:
    vcs: str
    commit_id: str
    requested_revision: str | None = None


@attrs.frozen
class _DirectUrl:
    """The content of direct_url.json."""

    url: str
    dir_info: _Folder | None = None
    vcs_info: _VersionControl | None = None
    subdirectory: str | None = None


def install_command(requirement: str) -> str:
    """The command that installs a requirement such as "onnx" or "posexport[rtx]", and where to run it.

    It holds no path of this machine, since it becomes part of results.
    """
    name, bracket, extras = requirement.partition("[")
    if name != _PACKAGE:
        return f"pip install '{requirement}'"
    extras = bracket + extras
    try:
        text = metadata.distribution(_PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # run from its source
        return f"pip install '.{extras}' {_SOURCE}"
    source = None if text is None else _read(text)
    if source is None:
        return f"pip install '{requirement}'"
    if source.dir_info is not None:
        return f"pip install {'-e ' if source.dir_info.editable else ''}'.{extras}' {_SOURCE}"
    subdirectory = "" if source.subdirectory is None else f"#subdirectory={source.subdirectory}"
    if source.vcs_info is not None:
        revision = source.vcs_info.requested_revision or source.vcs_info.commit_id
        return f"pip install '{requirement} @ {source.vcs_info.vcs}+{source.url}@{revision}{subdirectory}'"
    if source.url.startswith("file:"):
        archive = PurePosixPath(unquote(urlsplit(source.url).path)).name
        return f"pip install './{archive}{extras}' in the folder of that file"
    return f"pip install '{requirement} @ {source.url}{subdirectory}'"


def _read(text: str) -> _DirectUrl | None:
    """None for a file that is not as PEP 610 says."""
    try:
        return structure(json.loads(text), _DirectUrl)
    except (ValueError, DataError, RecursionError):
        return None
