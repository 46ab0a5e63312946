"""Weight files that change under a running server: old and new weights are never mixed."""

import gc
import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import MismatchError
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.file_changes import WriteReports
from moetool.models.shards import WeightsChanged
from moetool.runtime.assembly import build_engine
from moetool.runtime.serve_options import ServeOptions
from tests.refusals import refused
from tests.servers import connect, eventually, get, post, serving

ASK: dict[str, Any] = {"model": "m", "prompt": "The king said", "max_tokens": 8, "temperature": 0}
FILE = "model.safetensors"


@pytest.fixture
def model(reference: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference, tmp_path / "m"))


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The URL of a server that reads experts in every forward."""
    checkpoint = Checkpoint.open(model)
    engine = build_engine(checkpoint, options=ServeOptions(kv_tokens=512), policy="lru", device_memory_bytes=10_000_000)
    engine.model_name = "m"
    engine.start()
    with serving(engine) as (url, _):
        yield url


def ask(url: str) -> str:
    status, answer = post(url, "/v1/completions", ASK)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def scribble(file: Path) -> None:
    """Other weights of the same size, in place: the last byte of a weight is turned."""
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([byte ^ 0x40]))


def scribble_back(file: Path) -> None:
    """As `scribble`, and the time of modification is set back, as some tools of copying do."""
    with time_kept(file):
        scribble(file)


@contextmanager
def time_kept(file: Path) -> Iterator[None]:
    before = file.stat()
    yield
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def copy_over(file: Path) -> None:
    """As `cp new.safetensors model.safetensors` does."""
    content = file.read_bytes()
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scribble, "was written to after"),
        (scribble_back, "was written to after"),
        (cut, "bytes in place"),
        (copy_over, "was written to after"),
    ],
)
def test_a_server_whose_weights_are_written_to_stops_and_says_why(model: Path, change: Any, reason: str) -> None:
    with served(model) as url:
        text = ask(url)
        assert ask(url) == text
        change(model / FILE)
        status, answer = post(url, "/v1/completions", ASK)
        assert status == 500 and FILE in answer["error"]["message"] and reason in answer["error"]["message"], answer
        eventually(lambda: get(url, "/health")[0] == 503)
        health = json.loads(get(url, "/health")[2])
        assert health["status"] == "failed" and reason in health["problems"][0], health
        assert str(model) not in str(health)
        for _ in range(2):  # and it stays so
            status, answer = post(url, "/v1/completions", ASK)
            assert status == 503 and reason in answer["error"]["message"], answer
        connection = connect(url)
        connection.request(
            "POST", "/v1/completions", json.dumps({**ASK, "stream": True}), {"Content-Type": "application/json"}
        )
        assert connection.getresponse().status == 503


def test_a_server_whose_weights_are_replaced_goes_on_with_the_old_ones(model: Path) -> None:
    with served(model) as url:
        text = ask(url)
        other = model / "new"
        other.write_bytes(bytes(1000))
        other.replace(model / FILE)
        assert [ask(url) for _ in range(3)] == [text] * 3
        (model / FILE).unlink()
        assert ask(url) == text
        assert json.loads(get(url, "/health")[2]) == {"status": "ok", "model": "m"}


def test_weights_that_are_touched_only_in_their_rights_and_names_are_the_same(model: Path) -> None:
    with served(model) as url:
        text = ask(url)
        (model / FILE).chmod(0o400)
        os.link(model / FILE, model / "again")
        (model / FILE).rename(model / "moved")
        assert ask(url) == text


def test_weights_that_are_replaced_between_their_header_and_their_opening_are_refused(model: Path) -> None:
    checkpoint = Checkpoint.open(model)
    assert checkpoint.index.tensors
    shutil.copy(model / FILE, model / "new")
    (model / "new").replace(model / FILE)
    with refused(MismatchError, "replaced", "model", "being"):
        checkpoint.open_shards()
    with Checkpoint.open(model) as again:
        again.open_shards()


def ranges(checkpoint: Checkpoint) -> list[tuple[int, int, int]]:
    """File, offset and bytes of every tensor, in the order of the file."""
    return sorted((tensor.file, tensor.offset, tensor.num_bytes) for tensor in checkpoint.index.tensors.values())


def write_through_a_map(file: Path, offset: int) -> None:
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        memory[offset] ^= 0x40
        memory.flush()


def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system whose watches are used up."""

    def refuse(*args: Any) -> None:
        raise OSError("no more watched files")

    monkeypatch.setattr(WriteReports, "watch", refuse)


def test_a_write_to_a_part_that_was_not_read_is_found_at_the_next_read(model: Path) -> None:
    with Checkpoint.open(model) as checkpoint:
        shards, (first, *_) = checkpoint.open_shards(), ranges(checkpoint)
        shards.read(*first)
        scribble_back(model / FILE)
        with pytest.raises(WeightsChanged, match="set back"):
            shards.read(*first)


@pytest.mark.parametrize("reported", [True, False])
def test_a_part_that_was_read_before_is_compared(model: Path, reported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write through a memory map is not reported."""
    if not reported:
        unreported(monkeypatch)
    with Checkpoint.open(model) as checkpoint:
        shards, (first, second, third, *_) = checkpoint.open_shards(), ranges(checkpoint)
        same, _ = bytes(shards.read(*first)), shards.read(*second)
        with time_kept(model / FILE):
            write_through_a_map(model / FILE, second[1])
        assert bytes(shards.read(*first)) == same
        if not reported:
            with refused(WeightsChanged, "written"):
                shards.read(*third)
            shards.changed = ""
        with pytest.raises(WeightsChanged, match=f"{FILE} was written to after .* at {second[1]:,}"):
            shards.read(*second)
        with pytest.raises(WeightsChanged):
            shards.read(*first)


def test_permissions_links_and_names_change_no_part(model: Path, logged: list[str]) -> None:
    with Checkpoint.open(model) as checkpoint:
        shards, parts = checkpoint.open_shards(), ranges(checkpoint)
        content = (model / FILE).read_bytes()

        def require_same() -> None:
            for file, offset, length in parts:
                assert bytes(shards.read(file, offset, length)) == content[offset : offset + length]

        shards.read(*parts[0])
        (model / FILE).chmod(0o400)
        require_same()
        os.link(model / FILE, model / "again")
        require_same()
        (model / "new").write_bytes(bytes(1000))
        (model / "new").replace(model / FILE)
        require_same()
        assert len([line for line in logged if FILE in line and "stay in use" in line]) == 3


def test_shards_that_nobody_closes_leave_no_descriptor(model: Path) -> None:
    """The system has 128 queues of reports for all processes of a user."""
    Checkpoint.open(model).open_shards()
    gc.collect()
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for _ in range(3):
        checkpoint = Checkpoint.open(model)
        shards = checkpoint.open_shards()
        shards.read(*ranges(checkpoint)[0])
        del checkpoint, shards
    gc.collect()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


@pytest.mark.parametrize("direct", [True, False])
def test_looking_at_the_file_costs_a_read_next_to_nothing(model: Path, direct: bool) -> None:
    """At every read, and no clock is asked: the time is printed, the count of looks is what is tested."""
    with Checkpoint(model, direct=direct) as checkpoint:
        shards = checkpoint.open_shards()
        tensor = max(checkpoint.index.tensors.values(), key=lambda tensor: tensor.num_bytes)
        began = time.perf_counter()
        for _ in range(200):
            shards.read(tensor.file, tensor.offset, 150_000)
        read_s = (time.perf_counter() - began) / 200
        descriptor = os.open(model / FILE, os.O_RDONLY)
        began = time.perf_counter()
        for _ in range(2000):
            os.fstat(descriptor)
        look_s = (time.perf_counter() - began) / 2000
        os.close(descriptor)
        print(f"\na read of 150 kB takes {read_s * 1e6:.1f} µs, looking at its file {look_s * 1e6:.2f} µs")
        scribble(model / FILE)
        with pytest.raises(WeightsChanged):
            shards.read(tensor.file, tensor.offset, 1)
        assert shards.changed
