"""The client of `moetool chat`, where a server or an address is not one of OpenAI's."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moetool.base.errors import MoetoolError, UsageError
from moetool.serving.chat import Conversation
from tests.refusals import refused

MODELS = {"data": [{"id": "m"}]}
HI = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'


@contextmanager
def _answering(models: object, stream: bytes = b"") -> Iterator[str]:
    """A server with these answers; its URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps(models).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(stream)

        def _send(self, content: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("models", [[1], {"data": 5}, {"data": [1]}, {"data": {"a": 1}}, {"models": []}, None])
def test_models_in_another_form(models: object) -> None:
    with _answering(models) as url, refused(MoetoolError, url, "OpenAI"):
        Conversation(url)


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (HI + b'data: {"choi', "ended in the middle"),
        (HI, "ended in the middle"),
        (HI + b'data: {"error":"boom"}\n\n', "ended the answer: boom"),
        (HI + b'data: {"error":{"message":"boom"}}\n\n', "ended the answer: boom"),
        (b'data: {"choices":[{"delta":null}]}\n\n', "OpenAI server"),
        (b'data: {"choices":[{"delta":{"content":5}}]}\n\n', "OpenAI server"),
        (b"data: [1]\n\n", "OpenAI server"),
        (b"<html>\n", "OpenAI server"),
    ],
)
def test_an_answer_in_another_form_or_broken_off(stream: bytes, says: str) -> None:
    with _answering(MODELS, stream) as url:
        conversation = Conversation(url)
        with refused(MoetoolError, says):
            list(conversation.ask("a"))
        assert not conversation.messages


def test_paths_are_quoted_and_ends_need_no_newline() -> None:
    with _answering(MODELS, HI + b"data: [DONE]") as url:
        assert list(Conversation(f"{url}/é").ask("a")) == ["hi"]


@pytest.mark.parametrize("url", ["http://a..b", "http://.example.com", f"http://{'a' * 70}.com"])
def test_hosts_that_none_can_have(url: str) -> None:
    with refused(UsageError, url, "address"):
        Conversation(url)


@pytest.mark.parametrize("key", ["ключ", "a\nb"])
def test_keys_that_no_header_carries(key: str) -> None:
    with refused(UsageError, "key") as caught:
        Conversation("http://127.0.0.1:1", key)
    assert key not in str(caught.value)
