"""The server's routes: the protocols of OpenAI and Anthropic over an engine, health and statistics."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware

from moetool.base.validation import outside_vocabulary
from moetool.runtime.request import EngineLike
from moetool.serving import http_errors as refusal
from moetool.serving import openapi, token_routes
from moetool.serving.access import Access, AccessRecord, RequireKey
from moetool.serving.answering import answer, start_chat, start_completion, terms_of
from moetool.serving.connections import Connections
from moetool.serving.detokenize import Vocabulary
from moetool.serving.generation import Frontend
from moetool.serving.grammars import Grammars
from moetool.serving.http_errors import BodyLimit, Refusal
from moetool.serving.live_page import HEADERS as PAGE_HEADERS
from moetool.serving.live_page import PAGE
from moetool.serving.messages_reply import MessagesReply
from moetool.serving.messages_schema import MessagesRequest
from moetool.serving.metrics import Metrics
from moetool.serving.origins import CORS, OriginRules, Origins
from moetool.serving.replies import ChatReply
from moetool.serving.request_schema import ChatRequest, CompletionRequest, GenerationRequest
from moetool.serving.responses_reply import ResponsesReply
from moetool.serving.responses_schema import ResponsesRequest
from moetool.serving.server_options import ServerOptions


def create_app(
    engine: EngineLike,
    *,
    options: ServerOptions | None = None,
    api_key: str | None = None,
    report: Callable[[AccessRecord], object] = lambda record: None,
    connections: Connections | None = None,
    settings: Sequence[tuple[str, str, str]] = (),
) -> FastAPI:
    """Create the server's application.

    Args:
        api_key: key that clients must send, except for /health (default: none).
        report: called with the record of each finished request.
        connections: the server's connections, for /stats.
        settings: (name, value, reason) of given and chosen settings, for /stats.

    Effects: `app.state.frontend` is the `Frontend`, which drains the server.
    """
    options = options or ServerOptions()
    connections = connections or Connections(options)

    def server_counts() -> dict[str, float]:
        return {"requests_preempted": frontend.preempted, "connections_unread": connections.unread}

    frontend = Frontend(engine, Vocabulary(engine.tokenizer), Metrics(engine, server_counts), options)
    connections.crowded = lambda: frontend.is_crowded
    grammars = Grammars(engine)
    began = time.monotonic()
    # No documentation pages, which load scripts from the network, and no redirections, which follow the Host header.
    app = FastAPI(title="moetool", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.frontend = frontend
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes, timeout_s=options.body_timeout_s)
    if api_key is not None:
        app.add_middleware(RequireKey, api_key=api_key)
    rules = OriginRules.of(options, keyless=api_key is None)
    if rules.origins:
        # Outside the key's layer: a preflight carries no key.
        app.add_middleware(CORSMiddleware, allow_origins=rules.origins, **CORS)
    app.add_middleware(Origins, rules=rules)
    app.add_middleware(Access, report=report)  # the last one added is the outermost
    refusal.install(app)
    openapi.install(app, api_key=api_key is not None)

    short_name = engine.model_name.rstrip("/").rpartition("/")[2]
    names = {engine.model_name, short_name}
    # OpenAI's fields, then Anthropic's.
    card = {"id": engine.model_name, "object": "model", "created": int(time.time()), "owned_by": "moetool"}
    card |= {"type": "model", "display_name": short_name, "created_at": datetime.now(UTC).isoformat()}

    def require_model(name: str) -> None:
        if name not in names:
            raise Refusal(
                f"the model {name!r} does not exist; this server has {engine.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def require_tokens(body: GenerationRequest) -> None:
        if why := outside_vocabulary(map(int, body.logit_bias), engine.vocab_size):
            raise Refusal(f"logit_bias: {why}", param="logit_bias")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        only = {"has_more": False, "first_id": engine.model_name, "last_id": engine.model_name}
        return {"object": "list", "data": [card], **only}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        require_model(name)
        return card

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        require_model(body.model)
        require_tokens(body)
        return await answer(request, body, start_completion(frontend, grammars, body, terms_of(frontend, request)))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        require_model(body.model)
        require_tokens(body)
        start = start_chat(frontend, grammars, body, terms_of(frontend, request), ChatReply)
        return await answer(request, body, start)

    @app.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        require_model(body.model)
        chat = body.as_chat()
        start = start_chat(frontend, grammars, chat, terms_of(frontend, request), MessagesReply, shorten=True)
        return await answer(request, chat, start)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        require_model(body.model)
        chat = body.as_chat()
        reply = partial(ResponsesReply, body)
        start = start_chat(frontend, grammars, chat, terms_of(frontend, request), reply, shorten=True)
        return await answer(request, chat, start)

    @app.get("/health")
    async def health() -> JSONResponse:
        # Needs no key, so it does not show the model's folder.
        problems = {"problems": list(engine.problems)} if engine.problems else {}
        if frontend.status == "ready":
            return JSONResponse({"status": "ok", "model": short_name, **problems})
        body = {"status": frontend.status, "model": short_name, **problems}
        return JSONResponse(body, 503, {"Retry-After": "2"})

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(frontend.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    def stats() -> dict[str, Any]:
        server = {
            "status": frontend.status,
            "uptime_seconds": round(time.monotonic() - began, 3),
            "requests_running": len(frontend.running),
            "choices_in_engine": frontend.in_engine,
            "choices_waiting": frontend.num_waiting,
            "choices_preempted": frontend.preempted,
            **connections.counts(),
        }
        chosen = [dict(zip(("name", "value", "why"), row, strict=True)) for row in settings]
        return {"model": engine.model_name, "settings": chosen, "server": server, "engine": engine.stats()}

    @app.get("/", response_class=HTMLResponse)
    async def index() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=PAGE_HEADERS)

    token_routes.install(app, engine, require_model)
    return app
