"""Token counts: /tokenize and /detokenize in vLLM's form, and those of Anthropic's and OpenAI's protocols."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from moetool.base.validation import outside_vocabulary
from moetool.runtime.request import EngineLike
from moetool.serving.http_errors import Refusal
from moetool.serving.messages_schema import MessagesPrompt
from moetool.serving.prompt_tokens import chat_text, encoded
from moetool.serving.request_schema import ConversationRequest, DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from moetool.serving.responses_schema import ResponsesRequest


def install(app: FastAPI, engine: EngineLike, require_model: Callable[[str], None]) -> None:
    """Add the routes."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest | TokenizeChatRequest) -> dict[str, Any]:
        if body.model is not None:
            require_model(body.model)
        tokens = await asyncio.to_thread(_tokens, engine, body)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": engine.max_context, "tokens": tokens}
        names = engine.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {**answer, "token_strs": names}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        if body.model is not None:
            require_model(body.model)
        if why := outside_vocabulary(body.tokens, engine.vocab_size):
            raise Refusal(f"tokens: {why}", param="tokens")
        text = await asyncio.to_thread(engine.tokenizer.decode, body.tokens, clean_up_tokenization_spaces=False)
        return {"prompt": text}

    @app.post("/v1/messages/count_tokens")
    async def count_messages(body: MessagesPrompt) -> dict[str, Any]:
        require_model(body.model)
        return {"input_tokens": await asyncio.to_thread(_num_tokens, engine, body.as_chat())}

    @app.post("/v1/responses/input_tokens")
    async def count_input(body: ResponsesRequest) -> dict[str, Any]:
        require_model(body.model)
        counted = await asyncio.to_thread(_num_tokens, engine, body.as_chat())
        return {"object": "response.input_tokens", "input_tokens": counted}


def _num_tokens(engine: EngineLike, body: ConversationRequest) -> int:
    return len(encoded(engine, chat_text(engine, body, body.messages), "messages", special=False))


def _tokens(engine: EngineLike, body: TokenizeRequest | TokenizeChatRequest) -> list[int]:
    if isinstance(body, TokenizeRequest):
        return encoded(engine, body.prompt, "prompt", special=body.add_special_tokens)
    text = chat_text(engine, body, body.messages, answer=body.add_generation_prompt)
    return encoded(engine, text, "messages", special=False)
