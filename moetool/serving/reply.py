"""The answers of the OpenAI protocol: whole, and in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moetool.request import TokenLogprob
from moetool.serving.generation import Piece, ScoredToken
from moetool.serving.text import Vocabulary

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""


class Reply(ABC):
    """The answer to one request.

    Args:
        model: the name that the client asked for.
        logprobs: whether log-probabilities are part of the answer.
        num_prompt_tokens: over all prompts of the request.
    """

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, vocabulary: Vocabulary, *, logprobs: bool, num_prompt_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self.num_prompt_tokens = num_prompt_tokens
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Sequence[Piece]], num_generated: int) -> Json:
        """The answer of a request that does not stream, from the pieces of each choice."""
        choices = [self.choice(index, _join([self.prelude(index), *parts])) for index, parts in enumerate(pieces)]
        return {**self._head, "object": self.object, "choices": choices, "usage": self.usage(num_generated)}

    def chunk(self, choices: list[Json]) -> Json:
        """One event of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def usage(self, num_generated: int) -> Json:
        """The token counts."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.num_prompt_tokens + num_generated,
        }

    @abstractmethod
    def prelude(self, index: int) -> Piece:
        """What comes before the first generated piece of a choice."""

    @abstractmethod
    def opening(self, index: int) -> list[Json]:
        """What a stream sends before the first generated piece of a choice."""

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> Json:
        """A choice of a whole answer."""

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> Json:
        """A choice of a chunk."""


class CompletionReply(Reply):
    """Of /v1/completions. `echoes` are the prompts, one a choice, where they are to be repeated."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"
    echoes: Sequence[Piece] = ()

    def prelude(self, index: int) -> Piece:
        return self.echoes[index] if self.echoes else Piece()

    def opening(self, index: int) -> list[Json]:
        return [self.delta(index, self.echoes[index])] if self.echoes else []

    def choice(self, index: int, piece: Piece) -> Json:
        logprobs = self._list_logprobs(piece.tokens) if self._logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}

    delta = choice

    def _list_logprobs(self, tokens: Sequence[ScoredToken]) -> Json:
        shown = self._vocabulary.shown
        return {
            "tokens": [shown(scored.token) for scored in tokens],
            "token_logprobs": [scored.logprob and _finite(scored.logprob.logprob) for scored in tokens],
            "top_logprobs": [scored.logprob and self._top(scored.token, scored.logprob) for scored in tokens],
            "text_offset": [scored.offset for scored in tokens],
        }

    def _top(self, token: int, logprob: TokenLogprob) -> Json:
        # The chosen token is always among them, so there may be one more than was asked for.
        chosen = () if any(other == token for other, _ in logprob.top) else ((token, logprob.logprob),)
        return {self._vocabulary.shown(other): _finite(value) for other, value in (*logprob.top, *chosen)}


class ChatReply(Reply):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def prelude(self, index: int) -> Piece:
        return Piece()

    def opening(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, index: int, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, **self._ending(piece)}

    def delta(self, index: int, piece: Piece) -> Json:
        return {"index": index, "delta": {"content": piece.text} if piece.text else {}, **self._ending(piece)}

    def _ending(self, piece: Piece) -> Mapping[str, Any]:
        content = [self._scored(scored.token, scored.logprob) for scored in piece.tokens]
        return {
            "logprobs": {"content": content, "refusal": None} if self._logprobs else None,
            "finish_reason": piece.finish,
        }

    def _scored(self, token: int, logprob: TokenLogprob | None) -> Json:
        value, top = logprob or (LEAST_LOGPROB, ())
        return {**self._entry(token, value), "top_logprobs": [self._entry(*other) for other in top]}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._vocabulary.token_bytes(token)
        return {"token": self._vocabulary.shown(token), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _join(pieces: Iterable[Piece]) -> Piece:
    pieces = list(pieces)
    text = "".join(piece.text for piece in pieces)
    return Piece(text, [scored for piece in pieces for scored in piece.tokens], pieces[-1].finish)
