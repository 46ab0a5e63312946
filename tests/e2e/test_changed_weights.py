"""Weight files that change under a running server: old and new weights are never mixed."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moetool.errors import MismatchError
from moetool.models.checkpoint import Checkpoint
from moetool.models.shards import WeightsChanged
from moetool.runtime.assembly import ServeOptions, build_engine
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


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def copy_over(file: Path) -> None:
    """As `cp new.safetensors model.safetensors` does."""
    content = file.read_bytes()
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(scribble, "was written to after"), (cut, "bytes in place"), (copy_over, "was written to after")],
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
    with pytest.raises(MismatchError, match="was replaced while the model was being opened; try again"):
        checkpoint.open_shards()
    with Checkpoint.open(model) as again:
        again.open_shards()


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
