"""The answers of Anthropic's Messages protocol: whole, and as events."""

import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from moetool.base.errors import MoetoolError
from moetool.prompts.messages import as_plain_json
from moetool.serving.generation import TextPiece
from moetool.serving.http_errors import describe
from moetool.serving.json_stream import as_unicode
from moetool.serving.replies import Json, PartsReply, ReplySetup, event_of


class MessagesReply(PartsReply):
    """Reply of /v1/messages.

    The count of cached tokens is known after the first event, so the last one has all counts again.
    """

    def __init__(self, setup: ReplySetup) -> None:
        super().__init__(setup)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[Json] = []

    def whole(self, pieces: Sequence[Sequence[TextPiece]], num_generated: int, num_reused: int) -> Json:
        self.assemble(pieces[0])
        for number, block in enumerate(self._blocks):
            if isinstance(text := block.get("input"), str):
                call = f'{{"name": {json.dumps(block["name"], ensure_ascii=False)}, "arguments": {text}}}'
                cut = self.last.finish == "length" and block is self._blocks[-1]
                self._blocks[number] = block | {"input": {}} if cut else {"type": "text", "text": call}
        return self._message(self._usage(num_generated, num_reused)) | self._reason()

    def opening(self) -> Iterator[str]:
        yield _event("message_start", message=self._message(self._usage(0, 0)))

    def alive(self) -> Iterator[str]:
        yield _event("ping")

    def closing(self, num_generated: int, num_reused: int) -> Iterator[str]:
        yield from self.end()
        yield _event("message_delta", delta=self._reason(), usage=self._usage(num_generated, num_reused))
        yield _event("message_stop")

    def failure(self, error: MoetoolError) -> str:
        return event_of(describe(error, "/v1/messages")[1], "error")

    def begin_part(self, kind: str, name: str) -> Iterator[str]:
        block: Json = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif kind == "call":
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}
        self._blocks.append(block)
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def add_text(self, text: str) -> Iterator[str]:
        kind = self._blocks[-1]["type"]
        delta = {"type": f"{kind}_delta", kind: text}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": text}
        yield _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def end_part(self, text: str) -> Iterator[str]:
        block = self._blocks[-1]
        block |= {"input": _arguments(text)} if block["type"] == "tool_use" else {block["type"]: text}
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _message(self, usage: Json) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.setup.model}
        return {**head, "content": self._blocks, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _reason(self) -> Json:
        reason = "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"
        if self.last.stop is not None:
            reason = "stop_sequence"
        elif self.last.finish == "length":
            reason = "model_context_window_exceeded" if self.setup.context_limits else "max_tokens"
        return {"stop_reason": reason, "stop_sequence": self.last.stop}

    def _usage(self, num_generated: int, num_reused: int) -> Json:
        return {
            "input_tokens": self.setup.num_prompt_tokens - num_reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_reused,
            "output_tokens": num_generated,
        }


def _event(name: str, /, **fields: Any) -> str:
    return event_of({"type": name, **fields}, name)


def _arguments(text: str) -> Json | str:
    """Return the arguments of a call, without values that no JSON can have; the text where they are no object."""
    try:
        value = json.loads(text.strip() or "{}", parse_float=_finite, parse_constant=_refuse, object_pairs_hook=_object)
        as_plain_json(value)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text


def _finite(number: str) -> float:
    """Return a number as many parsers do: the largest one for 1e999."""
    return min(max(float(number), -sys.float_info.max), sys.float_info.max)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> Json:
    return {as_unicode(key): _unicode(value) for key, value in pairs}


def _unicode(value: Any) -> Any:
    if isinstance(value, list):
        return [_unicode(item) for item in value]
    return as_unicode(value) if isinstance(value, str) else value
