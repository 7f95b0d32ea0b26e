"""What a file with exact angles is compared with: the file that it was rewritten from, with exact angles too.

At far positions such a file computes another function on purpose, which is nearer to float64. Its manifest names its
source by sha256, and the attentions whose angles are exact. The source is rewritten again with these exact angles, and
every test of posexport.rewrite.angles must pass. So a manifest can't make any other change pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posexport.artifact.manifest import manifest_path
from posexport.files import TEXT_LIMIT, read_bytes
from posexport.jsondata import parse_json
from posexport.rewrite.angles.result import EXACT
from posexport.rewrite.process import exact_in_child
from posexport.runtimes.pool import Pool
from posexport.verify.graph.subject import GraphSubject, read_file, read_subject


def exact_source(
    subject: GraphSubject, source: GraphSubject, roles: Mapping[str, str], pool: Pool
) -> GraphSubject | None:
    """`source` with exact angles, if the manifest of `subject` says that it is `source` with exact angles; else None.

    RequestError if they can't be made exact.
    """
    record = _record(subject)
    if record.get("angles") != EXACT:
        return None
    origin = record.get("source")
    if not isinstance(origin, Mapping) or origin.get("sha256") != source.graph.sha256:
        return None
    if origin.get("external_data") != dict(source.graph.external_sha256):
        return None
    found = record.get("attentions")
    names = [str(one["name"]) for one in found if _is_exact(one)] if isinstance(found, list) else []
    if not names:
        return None
    seed = record.get("seed")
    folder = pool.folder / f"exact{len(list(pool.folder.glob('exact*')))}"
    folder.mkdir()
    path = exact_in_child(folder, source.path, names, roles, seed if isinstance(seed, int) else 0)
    return read_subject(read_file(path))


def _record(subject: GraphSubject) -> Mapping[str, Any]:
    """The record of the rewriting in the manifest beside a file; it was checked that the manifest is the file's own."""
    file = manifest_path(subject.path)
    data = parse_json(read_bytes(file, TEXT_LIMIT)) if file.is_file() else {}
    record = data.get("rewrite") if isinstance(data, Mapping) else None
    return record if isinstance(record, Mapping) else {}


def _is_exact(one: object) -> bool:
    angles = one.get("angles") if isinstance(one, Mapping) else None
    return isinstance(angles, Mapping) and angles.get("state") == EXACT and "name" in one  # type: ignore[operator]
