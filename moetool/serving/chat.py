"""The client behind `moetool chat URL`."""

import contextlib
import http.client
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from moetool.base.errors import MoetoolError, UsageError

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
        usage: token counts of the last answer, if the server sent them.
        num_dropped: messages dropped from `messages` so far, because the conversation outgrew the model's context.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    usage: Mapping[str, int] = field(default_factory=dict)
    num_dropped: int = 0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            host = (parts.hostname or "").encode("idna")
            is_address = parts.scheme in ("http", "https") and host and parts.port != 0
        except ValueError:  # no number in place of the port, half an IPv6 address, or an empty part of a name
            is_address = False
        if not is_address:
            raise UsageError(f"{self.url!r} is not a server address; expected http://HOST:PORT")
        if self.api_key and not (self.api_key.isprintable() and max(self.api_key) <= "\xff"):
            raise UsageError("the API key has characters that no HTTP header carries; expected printable Latin-1")
        self._https, self._place = parts.scheme == "https", parts.netloc
        self._base = quote(parts.path, safe="/%").rstrip("/").removesuffix("/v1") + "/v1"
        self.model = self.first_model()
        self._by_prompt = False

    def ask(self, text: str) -> Iterator[str]:
        """Send a turn; yield the answer in pieces. Only a complete answer is kept in `messages`.

        Drops the oldest turns of a conversation that outgrows the model's context.

        Raises:
            Refused: the server refused this turn.
            MoetoolError: the server cannot be reached, or the answer breaks off.
        """
        turn = {"role": "user", "content": text}
        answer, kept = None, list(self.messages)
        while answer is None and not self._by_prompt:
            try:
                answer = yield from self._stream("/chat/completions", {"messages": [*kept, turn]})
            except ServerRefused as refused:
                if kept and refused.code == "context_length_exceeded":
                    del kept[: max(2, len(kept) // 8 * 2)]  # a quarter: with less, the next turns are refused too
                elif self.messages or "chat template" not in str(refused):
                    raise
                else:
                    self._by_prompt = True
        if self._by_prompt:
            body = {"prompt": text, "max_tokens": self.settings.get("max_tokens", _MAX_TOKENS)}
            answer = yield from self._stream("/completions", body)
        self.num_dropped += len(self.messages) - len(kept)
        self.messages = [*kept, turn, {"role": "assistant", "content": answer or ""}]

    def _stream(self, path: str, body: dict[str, Any]) -> Generator[str, None, str]:
        """Send a request, yield the pieces of the answer, and return it whole."""
        options = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", path, {**options, **self.settings, **body}) as response:
            answer = ""
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if not data:
                    continue
                if data == b"[DONE]":
                    return answer
                if not line.endswith(b"\n") and answer:
                    break
                with self._reading():
                    event = json.loads(data)
                    if error := event.get("error"):
                        reason = error["message"] if isinstance(error, dict) else error
                        raise MoetoolError(f"the server ended the answer: {reason}")
                    self.usage = event.get("usage") or self.usage
                    piece = "".join(map(_piece, event["choices"]))
                if piece:
                    answer += piece
                    yield piece
        raise MoetoolError("the server's answer ended in the middle")

    def first_model(self) -> str:
        """Return the name of the server's first model. Raises: MoetoolError: it serves none, or does not answer."""
        with self._request("GET", "/models") as response:
            content = response.read()
        with self._reading():
            if models := json.loads(content)["data"]:
                return str(models[0]["id"])
        raise MoetoolError(f"{self.url} serves no model")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Say so if what is read is no answer of an OpenAI server."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError):
            raise MoetoolError(f"{self.url} answers otherwise than an OpenAI server; give the URL of one") from None

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
                raise ServerRefused(response.status, *_reason(response))
            yield response
        except ssl.SSLCertVerificationError as error:
            raise MoetoolError(
                f"the certificate of {self.url} is not trusted: {error.verify_message}; to trust it, set SSL_CERT_FILE "
                "to its PEM file"
            ) from None
        except http.client.IncompleteRead:
            raise MoetoolError("the server's answer ended in the middle") from None
        except (OSError, http.client.HTTPException) as error:
            closed = isinstance(error, http.client.RemoteDisconnected) and not self._https
            advice = "; if it serves HTTPS, write https://" if closed else ""
            if isinstance(error, ConnectionRefusedError):
                raise MoetoolError(
                    f"no server at {self.url}: start one with 'moetool serve MODEL', or give its URL"
                ) from None
            raise MoetoolError(f"no answer from {self.url}: {error or type(error).__name__}{advice}") from None
        finally:
            connection.close()


class ServerRefused(MoetoolError):
    """The server refused a request.

    Attributes:
        status: HTTP status of the answer.
        code: OpenAI's code of the error, if any.
    """

    def __init__(self, status: int, reason: str, code: str = "") -> None:
        super().__init__(f"the server refused ({status}): {reason}")
        self.status, self.code = status, code

    @property
    def is_recoverable(self) -> bool:
        """Whether another turn, or the same one later, may succeed."""
        return self.status in (400, 408, 413, 429, 503)


def _piece(choice: dict[str, Any]) -> str:
    """Text of an event's choice."""
    return (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""


def _reason(response: http.client.HTTPResponse) -> tuple[str, str]:
    """Message and code of a refusal."""
    text = response.read(4096).decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip().partition("\n")[0], ""
