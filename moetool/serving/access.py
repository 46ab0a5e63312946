"""Who may ask, under which number, and what is written down of it: the outermost layer of the server."""

import hmac
import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moetool.serving.refusal import error_object

REQUEST_ID = "x-request-id"
_OPEN = {"/health"}
"""Paths that need no key: whoever watches the server has none."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Record:
    """One request, as a line of the access log has it. Of prompts and answers only the lengths.

    Attributes:
        request_id: the client's own `X-Request-Id`, or one that was made up.
        client: address of the other end.
        status: of the response; 499 where the client went before there was one.
        seconds: from the request's head to the end of its response.
        prompt_tokens: over all prompts.
        generated_tokens: over all choices.
        first_token_s: until the first token of any choice.
        error: why a stream that had begun ended early.
    """

    request_id: str
    client: str
    method: str
    path: str
    status: int = 499
    seconds: float = 0.0
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    first_token_s: float | None = None
    error: str | None = None

    def line(self) -> str:
        """One line of JSON, without what is not known."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps({"time": round(time.time(), 3), **known}, ensure_ascii=True)


def record_of(scope: Scope) -> Record:
    """The record of the request that a route answers."""
    record: Record = scope["moetool.record"]
    return record


class Access:
    """Middleware: numbers a request, asks for the key, and reports the record of each request when it is over.

    Args:
        api_key: what clients have to send as `Authorization: Bearer KEY`; None asks nobody.
        report: takes a record whose response has ended.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, report: Callable[[Record], object]) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        client = scope.get("client")
        record = Record(
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
                MutableHeaders(scope=message)[REQUEST_ID] = record.request_id
            await send(message)

        try:
            if scope["path"] in _OPEN or self._allows(headers.get("authorization", "")):
                await self._app(scope, receive, numbered)
            else:
                await _refused(scope, receive, numbered)
        finally:
            record.seconds = round(time.perf_counter() - began, 6)
            self._report(record)

    def _allows(self, authorization: str) -> bool:
        if self._key is None:
            return True
        scheme, _, key = authorization.partition(" ")
        # Takes the same time wherever the first wrong letter is.
        return hmac.compare_digest(key.strip().encode(), self._key) and scheme.lower() == "bearer"


async def _refused(scope: Scope, receive: Receive, send: Send) -> None:
    body: dict[str, Any] = error_object(
        "this server asks for a key; send it as 'Authorization: Bearer KEY'", 401, code="invalid_api_key"
    )
    await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
