"""The version of a trace's schema, and the upgrade of older traces.

A version is `major.minor`. A manifest with a major number alone has minor version 0.

- The minor version rises with an addition that has a default for older traces. Their manifest is upgraded in memory
  (`_ADDED`); the files on disk and the trace's sha256 stay unchanged.
- The major version rises when the rows change their meaning or layout. Traces of another major version are refused.
- A newer version than this program's, minor or major, is refused: its additions may matter.

    1.0  the first version
    1.1  `ahead` is always in the manifest; `weights` may be missing from `columns` (routes of engines that record only
         the experts)
    1.2  the column `resident`; its share of resident experts is always in the manifest
    1.3  the manifest says whether the trace is closed, and which requests were running after its last row; an open log
         has its requests in `requests-N.parquet`
    1.4  the columns `scores`, `logits32` and `norms`; requests have `label` and `pair`, empty in older traces;
         `vocabulary.parquet`, if `text` is kept
"""

import re
from pathlib import Path
from typing import Any

from moetool.base.errors import MismatchError

MAJOR, MINOR = 1, 4
SCHEMA_VERSION = f"{MAJOR}.{MINOR}"
_ADDED: tuple[dict[str, Any], ...] = ({"ahead": 0}, {"resident": 0.0}, {"closed": True, "running": []}, {})
"""Manifest entries added by each minor version from 1 on, with their values for older traces."""


def upgrade(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the manifest of a trace as this version writes it.

    Raises:
        MismatchError: the manifest is of another kind, an older major version or a newer version.
    """
    kind, found = manifest.get("kind"), manifest.get("schema_version")
    parts = re.fullmatch(r"(\d{1,6})(?:\.(\d{1,6}))?", str(found)) if not isinstance(found, bool) else None
    says = f"{path} holds {kind or 'something else'} of schema version {found}, expected a trace of version"
    if kind != "trace" or parts is None:
        advice = "give a trace directory, or capture again"
        if kind == "counts":
            advice = "counts have no tokens; they serve moetool advise, trace info, plan placement and compare"
        raise MismatchError(f"{says} {SCHEMA_VERSION}; {advice}")
    major, minor = int(parts[1]), int(parts[2] or 0)
    if (major, minor) > (MAJOR, MINOR):
        writer = manifest.get("moetool_version", "a newer version")
        raise MismatchError(
            f"{says} {SCHEMA_VERSION} or older; moetool {writer} wrote it: update with: pip install --upgrade moetool"
        )
    if major < MAJOR:
        raise MismatchError(f"{says} {MAJOR}.0 or newer; capture again with this version of moetool")
    for added in _ADDED[minor:]:
        manifest = {**added, **manifest}
    return {**manifest, "schema_version": SCHEMA_VERSION}
