"""Errors in the form of a path's protocol: a status, and the body of OpenAI's or Anthropic's errors."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetool.base.errors import CapacityError, MoetoolError, UsageError, shortened
from moetool.runtime.request import Unavailable
from moetool.serving.json_stream import as_unicode

MAX_SKIPPED_BYTES = 64 * 2**20
"""Bytes of an oversized body to read, so that its sender reads the answer."""

_MAX_BODIES = 16
"""Number of largest bodies held at a time."""

_FASTAPI_WORDS = "There was an error parsing the body"


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    505: "invalid_request_error",
}
"""OpenAI's type of an error, where its status alone would name another."""

_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The same for Anthropic."""

CONTEXT_EXCEEDED = "context_length_exceeded"
"""Code of a prompt that does not fit."""
INTERNAL = "internal error; see the server's log"


_RESPONSES_FIELDS = {"messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens"}
"""Fields of /v1/responses by those of the chat request that it means."""
_CHAT_FIELD = re.compile(rf"\b(?:{'|'.join(_RESPONSES_FIELDS)})\b")


def _in_responses(words: str) -> str:
    return _CHAT_FIELD.sub(lambda name: _RESPONSES_FIELDS[name[0]], words)


class Refusal(UsageError):
    """A request that this server refuses, with the field that is the reason."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class Overloaded(Unavailable):
    """Too many requests are waiting; a retry may succeed."""


def error_object(
    message: str, status: int, param: str | None = None, code: str | None = None, *, path: str = ""
) -> dict[str, Any]:
    """Return the body of an error to a request for this path."""
    message, param = as_unicode(message), None if param is None else as_unicode(param)
    if path.startswith("/v1/messages"):
        kind = _MESSAGES_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        # Clients of Anthropic know this error, which has no code, by these words.
        message = f"prompt is too long: {message}" if code == CONTEXT_EXCEEDED else message
        return {"type": "error", "error": {"type": kind, "message": message}}
    if path.startswith("/v1/responses") and param in _RESPONSES_FIELDS:
        fault, colon, reason = message.partition(":")  # a reason may quote the client
        advised = f"; shorten the {param}"
        if reason.endswith(advised):
            reason = reason.removesuffix(advised) + _in_responses(advised)
        message, param = f"{_in_responses(fault)}{colon}{reason}", _in_responses(param)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: MoetoolError, path: str = "") -> tuple[int, dict[str, Any]]:
    """Return status and body for an error of moetool."""
    if isinstance(error, Refusal):
        return error.status, error_object(str(error), error.status, error.param, error.code, path=path)
    if isinstance(error, Overloaded):
        return 429, error_object(str(error), 429, code="queue_full", path=path)
    if isinstance(error, Unavailable):
        return 503, error_object(str(error), 503, code="unavailable", path=path)
    status = 400 if isinstance(error, UsageError | CapacityError) else 500
    return status, error_object(str(error), status, path=path)


_MOST_FIELDS = 8
"""Most wrong fields that an error names."""


def install(app: FastAPI) -> None:
    """Answer every error of `app` in these forms."""

    @app.exception_handler(MoetoolError)
    async def _ours(request: Request, error: MoetoolError) -> JSONResponse:
        status, body = describe(error, request.url.path)
        headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, Unavailable) else None
        return JSONResponse(body, status, headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        by_field: dict[str | None, str] = {}  # the first error of each: a union has one for each of its types
        for fault in error.errors():
            message, param = _explain(fault, error.body)
            by_field.setdefault(param, message)
        messages, first = list(by_field.values()), next(iter(by_field))
        if len(messages) > _MOST_FIELDS:
            messages[_MOST_FIELDS:] = [f"and {len(messages) - _MOST_FIELDS} more"]
        return JSONResponse(error_object("; ".join(messages), 400, first, path=request.url.path), 400)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message, code = str(error.detail), None
        if message == _FASTAPI_WORDS:
            message = "the body cannot be read: it is not JSON in UTF-8, or nested too deeply, or has numbers too long"
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
            if request.url.path.startswith("/v1/"):
                message += "; this server has /v1/models, /v1/completions for a 'prompt', /v1/chat/completions and "
                message += "/v1/messages for 'messages', and /v1/responses for 'input'"
                code = "unknown_url" if error.status_code == 404 else None
        body = error_object(message, error.status_code, code=code, path=request.url.path)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _bug(request: Request, error: Exception) -> JSONResponse:
        # The traceback goes to the server's log, not to the client.
        return JSONResponse(error_object(INTERNAL, 500, path=request.url.path), 500)


def _explain(error: Any, body: Any) -> tuple[str, str | None]:
    """Return one line and the field's name for one of pydantic's errors."""
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}", None
    path = error["loc"][1:]
    if not path and error["type"] in ("missing", "model_attributes_type"):
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "union_tag_invalid":  # a part of a message, told apart by its type
        path = (*path, "type")
        message = f"{error['ctx']['tag'][:64]!r} is not supported by this server, only {error['ctx']['expected_tags']}"
    if not path:  # an error of several fields; the message begins with the one to change
        name = message.partition(":")[0]
        return message, name if isinstance(body, dict) and name in body else None
    steps = _within(body, path, missing=error["type"] == "missing")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in steps)
    param = param.removeprefix(".")
    return f"{shortened(param)}: {message}", param


def _within(body: Any, path: Sequence[str | int], *, missing: bool) -> list[str | int]:
    """Return the steps of a location within the body, without the branches of unions that pydantic adds."""
    steps: list[str | int] = []
    for number, part in enumerate(path):
        known = part in body if isinstance(body, dict) else isinstance(body, list) and part in range(len(body))
        if known:
            body = body[part]
        elif not (missing and isinstance(body, dict) and number == len(path) - 1):  # the last is the field
            continue
        steps.append(part)
    return steps


class BodyLimit:
    """Middleware: answers a body over the limit with 413, whether or not its length was announced.

    A body that is late gets 408, however steadily it arrives. Where the bodies of running requests are too large
    together, the latest gets 503.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = held_bytes = 0
        until: float | None = asyncio.get_running_loop().time() + self._timeout_s

        async def timed() -> Message:
            nonlocal until
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                # Otherwise the rest of the body would count as the next request.
                raise HTTPException(
                    408, f"the body did not arrive within {self._timeout_s:g} s", {"Connection": "close"}
                ) from None
            if not message.get("more_body"):
                until = None  # now only a disconnect can come, at any time
            return message

        async def counted() -> Message:
            nonlocal num_bytes, held_bytes
            message = await timed()
            size = len(message.get("body", b""))
            num_bytes += size
            if num_bytes > self._max_bytes:
                # Read on and discard: a client that is still sending would not see the answer.
                while message["type"] == "http.request" and message.get("more_body") and num_bytes < MAX_SKIPPED_BYTES:
                    message = await timed()
                    num_bytes += len(message.get("body", b""))
                raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
            held_bytes += size
            self._held_bytes += size
            if self._held_bytes > _MAX_BODIES * self._max_bytes:
                why = "the memory for request bodies is full"
                raise HTTPException(503, f"{why}; try again soon", {"Retry-After": "1", "Connection": "close"})
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= held_bytes
