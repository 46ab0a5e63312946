"""The answers of the OpenAI protocol: whole, and in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moetool.runtime.request import TokenLogprob
from moetool.serving.detokenize import Vocabulary
from moetool.serving.generation import ScoredToken, TextPiece
from moetool.serving.json_stream import TextBuffer
from moetool.serving.tool_calls import AnswerPart, Parsing, ToolParser

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON lacks."""


class Reply(ABC):
    """The answer to one request.

    Args:
        model: the model name in the request.
        logprobs: whether the answer has log-probabilities.
        num_prompt_tokens: tokens of all prompts of the request.
    """

    prefix: str
    object: str
    chunk_object: str
    num_dropped = 0
    """Messages dropped from the conversation to fit into the context."""

    def __init__(self, model: str, vocabulary: Vocabulary, *, logprobs: bool, num_prompt_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self.num_prompt_tokens = num_prompt_tokens
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Sequence[TextPiece]], num_generated: int, num_reused: int) -> Json:
        """Return the answer of a request without stream, from the pieces of each choice."""
        choices = [self.choice(index, _join([self.prelude(index), *parts])) for index, parts in enumerate(pieces)]
        usage = self.usage(num_generated, num_reused)
        return {**self._head, "object": self.object, "choices": choices, "usage": usage}

    def chunk(self, choices: list[Json]) -> Json:
        """Return one event of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def usage(self, num_generated: int, num_reused: int) -> Json:
        """Return the token counts; `num_reused` of the prompt were in the KV cache."""
        counts = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_reused},
        }
        return counts | ({"dropped_messages": self.num_dropped} if self.num_dropped else {})

    @abstractmethod
    def prelude(self, index: int) -> TextPiece:
        """Return the text before the first generated piece of a choice, such as an echoed prompt."""

    @abstractmethod
    def opening(self, index: int) -> list[Json]:
        """Return the chunks before the first generated piece of a choice."""

    @abstractmethod
    def choice(self, index: int, piece: TextPiece) -> Json:
        """Return a choice of a whole answer."""

    @abstractmethod
    def deltas(self, index: int, piece: TextPiece) -> list[Json]:
        """Return the chunks of a choice's next piece."""


class CompletionReply(Reply):
    """Reply of /v1/completions. `echoes` are the prompts to repeat, one per choice."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"
    echoes: Sequence[TextPiece] = ()

    def prelude(self, index: int) -> TextPiece:
        return self.echoes[index] if self.echoes else TextPiece()

    def opening(self, index: int) -> list[Json]:
        return [self.choice(index, self.echoes[index])] if self.echoes else []

    def choice(self, index: int, piece: TextPiece) -> Json:
        logprobs = self._list_logprobs(piece.tokens) if self._logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    def deltas(self, index: int, piece: TextPiece) -> list[Json]:
        return [self.choice(index, piece)] if piece else []

    def _list_logprobs(self, tokens: Sequence[ScoredToken]) -> Json:
        shown = self._vocabulary.shown
        return {
            "tokens": [shown(scored.token) for scored in tokens],
            "token_logprobs": [scored.logprob and _finite(scored.logprob.logprob) for scored in tokens],
            "top_logprobs": [scored.logprob and self._top(scored.token, scored.logprob) for scored in tokens],
            "text_offset": [scored.offset for scored in tokens],
        }

    def _top(self, token: int, logprob: TokenLogprob) -> Json:
        # The chosen token is always included, so there may be one more than requested.
        chosen = () if any(other == token for other, _ in logprob.top) else ((token, logprob.logprob),)
        return {self._vocabulary.shown(other): _finite(value) for other, value in (*logprob.top, *chosen)}


class ChatReply(Reply):
    """Reply of /v1/chat/completions.

    Args:
        parse: finds tool calls in the text; None where all text is content.
        several: whether more than the first call may be returned.
    """

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, *args: Any, parse: Callable[[TextBuffer], Parsing] | None = None, several: bool = True, **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self._parse = parse
        self._several = several
        self._messages: dict[int, _Message] = {}

    def prelude(self, index: int) -> TextPiece:
        return TextPiece()

    def opening(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, index: int, piece: TextPiece) -> Json:
        read = self._message(index)
        texts: dict[str, str] = {}
        calls: list[Json] = []
        for delta in read.deltas(piece):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            for name, text in delta.items():
                texts[name] = texts.get(name, "") + text
        message: Json = {"role": "assistant", "content": None if calls else "", "refusal": None, **texts}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **self._ending(piece, read)}

    def deltas(self, index: int, piece: TextPiece) -> list[Json]:
        read = self._message(index)
        deltas = read.deltas(piece)
        if not deltas and not (piece.tokens or piece.finish):
            return []
        *first, last = deltas or [{}]
        nothing = {"logprobs": None, "finish_reason": None}
        return [
            *({"index": index, "delta": delta, **nothing} for delta in first),
            {"index": index, "delta": last, **self._ending(piece, read)},
        ]

    def _message(self, index: int) -> "_Message":
        if index not in self._messages:
            self._messages[index] = _Message(ToolParser(self._parse) if self._parse else None, self._several)
        return self._messages[index]

    def _ending(self, piece: TextPiece, read: "_Message") -> Mapping[str, Any]:
        content = [self._scored(scored.token, scored.logprob) for scored in piece.tokens]
        return {
            "logprobs": {"content": content, "refusal": None} if self._logprobs else None,
            "finish_reason": "tool_calls" if piece.finish == "stop" and read.num_calls else piece.finish,
        }

    def _scored(self, token: int, logprob: TokenLogprob | None) -> Json:
        value, top = logprob or (LEAST_LOGPROB, ())
        return {**self._entry(token, value), "top_logprobs": [self._entry(*other) for other in top]}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._vocabulary.token_bytes(token)
        return {"token": self._vocabulary.shown(token), "logprob": _finite(logprob), "bytes": list(data)}


class _Message:
    """The growing message of one choice.

    Attributes:
        num_calls: number of begun tool calls.
    """

    def __init__(self, parser: ToolParser | None, several: bool) -> None:
        self._parser = parser
        self._several = several
        self.num_calls = 0

    def deltas(self, piece: TextPiece) -> list[Json]:
        """Return new parts of the next piece, one per kind."""
        if self._parser is None:
            return [{"content": piece.text}] if piece.text else []
        parts = self._parser.push(piece.text, last=piece.finish is not None)
        return [delta for part in parts if (delta := self._delta(part)) is not None]

    def _delta(self, part: AnswerPart) -> Json | None:
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        self.num_calls += part.kind == "name"
        if self.num_calls > 1 and not self._several:
            return None
        call: Json = {"index": self.num_calls - 1, "function": {"arguments": part.text}}
        if part.kind == "name":
            call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            call["function"] = {"name": part.text, "arguments": ""}
        return {"tool_calls": [call]}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _join(pieces: Iterable[TextPiece]) -> TextPiece:
    pieces = list(pieces)
    text = "".join(piece.text for piece in pieces)
    return TextPiece(text, [scored for piece in pieces for scored in piece.tokens], pieces[-1].finish)
