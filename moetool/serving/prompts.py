"""From the prompts and messages of a request to token ids that the engine can serve."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from moetool.request import EngineLike, TokenLogprob
from moetool.serving.generation import Piece, ScoredToken
from moetool.serving.refusal import Refusal
from moetool.serving.schema import ChatRequest, CompletionRequest
from moetool.serving.text import Vocabulary

DEFAULT_MAX_TOKENS = 16
"""Of a completion, as OpenAI has it; a chat answer may fill the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt in tokens, what it was in text (None: it came as tokens), and how long its answer may be."""

    tokens: list[int]
    text: str | None
    max_tokens: int


def completion_prompts(engine: EngineLike, body: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion; may take long on long texts.

    Raises:
        Refusal: one is empty, has ids that are not in the vocabulary, or leaves no room for its answer.
    """
    prompts: list[Prompt] = []
    for given in body.prompt:
        text = given if isinstance(given, str) else None
        if text is not None:
            _require_short(engine, text, "prompt")
        tokens = engine.tokenizer.encode(given, verbose=False) if isinstance(given, str) else given
        if not tokens:
            raise Refusal("the prompt has no tokens", param="prompt")
        if wrong := [token for token in tokens if not 0 <= token < engine.vocab_size]:
            raise Refusal(f"token {wrong[0]} is not in the vocabulary of {engine.vocab_size} tokens", param="prompt")
        room = _room(engine, tokens, body.max_tokens, "prompt", least=0)
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts.append(Prompt(tokens=tokens, text=text, max_tokens=min(wanted, room)))
    return prompts


def chat_prompt(engine: EngineLike, body: ChatRequest) -> Prompt:
    """The prompt that the model's chat template makes of a conversation.

    Raises:
        Refusal: the model has no chat template, the template refuses the messages, or no room is left.
    """
    if not engine.tokenizer.chat_template:
        raise Refusal(f"model {engine.model_name!r} has no chat template; use /v1/completions", param="messages")
    # Few templates know OpenAI's newer name for the system's role.
    roles = {"developer": "system"}
    messages = [{"role": roles.get(m.role, m.role), "content": m.content} for m in body.messages]
    try:
        text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise Refusal(f"the model's chat template refuses the messages: {error}", param="messages") from error
    _require_short(engine, text, "messages")
    # The template has written the special tokens already.
    tokens = engine.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = _room(engine, tokens, wanted, "messages", least=1)
    return Prompt(tokens=tokens, text=text, max_tokens=room if wanted is None else wanted)


def _require_short(engine: EngineLike, text: str, param: str) -> None:
    """Refuse a text that cannot fit whatever its tokens are: to find its tokens could take minutes.

    Raises:
        Refusal: it has more characters than the context could hold of the longest token.
    """
    most = engine.max_context * _longest_token(engine.tokenizer)
    if len(text) > most:
        raise Refusal(
            f"the {param} are {len(text)} characters, and this model's maximum context length of {engine.max_context} "
            f"tokens holds at most {most}; shorten the {param}",
            param=param,
            code="context_length_exceeded",
        )


@lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()))


def echo(vocabulary: Vocabulary, prompt: Prompt, logprobs: list[TokenLogprob | None] | None) -> Piece:
    """The prompt as the first piece of its answer.

    Special tokens show as they were given: those in the text do, those that the tokenizer added do not.
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
        return Piece(text)
    return Piece(text, [ScoredToken(*scored) for scored in zip(prompt.tokens, offsets, logprobs, strict=True)])


def _room(engine: EngineLike, tokens: list[int], wanted: int | None, param: str, least: int) -> int:
    """How many tokens fit after these; refuses where `wanted` (or `least`) do not."""
    room = engine.max_context - len(tokens)
    asked = least if wanted is None else wanted
    if asked > room:
        raise Refusal(
            f"this model's maximum context length is {engine.max_context} tokens, but {len(tokens) + asked} were "
            f"requested ({len(tokens)} in the {param}, {asked} in the answer); shorten the {param} or lower max_tokens",
            param=param,
            code="context_length_exceeded",
        )
    return room
