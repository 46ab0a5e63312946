"""The OpenAI protocol over an engine: routes, streams and disconnects."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from moetool.base.errors import MoetoolError
from moetool.base.validation import outside_vocabulary
from moetool.runtime.request import EngineLike, Grammar, SamplingParams, TokenLogprob
from moetool.serving import http_errors as refusal
from moetool.serving import openapi, routed_answers, token_routes
from moetool.serving.access import Access, AccessRecord, RequireKey, record_of
from moetool.serving.clients import Client, client_of
from moetool.serving.connections import Connections
from moetool.serving.detokenize import Vocabulary
from moetool.serving.generation import Deadline, Exchange, Frontend, Job, TextPiece
from moetool.serving.grammars import Grammars
from moetool.serving.http_errors import BodyLimit, Refusal
from moetool.serving.index_page import HEADERS as PAGE_HEADERS
from moetool.serving.index_page import index_page
from moetool.serving.metrics import Metrics
from moetool.serving.origins import CORS, OriginRules, Origins
from moetool.serving.prompt_tokens import PromptTokens, chat_prompt, completion_prompts, echo
from moetool.serving.replies import ChatReply, CompletionReply, Reply
from moetool.serving.request_schema import ChatRequest, CompletionRequest, GenerationRequest
from moetool.serving.server_options import ServerOptions
from moetool.serving.tool_use import tool_use

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client disconnected."""


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
    card = {"id": engine.model_name, "object": "model", "created": int(time.time()), "owned_by": "moetool"}

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
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        require_model(name)
        return card

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        require_model(body.model)
        require_tokens(body)
        return await _answer(request, body, _start_completion(frontend, grammars, body, _terms(frontend, request)))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        require_model(body.model)
        require_tokens(body)
        return await _answer(request, body, _start_chat(frontend, grammars, body, _terms(frontend, request)))

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
        return HTMLResponse(index_page(short_name, asks_for_key=api_key is not None), headers=PAGE_HEADERS)

    token_routes.install(app, engine, require_model)
    return app


class _Terms(NamedTuple):
    """Client and time limit of an exchange."""

    record: AccessRecord
    deadline: Deadline
    client: Client


def _terms(frontend: Frontend, request: Request) -> _Terms:
    most = frontend.options.request_timeout_s
    given = request.headers.get("x-request-timeout")
    try:
        seconds = most if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise Refusal(f"X-Request-Timeout is {given!r}, expected seconds above 0", param="X-Request-Timeout")
    seconds = min(seconds, most)
    deadline = Deadline(seconds, asyncio.get_running_loop().time() + seconds)
    return _Terms(record_of(request.scope), deadline, client_of(request.scope))


async def _answer(
    request: Request, body: GenerationRequest, start: Coroutine[Any, Any, tuple[Exchange, Reply]]
) -> Response:
    """Return the response to a request; `start` begins its generation."""
    try:
        exchange, reply = await _attended(request.receive, start)
        headers = {"X-Dropped-Messages": str(reply.num_dropped)} if reply.num_dropped else {}
        if body.stream:
            return _EventStream(exchange, _events(exchange, reply, include_usage=body.include_usage), headers)
        with contextlib.closing(exchange):
            whole = await _attended(request.receive, _collect(exchange, reply))
            return JSONResponse(await asyncio.to_thread(routed_answers.extend, whole, exchange, body), headers=headers)
    except ClientGone:
        return Response(status_code=499)  # "client closed request", which nobody sees


async def _start_completion(
    frontend: Frontend, grammars: Grammars, body: CompletionRequest, terms: _Terms
) -> tuple[Exchange, Reply]:
    frontend.require_ready()
    engine, vocabulary = frontend.engine, frontend.vocabulary
    grammar: Grammar | None = None
    if body.response_format is not None and (schema := body.response_format.schema_text) is not None:
        grammar = await asyncio.to_thread(grammars.json, schema, "response_format")
    # Long prompts take seconds to tokenize, and a forward takes longer: neither may block the event loop.
    prompts = await asyncio.to_thread(completion_prompts, engine, body)
    reply = CompletionReply(
        body.model,
        vocabulary,
        logprobs=body.logprobs is not None,
        num_prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
    )
    terms.record.prompt_tokens = reply.num_prompt_tokens
    if body.echo:
        echoes: list[TextPiece] = []
        for prompt in prompts:
            scores: list[TokenLogprob | None] | None = None
            if body.logprobs is not None:
                scores = await frontend.score(prompt.tokens, body.logprobs, terms.deadline)
            echoes += [echo(vocabulary, prompt, scores)] * body.n
        reply.echoes = echoes
    jobs = _jobs(body, prompts, body.logprobs, grammar)
    jobs = [replace(job, offset=len(reply.prelude(index).text)) for index, job in enumerate(jobs)]
    return frontend.open(jobs, body.stop, *terms), reply


async def _start_chat(
    frontend: Frontend, grammars: Grammars, body: ChatRequest, terms: _Terms
) -> tuple[Exchange, Reply]:
    frontend.require_ready()
    prompt = await asyncio.to_thread(chat_prompt, frontend.engine, body, frontend.options)
    use = await asyncio.to_thread(tool_use, frontend.engine, body, grammars, frontend.options.tool_format)
    reply = ChatReply(
        body.model,
        frontend.vocabulary,
        logprobs=body.logprobs,
        num_prompt_tokens=len(prompt.tokens),
        parse=use.parse,
        several=body.parallel_tool_calls,
    )
    reply.num_dropped = prompt.num_dropped
    terms.record.prompt_tokens = reply.num_prompt_tokens
    jobs = _jobs(body, [prompt], (body.top_logprobs or 0) if body.logprobs else None, use.grammar)
    return frontend.open([replace(job, shown=use.shown) for job in jobs], body.stop, *terms), reply


def _jobs(
    body: GenerationRequest, prompts: Sequence[PromptTokens], logprobs: int | None, grammar: Grammar | None
) -> list[Job]:
    """Return one job per choice: the n choices of the first prompt, then of the second."""
    bias = tuple((int(token), value) for token, value in body.logit_bias.items())
    return [
        Job(
            prompt=prompt.tokens,
            params=SamplingParams(
                max_tokens=prompt.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                # The choices of one prompt must differ; the first equals that of the same request with n=1.
                seed=None if body.seed is None else (body.seed + index) % 2**63,
                logprobs=logprobs,
                ignore_eos=body.ignore_eos,
                top_k=max(0, body.top_k),
                min_p=body.min_p,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                repetition_penalty=body.repetition_penalty,
                logit_bias=bias,
                grammar=grammar,
                return_routes=body.return_routed_experts,
            ),
        )
        for prompt in prompts
        for index in range(body.n)
    ]


async def _collect(exchange: Exchange, reply: Reply) -> dict[str, Any]:
    pieces: list[list[TextPiece]] = [[] for _ in exchange.choices]
    async for index, piece in exchange.pieces():
        pieces[index].append(piece)
    return reply.whole(pieces, exchange.num_tokens, exchange.num_reused)


async def _events(exchange: Exchange, reply: Reply, *, include_usage: bool) -> AsyncIterator[str]:
    """Yield the payloads of a stream. After an error there is no `[DONE]`."""
    # With usage, OpenAI has the field in every chunk.
    no_usage = {"usage": None} if include_usage else {}
    opened: set[int] = set()
    try:
        async for index, piece in exchange.pieces():
            if index not in opened:
                opened.add(index)
                for choice in reply.opening(index):
                    yield _dump(reply.chunk([choice]) | no_usage)
            for choice in reply.deltas(index, piece):
                yield _dump(reply.chunk([choice]) | no_usage)
        if include_usage:
            yield _dump(reply.chunk([]) | {"usage": reply.usage(exchange.num_tokens, exchange.num_reused)})
        yield "[DONE]"
    except MoetoolError as error:
        exchange.record.error = str(error)
        yield _dump(refusal.describe(error)[1])
    except Exception:
        exchange.record.error = "internal error"
        yield _dump(refusal.error_object("internal error; see the server's log", 500))
        raise


def _dump(payload: dict[str, Any]) -> str:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))


class _EventStream(Response):
    """Server-sent events; ends the exchange when they end or the client disconnects.

    Starlette's StreamingResponse notices a disconnect only at its next send, which may be much later.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, payloads: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["Content-Length"]
        self._exchange = exchange
        self._payloads = payloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._exchange), contextlib.suppress(ClientGone):
            await _attended(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for payload in self._payloads:
            await send({"type": "http.response.body", "body": f"data: {payload}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _attended(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run work, and cancel it when the client disconnects. Raises: ClientGone: the client disconnected first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
