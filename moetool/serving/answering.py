"""The answer to a request, whole or streamed, in the form of its protocol; disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from moetool.base.errors import MoetoolError
from moetool.runtime.request import Grammar, SamplingParams, TokenLogprob
from moetool.serving import http_errors as refusal
from moetool.serving import routed_answers
from moetool.serving.access import AccessRecord, record_of
from moetool.serving.clients import Client, client_of
from moetool.serving.generation import Deadline, Exchange, Frontend, Job, TextPiece
from moetool.serving.grammars import Grammars
from moetool.serving.http_errors import Refusal
from moetool.serving.prompt_tokens import PromptTokens, chat_prompt, completion_prompts, echo
from moetool.serving.replies import CompletionReply, Reply, ReplySetup
from moetool.serving.request_schema import ChatRequest, CompletionRequest, GenerationRequest
from moetool.serving.tool_use import tool_use

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client disconnected."""


class Terms(NamedTuple):
    """Client and time limit of an exchange."""

    record: AccessRecord
    deadline: Deadline
    client: Client


def terms_of(frontend: Frontend, request: Request) -> Terms:
    """Return the terms of a request. Raises: Refusal: its X-Request-Timeout is invalid."""
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
    return Terms(record_of(request.scope), deadline, client_of(request.scope))


async def answer(
    request: Request, body: GenerationRequest, start: Coroutine[Any, Any, tuple[Exchange, Reply]]
) -> Response:
    """Return the response to a request; `start` begins its generation."""
    try:
        exchange, reply = await _attended(request.receive, start)
        headers = {"X-Dropped-Messages": str(reply.setup.num_dropped)} if reply.setup.num_dropped else {}
        if body.stream:
            return _EventStream(exchange, _events(exchange, reply), headers)
        with contextlib.closing(exchange):
            whole = await _attended(request.receive, _collect(exchange, reply))
            if body.return_token_ids or body.return_routed_experts:
                whole = await asyncio.to_thread(routed_answers.extend, whole, exchange, body)
            return JSONResponse(whole, headers=headers)
    except ClientGone:
        return Response(status_code=499)  # "client closed request", which nobody sees


async def start_completion(
    frontend: Frontend, grammars: Grammars, body: CompletionRequest, terms: Terms
) -> tuple[Exchange, Reply]:
    """Begin to answer a completion."""
    frontend.require_ready()
    engine, vocabulary = frontend.engine, frontend.vocabulary
    grammar: Grammar | None = None
    if body.response_format is not None and (schema := body.response_format.schema_text) is not None:
        grammar = await asyncio.to_thread(grammars.json, schema, "response_format")
    # Long prompts take seconds to tokenize, and a forward takes longer: neither may block the event loop.
    prompts = await asyncio.to_thread(completion_prompts, engine, body)
    setup = ReplySetup(
        model=body.model,
        vocabulary=vocabulary,
        num_prompt_tokens=sum(len(prompt.tokens) for prompt in prompts),
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
    )
    reply = CompletionReply(setup)
    terms.record.prompt_tokens = setup.num_prompt_tokens
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


async def start_chat(
    frontend: Frontend,
    grammars: Grammars,
    body: ChatRequest,
    terms: Terms,
    reply_of: Callable[[ReplySetup], Reply],
    *,
    shorten: bool = False,
) -> tuple[Exchange, Reply]:
    """Begin to answer a conversation.

    Args:
        reply_of: makes the reply in the form of the request's protocol.
        shorten: answer as far as the context allows, instead of refusing a larger max_tokens.
    """
    frontend.require_ready()
    prompt = await asyncio.to_thread(chat_prompt, frontend.engine, body, frontend.options, shorten=shorten)
    use = await asyncio.to_thread(tool_use, frontend.engine, body, grammars, frontend.options.tool_format)
    setup = ReplySetup(
        model=body.model,
        vocabulary=frontend.vocabulary,
        num_prompt_tokens=len(prompt.tokens),
        logprobs=body.logprobs,
        include_usage=body.include_usage,
        num_dropped=prompt.num_dropped,
        parse=use.parse,
        several=body.parallel_tool_calls,
        context_limits=body.max_tokens is not None and prompt.max_tokens < body.max_tokens,
    )
    terms.record.prompt_tokens = setup.num_prompt_tokens
    jobs = _jobs(body, [prompt], (body.top_logprobs or 0) if body.logprobs else None, use.grammar)
    return frontend.open([replace(job, shown=use.shown) for job in jobs], body.stop, *terms), reply_of(setup)


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


async def _events(exchange: Exchange, reply: Reply) -> AsyncIterator[str]:
    """Yield the server-sent events of a stream."""
    try:
        for event in reply.opening():
            yield event
        async for index, piece in exchange.pieces(reply.patience_s):
            for event in reply.events(index, piece) if index >= 0 else reply.alive():
                yield event
        for event in reply.closing(exchange.num_tokens, exchange.num_reused):
            yield event
    except MoetoolError as error:
        exchange.record.error = str(error)
        yield reply.failure(error)
    except Exception:
        exchange.record.error = "internal error"
        yield reply.failure(MoetoolError(refusal.INTERNAL))
        raise


class _EventStream(Response):
    """Server-sent events; ends the exchange when they end or the client disconnects.

    Starlette's StreamingResponse notices a disconnect only at its next send, which may be much later.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, events: AsyncIterator[str], headers: Mapping[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["Content-Length"]
        self._exchange = exchange
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.closing(self._exchange), contextlib.suppress(ClientGone):
            await _attended(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
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
