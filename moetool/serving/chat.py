"""The client behind `moetool chat URL`."""

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from moetool.errors import MoetoolError, UsageError

_TIMEOUT_S = 600.0
_MAX_TOKENS = 128
"""Default token limit of an answer without a chat template, which has no natural end."""


@dataclass
class Conversation:
    """A conversation with a model behind an OpenAI-compatible server.

    A server whose model has no chat template gets the plain text of the last turn as a prompt.

    Args:
        url: the server's URL, with or without `/v1`.
        api_key: the server's API key, if any.
        settings: additional fields of the requests, such as `temperature`.

    Attributes:
        messages: the conversation so far.
        usage: token counts of the last answer, if the server sent them.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{self.url!r} is not a server address; expected http://HOST:PORT")
        self._https, self._place = parts.scheme == "https", parts.netloc
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.model = self.first_model()
        self._by_prompt = False

    def ask(self, text: str) -> Iterator[str]:
        """Send a turn; yield the answer in pieces. Only a complete answer is kept in `messages`.

        Raises:
            Refused: the server refused this turn.
            MoetoolError: the server cannot be reached, or the answer breaks off.
        """
        turn = {"role": "user", "content": text}
        if not self._by_prompt:
            try:
                answer = yield from self._stream("/chat/completions", {"messages": [*self.messages, turn]})
            except ServerRefused as refused:
                if self.messages or "chat template" not in str(refused):
                    raise
                self._by_prompt = True
        if self._by_prompt:
            body = {"prompt": text, "max_tokens": self.settings.get("max_tokens", _MAX_TOKENS)}
            answer = yield from self._stream("/completions", body)
        self.messages += [turn, {"role": "assistant", "content": answer}]

    def _stream(self, path: str, body: dict[str, Any]) -> Generator[str, None, str]:
        """Send a request, yield the pieces of the answer, and return it whole."""
        options = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", path, {**options, **self.settings, **body}) as response:
            answer = ""
            for line in response:
                data = line.decode().strip().removeprefix("data:").strip()
                if not data:
                    continue
                if data == "[DONE]":
                    return answer
                event = json.loads(data)
                if "error" in event:
                    raise MoetoolError(f"the server ended the answer: {event['error'].get('message')}")
                self.usage = event.get("usage") or self.usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") if "delta" in choice else choice.get("text")
                    if piece:
                        answer += piece
                        yield piece
        raise MoetoolError("the server's answer ended in the middle")

    def first_model(self) -> str:
        """Return the name of the server's first model. Raises: MoetoolError: it serves none, or does not answer."""
        with self._request("GET", "/models") as response:
            found: Sequence[Any] = json.loads(response.read())["data"]
        if not found:
            raise MoetoolError(f"{self.url} serves no model")
        return str(found[0]["id"])

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection = kind(self._place, timeout=_TIMEOUT_S)
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerRefused(response.status, _reason(response))
            yield response
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise MoetoolError(f"no answer from {self.url}: {error or type(error).__name__}") from None
        finally:
            connection.close()


class ServerRefused(MoetoolError):
    """The server refused a request.

    Attributes:
        status: HTTP status of the answer.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the server refused ({status}): {reason}")
        self.status = status

    @property
    def is_recoverable(self) -> bool:
        """Whether another turn, or the same one later, may succeed."""
        return self.status in (400, 408, 413, 429, 503)


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read(4096).decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.strip().partition("\n")[0]
    return str(text)
