"""Authentication, request ids and access log: the outer layers of the server."""

import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetool.serving.http_errors import error_object

_LOG = logging.getLogger(__name__)
REQUEST_ID = "x-request-id"
_OPEN = {"/", "/health"}
"""Paths that need no key, for monitors and browsers."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class AccessRecord:
    """One request as a line of the access log: lengths of prompts and answers, but no text.

    Attributes:
        request_id: the client's `X-Request-Id`, or a generated one.
        client: the client's address.
        status: HTTP status of the response; 499 where the client left before it.
        seconds: time from the request's head to the end of its response.
        prompt_tokens: tokens of all prompts.
        reused_tokens: prompt tokens that were in the KV cache.
        generated_tokens: tokens of all choices.
        first_token_s: seconds to the first token of any choice.
        error: reason for a stream's early end.
    """

    request_id: str
    client: str
    method: str
    path: str
    status: int = 499
    seconds: float = 0.0
    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    generated_tokens: int | None = None
    first_token_s: float | None = None
    error: str | None = None

    def line(self) -> str:
        """Return one line of JSON, without unknown values."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"time": round(time.time(), 3), **known}, ensure_ascii=True)

    def lengths(self) -> str:
        """Lengths of prompts and answers, and a stream's error, after a comma each; empty if unknown."""
        known = (
            (self.prompt_tokens, "prompt tokens"),
            (self.reused_tokens or None, "of them cached"),
            (self.generated_tokens, "generated"),
        )
        parts = [f", {value} {name}" for value, name in known if value is not None]
        return "".join(parts) + ("" if self.error is None else f", error: {self.error}")


def record_of(scope: Scope) -> AccessRecord:
    """Return the record of a route's request."""
    return scope["moetool.record"]


class Access:
    """Middleware: numbers a request, and reports its record at the end.

    Args:
        report: called with a record after its response.
    """

    def __init__(self, app: ASGIApp, *, report: Callable[[AccessRecord], object]) -> None:
        self._app = app
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        client = scope.get("client")
        record = AccessRecord(
            request_id=given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}",
            client=client[0] if client else "",
            method=scope["method"],
            path=scope["path"],
        )
        scope["moetool.record"] = record
        began = time.perf_counter()

        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = headers["request-id"] = record.request_id  # as OpenAI and as Anthropic name it
            await send(message)

        try:
            await self._app(scope, receive, numbered)
        finally:
            record.seconds = round(time.perf_counter() - began, 6)
            self._report(record)
            _LOG.info(
                '%s "%s %s" %d %.3f s%s, %s',
                *(record.client, record.method, record.path, record.status, record.seconds),
                *(record.lengths(), record.request_id),
            )


class RequireKey:
    """Middleware: refuses requests without the key as `Authorization: Bearer KEY` or, as Anthropic's, `x-api-key`."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN or self._allows(sent_key(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        body: dict[str, Any] = error_object(
            "API key required; send it as 'Authorization: Bearer KEY'", 401, code="invalid_api_key", path=scope["path"]
        )
        await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _allows(self, key: str) -> bool:
        # Constant time, wherever the first wrong letter is.
        return bool(key) and hmac.compare_digest(key.encode(), self._key)


def sent_key(headers: Headers) -> str:
    """Return the API key in a request's headers; empty if none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
