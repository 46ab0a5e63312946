"""Spoilt files of every kind that moetool reads: each is read, or refused in one line, soon and in little memory.

What once failed lies in `corpus/artefacts`, one case a file, and is read again by every `make test`.
"""

import base64
import contextlib
import hashlib
import itertools
import json
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from moetool.base import durable
from moetool.base.errors import MoetoolError
from tests.fuzz.file_kinds import TARGETS, Files, Target

CORPUS = Path(__file__).parent / "corpus" / "artefacts"
SECONDS = 20
PATIENCE = 6
"""Times as long on the clock, on a machine that does other work."""
MEMORY_BYTES = 2**30


class TooLong(BaseException):
    """A reading took longer than it may. No Exception, so that nobody takes it for a damaged file."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let a block run for `SECONDS` of processor time and take `MEMORY_BYTES` more address space than now."""

    began = time.process_time(), time.monotonic()

    def late(number: int, frame: FrameType | None) -> None:
        used_s, passed_s = time.process_time() - began[0], time.monotonic() - began[1]
        if used_s >= SECONDS or passed_s >= PATIENCE * SECONDS:
            raise TooLong(f"{used_s:.0f} s of processor time in {passed_s:.0f} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def wrong_with(target: Target, files: Files) -> str | None:
    """Describe a fault in reading these files; None if they are read, or refused in one line."""
    folder = Path(tempfile.mkdtemp(prefix="moetool-fuzz-"))
    try:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        try:
            with bounded():
                target.read(folder)
        except MoetoolError as error:
            said = str(error).strip()
            if not said or "\n" in said or len(said) > 1000:
                return f"a message of {len(said)} characters and {said.count(chr(10)) + 1} lines: {said[:200]!r}"
        except (Exception, TooLong) as error:
            last = traceback.extract_tb(error.__traceback__)[-3:]
            where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
            return f"{type(error).__name__}: {str(error)[:200]} ({where})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def keep(name: str, files: Files) -> Path:
    """Add a case to the corpus."""
    text = json.dumps({file: base64.b64encode(data).decode() for file, data in files.items()}, indent=0)
    path = CORPUS / name / f"found-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_text(path, text + "\n")
    return path


def look_for(name: str, *, seed: int, examples: int = 10**6, deadline: float = float("inf")) -> int:
    """Read corrupted files of a kind; gives how many.

    Effects: the smallest case that is found goes to the corpus.

    Raises:
        AssertionError: one of them was neither read nor refused in one line.
    """
    target, tried = TARGETS[name], 0
    found: list[Files] = []

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(target.cases())
    def read(files: Files) -> None:
        nonlocal tried
        if time.monotonic() > deadline and not found:
            return
        tried += 1
        if wrong := wrong_with(target, files):
            found.append(files)
            raise AssertionError(f"{name}: {wrong}")

    try:
        read()
    except AssertionError as error:
        raise AssertionError(f"{error}; kept in {keep(name, found[-1])}") from None
    return tried


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_corpus(path: Path) -> None:
    files = {name: base64.b64decode(data) for name, data in json.loads(path.read_text()).items()}
    assert wrong_with(TARGETS[path.parent.name], files) is None


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_corrupted_files(name: str) -> None:
    look_for(name, seed=0, examples=TARGETS[name].examples)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_corrupted_files(name: str, fuzz_seconds: float, fuzz_seed: int) -> None:
    deadline, tried = time.monotonic() + fuzz_seconds, 0
    for seed in itertools.count(fuzz_seed):
        tried += look_for(name, seed=seed, examples=500, deadline=deadline)
        if time.monotonic() > deadline:
            break
    print(f"{tried} corrupted files of {name}")
