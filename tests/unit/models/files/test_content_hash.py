"""The full identity of a checkpoint: each byte counts, no file is read twice, and clusters ask for it."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from moetool.base.errors import MismatchError
from moetool.cluster.edge.worker import Worker, WorkerSettings
from moetool.models.checkpoint import Checkpoint
from moetool.models.files import content_hash
from moetool.models.files.content_hash import content_hashes, differing_file
from tests.identities import NOBODY

FILE = "model.safetensors"


@pytest.fixture
def twin(reference: Path, tmp_path: Path) -> Path:
    """The embedded model with one byte turned that its revision does not sample."""
    folder = Path(shutil.copytree(reference, tmp_path / "m"))
    with Checkpoint.open(folder) as checkpoint:
        tensor = max(checkpoint.index.tensors.values(), key=lambda tensor: tensor.num_bytes)
    with (folder / FILE).open("r+b") as stream:
        stream.seek(tensor.offset + tensor.num_bytes // 4)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    return folder


def test_one_byte_between_the_samples_is_another_checkpoint(reference: Path, twin: Path) -> None:
    one, other = Checkpoint.open(reference), Checkpoint.open(twin)
    assert one.revision == other.revision  # sampled
    assert differing_file(one.content, other.content) == FILE
    assert differing_file(one.content, Checkpoint.open(reference).content) is None
    assert one.content["config.json"] == other.content["config.json"]
    assert differing_file(one.content, {**one.content, "more.safetensors": ""}) == "more.safetensors"


def test_a_server_of_a_cluster_with_another_byte_is_refused(reference: Path, twin: Path) -> None:
    head = Checkpoint.open(reference)
    settings = WorkerSettings(
        server=3,
        model=str(twin),
        revision=head.revision,
        content=head.content,
        held=(),
        capacity=2,
        identity=NOBODY,
        distance=(),
    )
    with pytest.raises(MismatchError) as caught:
        Worker(settings)
    assert f"on the machine of server 3 has another {FILE} than the head" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Hashes of all files are kept; gives those that were computed."""
    computed: list[Path] = []
    real = content_hash.durable.sha256_file

    def sha256_file(file: Path) -> str:
        computed.append(file)
        return real(file)

    monkeypatch.setattr(content_hash, "KEPT_BYTES", 1)
    monkeypatch.setattr(content_hash.durable, "sha256_file", sha256_file)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return computed


def test_a_hash_is_kept_until_the_file_is_written_to(tmp_path: Path, kept: list[Path]) -> None:
    file = tmp_path / FILE
    file.write_bytes(b"abc")
    expected = {FILE: hashlib.sha256(b"abc").hexdigest()}
    assert content_hashes([file], tmp_path) == content_hashes([file], tmp_path) == expected and kept == [file]
    before = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"abd")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and tar set it back
    assert content_hashes([file], tmp_path) == {FILE: hashlib.sha256(b"abd").hexdigest()} and len(kept) == 2
    for damaged in (tmp_path / "cache").rglob("*"):
        if damaged.is_file():
            damaged.write_text("{")
    assert content_hashes([file], tmp_path) == {FILE: hashlib.sha256(b"abd").hexdigest()} and len(kept) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, kept: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / FILE).write_bytes(b"abc")
    for _ in range(2):
        assert content_hashes([tmp_path / FILE], tmp_path) == {FILE: hashlib.sha256(b"abc").hexdigest()}
    assert len(kept) == 2


def test_a_blob_of_the_hub_is_hashed_whatever_its_name_says(tmp_path: Path, kept: list[Path]) -> None:
    blob = tmp_path / "blobs" / hashlib.sha256(b"abc").hexdigest()
    file = tmp_path / "snapshots" / "commit" / FILE
    for folder in (blob.parent, file.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(b"abd")
    file.symlink_to(blob)
    expected = {FILE: hashlib.sha256(b"abd").hexdigest()}
    assert content_hashes([file], file.parent) == content_hashes([file], file.parent) == expected and kept == [file]


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path, kept: list[Path]) -> None:
    files = [tmp_path / "m" / folder / FILE for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text(file.parent.name)
    hashes = {f"{name}/{FILE}": hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b")}
    assert content_hashes(files, tmp_path / "m") == hashes
