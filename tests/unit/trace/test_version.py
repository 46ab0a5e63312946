"""Older traces are read, newer ones refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetool.base import durable
from moetool.base.errors import MismatchError
from moetool.trace.reader import Trace
from moetool.trace.version import MINOR, SCHEMA_VERSION, upgrade
from tests import traces

LENGTHS = [(2, 2)]


def test_a_trace_of_before_minor_versions_is_read_as_it_lies_there(tmp_path: Path) -> None:
    made = traces.write(tmp_path / "t", traces.alone(LENGTHS), LENGTHS, keep=("topk",))
    # as moetool wrote it in version 1: a whole number, and `ahead` only where that column was kept
    old = {
        "kind": "trace",
        "schema_version": 1,
        "moetool_version": "0.1.0",
        "spec": made.spec.to_json(),
        "columns": ["request", "forward", "phase", "iteration", "position", "token_id", "experts", "weights"],
        "composition": {"kind": "sequential"},
        "requests": 1,
        "tokens": 3,
        "provenance": {"model": "tiny"},
        "files": {
            str(file.relative_to(made.path)): {"bytes": file.stat().st_size, "sha256": durable.sha256_file(file)}
            for file in sorted(made.path.rglob("*.parquet"))
        },
    }
    text = json.dumps(old)
    (made.path / "manifest.json").write_text(text)
    trace = Trace(made.path)
    trace.verify()
    assert (trace.manifest["schema_version"], trace.ahead, trace.resident, trace.num_tokens) == (
        SCHEMA_VERSION,
        0,
        0,
        3,
    )
    assert sum(map(len, trace.batches(["weights"]))) == 3
    assert (made.path / "manifest.json").read_text() == text  # read, not rewritten


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (2, r"of schema version 2, expected .* 1\.\d or older; moetool 9\.9 wrote it: update with: pip install --upgr"),
        ("2.0", "pip install --upgrade moetool"),
        (f"1.{MINOR + 1}", "pip install --upgrade moetool"),
        (0, "expected a trace of version 1.0 or newer; capture again"),
        ("0.9", "capture again"),
        (None, "schema version None"),
        (True, "schema version True"),
        ("1.x", "schema version 1.x"),
        (1.5e300, "schema version"),
    ],
)
def test_other_versions_are_refused_with_what_to_do(version: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        upgrade({"kind": "trace", "schema_version": version, "moetool_version": "9.9"}, Path("t"))


def test_the_present_version_stays_as_it_is() -> None:
    manifest = {"kind": "trace", "schema_version": SCHEMA_VERSION, "ahead": 2, "resident": 0.5}
    assert upgrade(manifest, Path("t")) == manifest


def test_counts_are_told_what_they_serve(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="plan placement") as caught:
        upgrade({"kind": "counts", "schema_version": 1}, tmp_path)
    assert "capture" not in str(caught.value)
    with pytest.raises(MismatchError, match="capture again"):
        upgrade({"kind": "plan", "schema_version": 1}, tmp_path)
