"""The real engine behind the real server when something breaks: who is touched is told, the rest is served, rightly."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from moetool.base.errors import MismatchError, MoetoolError
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.tensor_index import read_index
from moetool.models.shards import Shards
from moetool.models.weight_index import index_weights
from moetool.runtime.assembly import build_engine
from moetool.runtime.loop import engine as engine_module
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.serving.server_options import ServerOptions
from moetool.trace.reader import Trace
from tests.refusals import refused
from tests.servers import connect, eventually, get, post, serving

ASK: dict[str, Any] = {"model": "m", "prompt": "The king said", "max_tokens": 8, "temperature": 0}
NO_SPACE = OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def model(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model that may be broken, and must be mended after."""
    return Path(shutil.copytree(reference, tmp_path_factory.mktemp("faults") / "m"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tuple[str, Any]]:
    """(URL, engine); a pool of few experts, so that every forward reads."""
    engine = build_engine(
        Checkpoint.open(str(model)), options=ServeOptions(kv_tokens=512), policy="lru", device_memory_bytes=10_000_000
    )
    assert engine.store.num_slots < 32
    engine.start()
    with serving(engine, options=ServerOptions(stuck_after_s=0.5)) as (url, _):
        yield url, engine


@pytest.fixture(scope="module")
def right(full: Any, tokenizer: Any) -> str:
    """The plain model's answer."""
    ids = tokenizer(ASK["prompt"], return_tensors="pt")
    with torch.inference_mode():
        tokens = full.model.generate(**ids, max_new_tokens=ASK["max_tokens"], do_sample=False)[0]
    return str(tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.fixture(autouse=True)
def _well_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every fault the same server answers, and rightly."""
    yield
    if "server" in request.fixturenames:
        url, _ = request.getfixturevalue("server")
        eventually(lambda: get(url, "/health")[0] == 200)
        status, body = post(url, "/v1/completions", ASK)
        assert (status, body["choices"][0]["text"]) == (200, request.getfixturevalue("right"))


def _is_told(url: str, words: str) -> None:
    """Whole, streamed and scored, a request is answered with an error and with no text."""
    status, answer = post(url, "/v1/completions", ASK)
    assert status == 500 and words in answer["error"]["message"], answer
    connection = connect(url)
    connection.request(
        "POST", "/v1/completions", json.dumps({**ASK, "stream": True}), {"Content-Type": "application/json"}
    )
    text = connection.getresponse().read().decode()
    assert words in text and "[DONE]" not in text and '"text"' not in text
    status, answer = post(url, "/v1/completions", {**ASK, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert status == 500 and words in answer["error"]["message"], answer


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cut", [4096 * 50, 4096 * 50 + 1, 4096 * 50 + 512, 4096 * 51 - 1])
def test_a_read_beyond_the_end_of_a_shard_ends(tmp_path: Path, direct: bool, cut: int) -> None:
    """Inside a block, which O_DIRECT reads to its end and then again, and at its end."""
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(cut - 1000, np.uint8)}, file)
    header = file.stat().st_size - (cut - 1000)
    safetensors.numpy.save_file({"a": np.zeros(cut - header, np.uint8)}, file)
    assert file.stat().st_size == cut
    shards = Shards(index_weights(read_index(tmp_path), None), direct)
    assert len(shards.read(0, cut - 5000, 5000)) == 5000
    for offset, num_bytes in ((cut - 5000, 5001), (cut - 1, 9000), (cut, 1), (cut + 100_000, 10)):
        with pytest.raises(OSError, match=f"expected {offset + num_bytes:,}"):
            shards.read(0, offset, num_bytes)
    shards.close()


def test_reads_that_fail_twice(server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, engine = server

    def read(*args: Any) -> Any:
        raise OSError(5, "Input/output error")

    failures = engine.metrics()["failures"]
    with monkeypatch.context() as patch:
        patch.setattr(engine.store.files.shards, "read", read)
        _is_told(url, "cannot read expert")
    assert engine.metrics()["failures"] == failures + 3


def test_a_read_that_hangs(server: tuple[str, Any], right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, engine = server
    real, go_on = engine.store.files.shards.read, threading.Event()

    def read(*args: Any) -> Any:
        go_on.wait(30)
        return real(*args)

    answers: list[tuple[int, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr(engine.store.files.shards, "read", read)
        asking = threading.Thread(target=lambda: answers.append(post(url, "/v1/completions", ASK)))
        asking.start()
        try:
            eventually(lambda: json.loads(get(url, "/health")[2])["status"] == "stuck")
            status, body = post(url, "/v1/completions", ASK)
            assert status == 503 and "forward has been running" in body["error"]["message"]
        finally:
            go_on.set()
            asking.join(30)
    status, body = answers[0]
    assert (status, body["choices"][0]["text"]) == (200, right)


def test_scores_that_are_no_numbers_leave_nothing_behind(server: tuple[str, Any]) -> None:
    """Poisoned from the second layer on: the keys and values that the layers after it keep are no numbers either."""
    url, engine = server
    layer = engine.batcher.model.model.layers[1]

    def poison(module: Any, args: Any, output: Any) -> Any:
        return output * float("nan")

    hook = layer.register_forward_hook(poison)
    try:
        _is_told(url, "not finite (NaN or infinity)")
    finally:
        hook.remove()


def test_a_device_that_is_full(server: tuple[str, Any]) -> None:
    url, engine = server

    def full(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = engine.batcher.model.model.layers[3].register_forward_pre_hook(full)
    try:
        _is_told(url, "out of memory")
    finally:
        hook.remove()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_access_log_and_not_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    from tests.scripted_engine import ScriptedEngine

    with serving(ScriptedEngine(), options=ServerOptions(access_log="/dev/full")) as (url, _):
        for _ in range(3):
            assert post(url, "/v1/completions", {**ASK, "model": "reference"})[0] == 200
        assert capfd.readouterr().err == "moetool: access log stopped: No space left on device\n"


def test_a_policy_that_fails_after_a_forward_leaves_no_row_of_it_in_the_gate_log(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(
        Checkpoint.open("reference"),
        options=ServeOptions(kv_tokens=512),
        policy="lru",
        device_memory_bytes=10_000_000,
        log=tmp_path / "log",
    )
    engine.state = "ready"
    prompt = tokenizer(ASK["prompt"])["input_ids"]
    engine.submit(prompt, SamplingParams(max_tokens=8), lambda output: None)
    for _ in range(3):
        engine.step()

    def fails(info: Any) -> None:
        raise ValueError("a bug in the policy")

    with monkeypatch.context() as patch, refused(ValueError, "bug", "policy"):
        patch.setattr(engine.residency.policy, "end_forward", fails)
        engine.step()
    assert engine.metrics()["forwards"] == 4
    engine.close()
    trace = Trace(tmp_path / "log")
    assert trace.num_tokens == len(prompt) + 2 and trace.manifest["provenance"]["failed_forwards"] == 1


# -- what is learned --------------------------------------------------------------------------------------------


def _learning(state: Path, log: Path | None = None) -> Any:
    return build_engine(
        Checkpoint.open("reference"),
        options=ServeOptions(kv_tokens=512, state=str(state)),
        policy="finemoe",
        device_memory_bytes=20_000_000,
        log=log,
    )


def _answer(engine: Any, prompt: list[int]) -> list[int]:
    outputs: list[Output] = []
    engine.submit(prompt, SamplingParams(max_tokens=8), outputs.append)
    while not engine.idle:
        engine.step()
    assert outputs[-1].finish == "length", outputs
    return [output.token for output in outputs if output.token is not None]


def test_what_was_learned_outlives_a_full_disk_and_a_kill(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, prompt = tmp_path / "state", tokenizer(ASK["prompt"])["input_ids"]
    first = _learning(state)
    first.state = "ready"
    tokens = _answer(first, prompt)
    first.close()
    learned = state.read_bytes()

    def full(*args: Any) -> None:
        raise NO_SPACE

    second = _learning(state)
    second.state = "ready"
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", full)
        patch.setattr(engine_module, "SAVE_SECONDS", 0.0)
        assert _answer(second, prompt) == tokens
        with refused(MoetoolError, "finemoe"):
            second.close()
    assert state.read_bytes() == learned

    # What a killed server leaves: half a file beside the whole one.
    (tmp_path / "state.partial").write_bytes(learned[:100])
    third = _learning(state, tmp_path / "log")
    third.state = "ready"
    assert _answer(third, prompt) == tokens
    third.close()
    assert {path.name for path in tmp_path.iterdir()} >= {"state", "log"}
    assert not list(tmp_path.glob("*.partial"))

    state.write_bytes(learned[:-10])
    with refused(MismatchError, "remove", "start", "learned"):
        _learning(state)
