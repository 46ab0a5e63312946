"""Messages of a chat in OpenAI's form, as the server's requests and files of prompts have them."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

MAX_TOOLS = 128
"""Limit of calls in a message, and of tools in a request."""


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write half of a surrogate pair
        raise ValueError("is not valid Unicode") from None
    return value


Text = Annotated[str, AfterValidator(_unicode)]


class Only:
    """Validator of a field that is accepted only with its neutral value."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._neutral, None]}

    def _check(self, value: Any) -> Any:
        if value not in self._neutral:
            raise ValueError("not supported by this server; leave it out")
        return value


class RequestBody(BaseModel):
    """A part of a request; unknown fields are ignored, and null means the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


def _as_text(value: Any) -> str:
    """Return the content of a message: a string, or parts of type text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content parts")
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"content parts of type {kind!r} are not supported, only 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError("a content part of type 'text' must have a string in 'text'")
        texts.append(part["text"])
    return "".join(texts)


_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


class FunctionCall(RequestBody):
    """A call by the model; `arguments` are JSON in a string."""

    name: Text
    arguments: Text = ""


class ToolCall(RequestBody):
    """A call in a message of the assistant."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestBody):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, BeforeValidator(_as_text), WithJsonSchema(_CONTENT)] | None = None
    tool_calls: list[ToolCall] = Field(default=[], max_length=MAX_TOOLS)
    tool_call_id: Text | None = None
    name: Text | None = None
    reasoning_content: Text | None = None

    function_call: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _require_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls of the assistant")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant may have tool_calls")
        return self


def for_template(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form of templates. Few know OpenAI's newer name for the system role."""
    made: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    made["content"] = message.content or ""
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": as_template_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "assistant" and message.reasoning_content:
        made["reasoning_content"] = message.reasoning_content
        if not (message.content and message.tool_calls):  # gpt-oss's template has one place for both
            made["thinking"] = message.reasoning_content
    named = {"tool_call_id": message.tool_call_id, "name": message.name}
    return made | {name: value for name, value in named.items() if value is not None and message.role == "tool"}


def as_template_arguments(text: Any) -> Any:
    """Return the arguments of a call for templates: an object, parsed from the client's text if possible."""
    if text is None or (isinstance(text, str) and not text.strip()):  # a function without parameters
        return {}
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
    if value is None:
        return {}
    return value if isinstance(value, dict) else text


def join_turns(turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages that parts of a conversation make, as most chat templates take them.

    The parts of one turn become one message. Instructions after the first message become text of the user's turn: many
    templates refuse them there, and some drop them.

    Args:
        turns: a `ChatMessage` in JSON for each part.
    """
    joined: list[dict[str, Any]] = []
    for turn in turns:
        role = turn["role"]
        last: dict[str, Any] = joined[-1] if joined else {"role": "system"}
        if role in ("system", "developer"):
            role = "system" if last["role"] == "system" else "user"
        if not joined or role == "tool" or role != last["role"]:
            joined.append({**turn, "role": role})
            continue
        for name in ("content", "reasoning_content"):
            if texts := [text for text in (last.get(name), turn.get(name)) if text]:
                last[name] = "\n\n".join(texts)
        if calls := [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]:
            last["tool_calls"] = calls
    return joined
