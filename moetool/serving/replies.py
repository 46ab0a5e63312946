"""The answers of the OpenAI protocol: whole, and in chunks."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from moetool.base.errors import MoetoolError
from moetool.runtime.request import TokenLogprob
from moetool.serving.detokenize import Vocabulary
from moetool.serving.generation import ScoredToken, TextPiece
from moetool.serving.http_errors import describe
from moetool.serving.json_stream import TextBuffer
from moetool.serving.tool_calls import AnswerPart, Parsing, ToolParser

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySetup:
    """Request, prompt and limits of an answer, before it is generated.

    Attributes:
        num_prompt_tokens: tokens of all prompts of the request.
        logprobs: whether the answer has log-probabilities.
        include_usage: whether a stream ends with token counts.
        num_dropped: messages dropped from the conversation to fit into the context.
        parse: finds tool calls in the text; None where all text is content.
        several: whether more than the first call may be returned.
        context_limits: the context has less room than the request's limit.
    """

    model: str
    vocabulary: Vocabulary
    num_prompt_tokens: int
    logprobs: bool = False
    include_usage: bool = False
    num_dropped: int = 0
    parse: Callable[[TextBuffer], Parsing] | None = None
    several: bool = True
    context_limits: bool = False


class Reply(ABC):
    """The answer to one request, whole or as server-sent events."""

    patience_s: float | None = None
    """Seconds without an event after which `alive` is sent (None: never)."""

    def __init__(self, setup: ReplySetup) -> None:
        self.setup = setup

    @abstractmethod
    def whole(self, pieces: Sequence[Sequence[TextPiece]], num_generated: int, num_reused: int) -> Json:
        """Return the answer of a request without stream, from the pieces of each choice.

        Args:
            num_reused: tokens of the prompt that were in the KV cache.
        """

    def opening(self) -> Iterable[str]:
        """Return the events before the first piece."""
        return ()

    @abstractmethod
    def events(self, index: int, piece: TextPiece) -> Iterable[str]:
        """Return the events of a choice's next piece."""

    def alive(self) -> Iterable[str]:
        """Return the events that show a waiting client that its request is alive."""
        return ()

    @abstractmethod
    def closing(self, num_generated: int, num_reused: int) -> Iterable[str]:
        """Return the events after the last piece."""

    @abstractmethod
    def failure(self, error: MoetoolError) -> str:
        """Return the last event of a stream that an error ends."""


def event_of(payload: Json, name: str | None = None) -> str:
    """Return a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n"


class ChoicesReply(Reply):
    """A reply with choices, of /v1/completions or /v1/chat/completions."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, setup: ReplySetup) -> None:
        super().__init__(setup)
        self._vocabulary, self._logprobs = setup.vocabulary, setup.logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": setup.model}
        # With usage, OpenAI has the field in every chunk.
        self._no_usage: Json = {"usage": None} if setup.include_usage else {}
        self._begun: set[int] = set()

    def whole(self, pieces: Sequence[Sequence[TextPiece]], num_generated: int, num_reused: int) -> Json:
        choices = [self.choice(index, _join([self.prelude(index), *parts])) for index, parts in enumerate(pieces)]
        usage = self._usage(num_generated, num_reused)
        return {**self._head, "object": self.object, "choices": choices, "usage": usage}

    def events(self, index: int, piece: TextPiece) -> Iterator[str]:
        if index not in self._begun:
            self._begun.add(index)
            yield from map(self._chunk, self.beginning(index))
        yield from map(self._chunk, self.deltas(index, piece))

    def closing(self, num_generated: int, num_reused: int) -> Iterator[str]:
        if self.setup.include_usage:
            yield self._chunk(None, usage=self._usage(num_generated, num_reused))
        yield "data: [DONE]\n\n"

    def failure(self, error: MoetoolError) -> str:
        return event_of(describe(error)[1])  # and no [DONE]

    def _chunk(self, choice: Json | None, **more: Any) -> str:
        choices = [] if choice is None else [choice]
        return event_of({**self._head, "object": self.chunk_object, "choices": choices, **self._no_usage, **more})

    def _usage(self, num_generated: int, num_reused: int) -> Json:
        num_prompt, num_dropped = self.setup.num_prompt_tokens, self.setup.num_dropped
        counts = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_reused},
        }
        return counts | ({"dropped_messages": num_dropped} if num_dropped else {})

    @abstractmethod
    def prelude(self, index: int) -> TextPiece:
        """Return the text before the first generated piece of a choice, such as an echoed prompt."""

    @abstractmethod
    def beginning(self, index: int) -> list[Json]:
        """Return the chunks before the first generated piece of a choice."""

    @abstractmethod
    def choice(self, index: int, piece: TextPiece) -> Json:
        """Return a choice of a whole answer."""

    @abstractmethod
    def deltas(self, index: int, piece: TextPiece) -> list[Json]:
        """Return the chunks of a choice's next piece."""


class CompletionReply(ChoicesReply):
    """Reply of /v1/completions. `echoes` are the prompts to repeat, one per choice."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"
    echoes: Sequence[TextPiece] = ()

    def prelude(self, index: int) -> TextPiece:
        return self.echoes[index] if self.echoes else TextPiece()

    def beginning(self, index: int) -> list[Json]:
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


class ChatReply(ChoicesReply):
    """Reply of /v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, setup: ReplySetup) -> None:
        super().__init__(setup)
        self._answers: dict[int, AnswerParts] = {}

    def prelude(self, index: int) -> TextPiece:
        return TextPiece()

    def beginning(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def choice(self, index: int, piece: TextPiece) -> Json:
        read = self._parts_of(index)
        texts: dict[str, str] = {}
        calls: list[Json] = []
        for delta in starmap(_delta, read.of(piece)):
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
        read = self._parts_of(index)
        deltas = [*starmap(_delta, read.of(piece))]
        if not deltas and not (piece.tokens or piece.finish):
            return []
        *first, last = deltas or [{}]
        nothing = {"logprobs": None, "finish_reason": None}
        return [
            *({"index": index, "delta": delta, **nothing} for delta in first),
            {"index": index, "delta": last, **self._ending(piece, read)},
        ]

    def _parts_of(self, index: int) -> "AnswerParts":
        if index not in self._answers:
            self._answers[index] = AnswerParts(self.setup)
        return self._answers[index]

    def _ending(self, piece: TextPiece, read: "AnswerParts") -> Mapping[str, Any]:
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


def _delta(number: int, part: AnswerPart) -> Json:
    """Return a part as OpenAI has it; `number` counts the calls."""
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text}
    call: Json = {"index": number - 1, "function": {"arguments": part.text}}
    if part.kind == "name":
        call |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        call["function"] = {"name": part.text, "arguments": ""}
    return {"tool_calls": [call]}


class AnswerParts:
    """The parts of one choice: content, reasoning and tool calls.

    Attributes:
        num_calls: number of begun tool calls.
    """

    def __init__(self, setup: ReplySetup) -> None:
        self._parser = None if setup.parse is None else ToolParser(setup.parse)
        self._several = setup.several
        self.num_calls = 0

    def of(self, piece: TextPiece) -> Iterator[tuple[int, AnswerPart]]:
        """Yield (number of calls so far, part) for the next piece."""
        if self._parser is None:
            parts = [AnswerPart("content", piece.text)] if piece.text else []
        else:
            parts = self._parser.push(piece.text, last=piece.finish is not None)
        for part in parts:
            self.num_calls += part.kind == "name"
            if part.kind in ("content", "reasoning") or self._several or self.num_calls == 1:
                yield self.num_calls, part


class PartsReply(Reply):
    """A reply of one choice whose content, reasoning and tool calls are parts, one after another.

    Attributes:
        last: the last piece, with the reason of the answer's end.
        num_calls: number of begun tool calls.
    """

    patience_s = 10.0

    def __init__(self, setup: ReplySetup) -> None:
        super().__init__(setup)
        self.last = TextPiece()
        self._answer = AnswerParts(setup)
        self._open: str | None = None  # kind of the open part
        self._texts: list[str] = []  # of the open part
        self._blank = ""  # white space that begins no text yet

    @property
    def num_calls(self) -> int:
        return self._answer.num_calls

    def assemble(self, pieces: Iterable[TextPiece]) -> None:
        """Make all parts of an answer without a stream."""
        for piece in pieces:
            for _ in self.events(0, piece):
                pass
        for _ in self.end():
            pass

    def events(self, index: int, piece: TextPiece) -> Iterator[str]:
        for _, part in self._answer.of(piece):
            yield from self._add(part)
        self.last = piece

    def end(self) -> Iterator[str]:
        """Yield the events that end the open part."""
        if self._open is not None:
            yield from self.end_part("".join(self._texts))
        self._open, self._texts, self._blank = None, [], ""

    @abstractmethod
    def begin_part(self, kind: str, name: str) -> Iterator[str]:
        """Yield the events that begin a part: `content`, `reasoning`, or `call` of a function."""

    @abstractmethod
    def add_text(self, text: str) -> Iterator[str]:
        """Yield the events of the open part's next text, for a call its arguments."""

    @abstractmethod
    def end_part(self, text: str) -> Iterator[str]:
        """Yield the events that end the open part, with its whole text."""

    def _add(self, part: AnswerPart) -> Iterator[str]:
        text = part.text
        if part.kind == "name":
            yield from self.end()
            self._open = "call"
            yield from self.begin_part("call", text)
            return
        kind = "call" if part.kind == "arguments" else part.kind
        if kind != self._open:
            if not text.strip():
                self._blank += text
                return
            text = self._blank + text
            yield from self.end()
            self._open = kind
            yield from self.begin_part(kind, "")
        self._texts.append(text)
        yield from self.add_text(text)


def _finite(logprob: float) -> float:
    return max(LEAST_LOGPROB, logprob)


def _join(pieces: Iterable[TextPiece]) -> TextPiece:
    pieces = list(pieces)
    text = "".join(piece.text for piece in pieces)
    return TextPiece(text, [scored for piece in pieces for scored in piece.tokens], pieces[-1].finish)
