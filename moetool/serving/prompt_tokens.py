"""Token ids of a request's prompts and messages."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any

from moetool.base.validation import outside_vocabulary
from moetool.prompts.messages import ChatMessage, fit_template, for_template
from moetool.runtime.request import EngineLike, TokenLogprob
from moetool.serving.detokenize import Vocabulary
from moetool.serving.generation import ScoredToken, TextPiece
from moetool.serving.http_errors import CONTEXT_EXCEEDED, Refusal
from moetool.serving.request_schema import ChatRequest, CompletionRequest, ConversationRequest
from moetool.serving.server_options import ServerOptions
from moetool.serving.tool_use import offered, template_of

DEFAULT_MAX_TOKENS = 16
"""Default max_tokens of a completion, as OpenAI's."""
_NOT_VARIABLES = frozenset({"self", "messages", "conversations"})
"""Names that functions below `apply_chat_template` take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """A prompt in tokens.

    Attributes:
        text: the text; None where the request has tokens.
        max_tokens: limit of its answer.
        num_dropped: messages of the conversation that were dropped.
    """

    tokens: list[int]
    text: str | None
    max_tokens: int
    num_dropped: int = 0


def completion_prompts(engine: EngineLike, body: CompletionRequest) -> list[PromptTokens]:
    """Return the prompts of a completion; slow for long texts.

    Raises:
        Refusal: a prompt is empty, has unknown token ids, or leaves no room for its answer.
    """
    prompts: list[PromptTokens] = []
    for given in body.prompt:
        text = given if isinstance(given, str) else None
        tokens = encoded(engine, given, "prompt") if isinstance(given, str) else given
        if not tokens:
            raise Refusal("the prompt has no tokens", param="prompt")
        _require_known(engine, tokens, "prompt")
        room = _room(engine, tokens, body.max_tokens, "prompt", least=0)
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts.append(PromptTokens(tokens=tokens, text=text, max_tokens=min(wanted, room)))
    return prompts


def chat_prompt(
    engine: EngineLike, body: ChatRequest, options: ServerOptions, *, shorten: bool = False
) -> PromptTokens:
    """Return the prompt of a conversation by the model's chat template.

    Args:
        shorten: lower a limit of the answer that the context has no room for, instead of refusing it.

    Raises:
        Refusal: the template refuses the messages, or no room is left for an answer; with `drop_oldest_turns` only if
            the last turn alone leaves none.
    """
    try:
        return _chat_tokens(engine, body, body.messages, options, shorten=shorten)
    except Refusal as refusal:
        if not (options.drop_oldest_turns and _outgrows(refusal)):
            raise
    kept = [message for message in body.messages if message.role in _INSTRUCTIONS]
    starts = [at for at, message in enumerate(body.messages) if message.role == "user"][1:]
    answer_tokens = min(options.default_max_tokens, engine.max_context // 4)

    def without(turns: int, least: int) -> PromptTokens:
        """Return the conversation from this turn on."""
        rest = body.messages[starts[turns] :] if starts else body.messages
        messages = [*kept, *(message for message in rest if message.role not in _INSTRUCTIONS)]
        return _chat_tokens(engine, body, messages, options, shorten=shorten, least=least)

    def fits(turns: int) -> bool:
        try:
            return bool(without(turns, answer_tokens))
        except Refusal as refusal:
            if not _outgrows(refusal):
                raise
            return False

    # The fewest turns to drop, by bisection: tokenizing a long conversation takes seconds.
    turns = bisect_left(range(max(0, len(starts) - 1)), True, key=fits)
    return without(turns, 1)


_INSTRUCTIONS = ("system", "developer")
"""Roles of messages that hold for the whole conversation."""


def _outgrows(refusal: Refusal) -> bool:
    return refusal.code == CONTEXT_EXCEEDED


def _chat_tokens(
    engine: EngineLike,
    body: ChatRequest,
    messages: Sequence[ChatMessage],
    options: ServerOptions,
    *,
    shorten: bool,
    least: int = 1,
) -> PromptTokens:
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    text = chat_text(engine, body, messages)
    tokens = encoded(engine, text, "messages", special=False)  # the template writes the special tokens
    _require_known(engine, tokens, "messages")
    room = _room(engine, tokens, None if shorten else wanted, "messages", least=least)
    most = min(room, options.default_max_tokens if wanted is None else wanted)
    return PromptTokens(tokens=tokens, text=text, max_tokens=most, num_dropped=len(body.messages) - len(messages))


def chat_text(
    engine: EngineLike, body: ConversationRequest, messages: Sequence[ChatMessage], *, answer: bool = True
) -> str:
    """Return messages rendered by the chat template; with `answer`, up to the answer's start.

    Raises:
        Refusal: as `template_of`; or a name is not one of a template's variables, or the template refuses the messages.
    """
    template = template_of(engine, body)
    taken = _NOT_VARIABLES.union(signature(engine.tokenizer.apply_chat_template).parameters) - {"documents"}
    if wrong := sorted(taken & body.chat_template_kwargs.keys()):
        raise Refusal(
            f"chat_template_kwargs: {', '.join(wrong)}: not a variable of the chat template; leave it out",
            param="chat_template_kwargs",
        )
    try:
        text: str = engine.tokenizer.apply_chat_template(
            fit_template(map(for_template, messages), template),
            tools=offered(body),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=answer,
            **body.chat_template_kwargs,
        )
    except Exception as error:  # a template may raise anything on unexpected input
        reason = str(error) or type(error).__name__
        raise Refusal(f"the model's chat template refuses the messages: {reason}", param="messages") from error
    return text


def encoded(engine: EngineLike, text: str, param: str, *, special: bool = True) -> list[int]:
    """Return the tokens of a text. Raises: Refusal where it is far too long."""
    _require_short(engine, text, param)
    return engine.tokenizer.encode(text, add_special_tokens=special, verbose=False)


def _require_known(engine: EngineLike, tokens: Sequence[int], param: str) -> None:
    """Raises: Refusal: the model has no embedding of a token."""
    if why := outside_vocabulary(tokens, engine.vocab_size):
        raise Refusal(f"{param}: {why}", param=param)


def _require_short(engine: EngineLike, text: str, param: str) -> None:
    """Refuse a text that cannot fit with any tokens: tokenizing it could take minutes.

    Raises:
        Refusal: it is longer than a full context of the longest token.
    """
    most = engine.max_context * _longest_token(engine.tokenizer)
    if len(text) > most:
        raise Refusal(
            f"{param}: {len(text)} characters, and this model's maximum context length of {engine.max_context} "
            f"tokens holds at most {most}; shorten the {param}",
            param=param,
            code=CONTEXT_EXCEEDED,
        )


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


def echo(vocabulary: Vocabulary, prompt: PromptTokens, logprobs: list[TokenLogprob | None] | None) -> TextPiece:
    """Return the prompt as the first piece of its answer.

    Special tokens in the text are shown; those added by the tokenizer are not.
    """
    hidden = [token for token in vocabulary.special if prompt.text and vocabulary.shown(token) not in prompt.text]
    detokenizer = vocabulary.detokenizer(hidden)
    offsets, texts, length = [], [], 0
    for token in prompt.tokens:
        offsets.append(length)
        texts.append(detokenizer.push(token))
        length += len(texts[-1])
    text = "".join([*texts, detokenizer.finish()]) if prompt.text is None else prompt.text
    if logprobs is None:
        return TextPiece(text)
    return TextPiece(text, [ScoredToken(*scored) for scored in zip(prompt.tokens, offsets, logprobs, strict=True)])


def _room(engine: EngineLike, tokens: list[int], wanted: int | None, param: str, least: int) -> int:
    """Return the number of tokens that fit after these; refuse if `wanted` (or `least`) do not."""
    room = engine.max_context - len(tokens)
    asked = least if wanted is None else wanted
    if asked > room:
        raise Refusal(
            f"this model's maximum context length is {engine.max_context} tokens, but {len(tokens) + asked} were "
            f"requested ({len(tokens)} in the {param}, {asked} in the answer); shorten the {param} or lower max_tokens",
            param=param,
            code=CONTEXT_EXCEEDED,
        )
    return room
