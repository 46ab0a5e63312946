"""Whatever fails, and whenever a process is killed, the old result or none is left, never half of one."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from moetool.base import durable
from moetool.base.errors import UsageError
from tests.refusals import refused

OPERATIONS = ("open", "fsync", "mkdir", "rename", "replace")
"""System calls of durable, besides writing a file's bytes and removing files."""


class Faults:
    """Counts those operations and, at the one with number `at`, calls `fault` in place of it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int | None, fault: Callable[[], None]) -> None:
        self.count = 0
        self._at = at
        self._fault = fault
        patch.setattr(os, "fsync", lambda descriptor: None)  # slow, and no fault of ours cuts the power
        for name in OPERATIONS:
            patch.setattr(os, name, self._counted(getattr(os, name)))
        patch.setattr(Path, "write_text", lambda path, text, encoding: self._write_text(path, text, encoding))

    def _reached(self) -> bool:
        self.count += 1
        return self.count - 1 == self._at

    def _counted(self, operation: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            if self._reached():
                self._fault()
            return operation(*args, **kwargs)

        return call

    def _write_text(self, path: Path, text: str, encoding: str) -> int:
        half = self._reached()
        with path.open("w", encoding=encoding) as file:
            file.write(text[: len(text) // 2] if half else text)
        if half:
            self._fault()
        return len(text)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted() -> None:
    raise KeyboardInterrupt


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_file(out: Path) -> None:
    durable.write_text(out, "the new text")


def write_folder(out: Path) -> None:
    with durable.staged_directory(out, overwrite=True) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "a").write_text("the new text", encoding="utf-8")
        durable.write_text(folder / "b", "the new text")


def old_file(out: Path) -> None:
    out.write_text("the old text", encoding="utf-8")


def old_folder(out: Path) -> None:
    out.mkdir()
    (out / "a").write_text("the old text", encoding="utf-8")


def content(path: Path) -> object:
    """Everything at a path: None, a text, or a dictionary of names."""
    if path.is_dir():
        return {entry.name: content(entry) for entry in path.iterdir()}
    return path.read_text(encoding="utf-8") if path.exists() else None


CASES = [(write_file, None), (write_file, old_file), (write_folder, None), (write_folder, old_folder)]


def number_of_operations(tmp_path: Path, write: Callable, prepare: Callable | None) -> int:
    out = tmp_path / "counted"
    if prepare:
        prepare(out)
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, None, disk_full)
        write(out)
    return faults.count


@pytest.mark.parametrize(("write", "prepare"), CASES)
@pytest.mark.parametrize("fault", [disk_full, interrupted])
def test_a_fault_anywhere_leaves_the_old_result_or_all_of_the_new(
    tmp_path: Path, write: Callable, prepare: Callable | None, fault: Callable[[], None]
) -> None:
    operations = number_of_operations(tmp_path, write, prepare)
    new = content(tmp_path / "counted")
    assert operations >= 5
    for at in range(operations):
        out = tmp_path / str(at) / "out"
        out.parent.mkdir()
        if prepare:
            prepare(out)
        old = content(out)
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, at, fault)
            try:
                write(out)
                assert content(out) == new, at  # the fault was in removing what is not wanted
            except (OSError, KeyboardInterrupt):
                assert content(out) in (old, new), at
        litter = {entry.name for entry in out.parent.iterdir()} - {"out"}
        assert litter <= ({"out.old"} if content(out) == new else set()), at  # the next overwrite removes that


@pytest.mark.parametrize(("write", "prepare"), CASES)
def test_a_kill_anywhere_leaves_the_old_result_or_none_or_all_of_the_new(
    tmp_path: Path, write: Callable, prepare: Callable | None
) -> None:
    operations = number_of_operations(tmp_path, write, prepare)
    new = content(tmp_path / "counted")
    for at in range(operations):
        out = tmp_path / str(at) / "out"
        out.parent.mkdir()
        if prepare:
            prepare(out)
        old = content(out)
        child = os.fork()
        if child == 0:
            try:
                Faults(pytest.MonkeyPatch(), at, killed)
                write(out)
            finally:
                os._exit(0)  # the kill did not happen
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), at
        assert content(out) in (old, new, None), at
        if content(out) is None and old is not None:  # between the two renames; the next run puts it back
            assert content(out.with_name("out" + durable.OLD)) == old, at
        write(out)
        assert content(out.parent) == {"out": new}, at


def test_an_exception_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), durable.staged_directory(tmp_path / "out") as folder:
        (folder / "a").write_text("half")
        raise ZeroDivisionError
    assert content(tmp_path) == {}


def test_the_old_result_of_a_killed_overwrite_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old_folder(out.with_name("out" + durable.OLD))
    with pytest.raises(UsageError), durable.staged_directory(out):
        pass
    assert content(tmp_path) == {"out": {"a": "the old text"}}


def test_an_output_that_exists_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    old_folder(out)
    before = out.stat().st_mtime_ns
    with refused(UsageError, "--overwrite"), durable.staged_directory(out):
        raise AssertionError("the block must not run")
    assert content(tmp_path) == {"out": {"a": "the old text"}}
    assert out.stat().st_mtime_ns == before


def test_parents_are_made(tmp_path: Path) -> None:
    with durable.staged_directory(tmp_path / "a" / "b") as folder:
        (folder / "c").write_text("d")
    assert content(tmp_path) == {"a": {"b": {"c": "d"}}}


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert durable.sha256_file(tmp_path / "a").startswith("ba7816bf8f01cfea")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_file_system_without_files_is_named_before_the_work() -> None:
    with refused(UsageError, "/proc", "plan.json"):
        durable.require_new_file(Path("/proc/plan.json"))


def test_an_error_that_knows_no_name_is_given_the_output_s(tmp_path: Path) -> None:
    for staged in (durable.staged_file, durable.staged_directory):
        with pytest.raises(OSError, match="No space left") as caught, staged(tmp_path / "out"):
            disk_full()
        assert caught.value.filename == str(tmp_path / "out") and not (tmp_path / "out").exists()


def test_an_error_of_something_else_keeps_its_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^the model ends early$"), durable.staged_file(tmp_path / "made") as partial:
        partial.touch()
        raise OSError("the model ends early")
    assert not any(tmp_path.iterdir())
