"""The answers of OpenAI's Responses protocol: whole, and as events."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from moetool.base.errors import MoetoolError
from moetool.serving.generation import TextPiece
from moetool.serving.http_errors import describe
from moetool.serving.json_stream import as_unicode
from moetool.serving.replies import Json, PartsReply, ReplySetup, event_of
from moetool.serving.responses_schema import CALLABLE, ResponsesRequest, ResponsesTool

_TEXT_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponsesReply(PartsReply):
    """Reply of /v1/responses."""

    def __init__(self, request: ResponsesRequest, setup: ReplySetup) -> None:
        super().__init__(setup)
        self._request = request
        self._functions = request.functions
        self._id = f"resp_{uuid.uuid4().hex}"
        self._began = int(time.time())
        self._items: list[Json] = []
        self._num_events = 0

    def whole(self, pieces: Sequence[Sequence[TextPiece]], num_generated: int, num_reused: int) -> Json:
        self.assemble(pieces[0])
        return self._response(self._status, self._usage(num_generated, num_reused))

    def opening(self) -> Iterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def alive(self) -> Iterator[str]:
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def closing(self, num_generated: int, num_reused: int) -> Iterator[str]:
        yield from self.end()
        response = self._response(self._status, self._usage(num_generated, num_reused))
        yield self._event(f"response.{self._status}", response=response)

    def failure(self, error: MoetoolError) -> str:
        _, body = describe(error)
        reason = {"code": body["error"]["code"] or "server_error", "message": body["error"]["message"]}
        return self._event("response.failed", response=self._response("failed") | {"error": reason})

    def begin_part(self, kind: str, name: str) -> Iterator[str]:
        item: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": []}
        if kind == "reasoning":
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": []}
        elif kind == "call":
            namespace, function = self._functions.get(name, (None, None))
            call = {"call_id": f"call_{uuid.uuid4().hex[:24]}", "name": name if function is None else function.name}
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", **call, "arguments": ""}
            if function is not None and function.type == "custom":
                item = {"id": f"ctc_{uuid.uuid4().hex}", "type": "custom_tool_call", **call, "input": ""}
            item |= {} if namespace is None else {"namespace": namespace}
        item["status"] = "in_progress"
        self._items.append(item)
        yield self._event("response.output_item.added", **self._place, item=item)
        if kind != "call":
            yield self._event("response.content_part.added", **self._content_place, part=self._part(""))

    def add_text(self, text: str) -> Iterator[str]:
        if self._kind == "custom_tool_call":
            return  # its input is within the arguments, known at their end
        if self._kind == "function_call":
            yield self._event("response.function_call_arguments.delta", **self._item_place, delta=text)
        else:
            yield self._event(f"response.{_TEXT_PARTS[self._kind]}.delta", **self._text_place, delta=text)

    def end_part(self, text: str) -> Iterator[str]:
        item = self._items[-1]
        if self._kind == "function_call":
            if not text:
                text = "{}"
                yield from self.add_text(text)
            item["arguments"] = text
            done = {**self._item_place, "name": item["name"], "arguments": text}
            yield self._event("response.function_call_arguments.done", **done)
        elif self._kind == "custom_tool_call":
            item["input"] = _input(text)
            yield self._event("response.custom_tool_call_input.delta", **self._item_place, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **self._item_place, input=item["input"])
        else:
            yield self._event(f"response.{_TEXT_PARTS[self._kind]}.done", **self._text_place, text=text)
            item["content"] = [self._part(text)]
            yield self._event("response.content_part.done", **self._content_place, part=self._part(text))
        item["status"] = "incomplete" if self.last.finish == "length" else "completed"
        yield self._event("response.output_item.done", **self._place, item=item)

    @property
    def _kind(self) -> str:
        """Return the type of the last item."""
        return str(self._items[-1]["type"])

    @property
    def _place(self) -> Json:
        return {"output_index": len(self._items) - 1}

    @property
    def _item_place(self) -> Json:
        return {**self._place, "item_id": self._items[-1]["id"]}

    @property
    def _content_place(self) -> Json:
        return {**self._item_place, "content_index": 0}

    @property
    def _text_place(self) -> Json:
        return {**self._content_place, **({"logprobs": []} if self._kind == "message" else {})}

    def _part(self, text: str) -> Json:
        notes: Json = {"annotations": [], "logprobs": []} if self._kind == "message" else {}
        return {"type": _TEXT_PARTS[self._kind], "text": text, **notes}

    @property
    def _status(self) -> str:
        return "incomplete" if self.last.finish == "length" else "completed"

    def _event(self, name: str, /, **fields: Any) -> str:
        self._num_events += 1
        return event_of({"type": name, "sequence_number": self._num_events - 1, **fields}, name)

    def _response(self, status: str, usage: Json | None = None) -> Json:
        request = self._request
        choice = request.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._began,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self.setup.model,
            "output": self._items if status != "in_progress" else [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": request.text.format.model_dump(by_alias=True, exclude_unset=True) or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [_echo(tool) for tool in request.tools if tool.type in (*CALLABLE, "namespace")],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

    def _usage(self, num_generated: int, num_reused: int) -> Json:
        return {
            "input_tokens": self.setup.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_reused, "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.setup.num_prompt_tokens + num_generated,
        }


def _echo(tool: ResponsesTool) -> Json:
    """Return a tool as its request has it: only a namespace has tools, only a function parameters."""
    inner = {"tools": list(map(_echo, tool.tools))} if tool.type == "namespace" else {}
    return tool.model_dump(exclude={"tools"} if tool.type == "function" else {"tools", "parameters"}) | inner


def _input(arguments: str) -> str:
    """Return the text for a custom tool; the arguments as they are where they have no such text."""
    try:
        return as_unicode(json.loads(arguments)["input"])
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return arguments
