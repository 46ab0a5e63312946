"""A server that is killed outright and started again, with what it had learned and without."""

import json
from pathlib import Path
from typing import Any

from moetool.trace.reader import Trace
from tests.server_process import quarter_of_experts, served
from tests.servers import connect, eventually, post

ASK: dict[str, Any] = {"model": "reference", "prompt": "The king said", "max_tokens": 12, "temperature": 0}


def _text(url: str) -> str:
    status, answer = post(url, "/v1/completions", ASK)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_a_killed_server_starts_again(tmp_path: Path) -> None:
    state, log = tmp_path / "state", tmp_path / "log"
    arguments = [*quarter_of_experts(), "--policy", "moe_infinity", "--set", f"state={state}", "--log", str(log)]
    with served(*arguments) as first:
        text = _text(first.url)
        assert first.stop() == 0
    learned = state.read_bytes()
    assert log.is_dir()

    arguments[-1] = str(tmp_path / "second")
    with served(*arguments) as second:
        connection = connect(second.url)
        body = json.dumps({**ASK, "max_tokens": 500, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        second.kill()
    assert state.read_bytes() == learned
    assert not Trace(tmp_path / "second").closed

    with served(*arguments) as third:  # where the killed one left a log that was not closed
        assert _text(third.url) == text
        assert third.stop() == 0
    assert Trace(tmp_path / "second").closed and not Trace(tmp_path / "second.1").closed
    eventually(lambda: not list(tmp_path.glob("*.partial")))

    state.unlink()
    with served(*arguments[:-2]) as fourth:
        assert _text(fourth.url) == text
