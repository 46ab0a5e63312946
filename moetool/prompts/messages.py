"""Messages of a chat in OpenAI's form, as the server's requests and files of prompts have them."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
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

MAX_DEPTH = 100
"""Limit of nesting in JSON values, below the depth at which templates, schemas and answers fail."""


def as_plain_json(value: Any) -> Any:
    """Return a parsed JSON value that can be written again. Raises: ValueError: it cannot."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return value
        inner: list[Any] = []
        for item in level:
            match item:
                case dict():
                    inner += [*item, *item.values()]
                case list():
                    inner += item
                case str():
                    _unicode(item)
                case float() if not math.isfinite(item):
                    raise ValueError(f"has the number {item}, which JSON lacks")
        level = inner
    raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")


JsonValue = Annotated[Any, AfterValidator(as_plain_json)]
JsonObject = Annotated[dict[str, Any], AfterValidator(as_plain_json)]


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
        said = self.tool_calls or (self.role == "assistant" and self.reasoning_content is not None)
        if self.content is None and not said and self.role != "tool":
            raise ValueError(f"a message of the role {self.role} needs content (the assistant: or tool_calls)")
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


def fit_template(messages: Iterable[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return messages in the form of templates, as this one takes their calls.

    A template that shows only the first call of a message (gpt-oss, Llama 3.1) gets a message for each call, followed
    by its result. One that checks for ids of nine characters (Mistral) gets such ids, and one that appends arguments
    to its text (DeepSeek, Functionary) gets them as text.
    """
    fitted = list(messages)
    if "tool_calls[0]" in template and not re.search(r"\bfor\s+\w+\s+in\s[^%]*tool_calls", template):
        fitted = list(_one_call_each(fitted))
    if re.search(r"id\s*\|\s*length\s*[!=]=\s*9\b", template):
        fitted = list(_with_short_ids(fitted))
    if re.search(r"arguments['\"]?\]?\s*\+|\+\s*[\w.'\"\[\]]+arguments['\"]?\]?\s*-?}}", template):
        fitted = [_with_text_arguments(message) for message in fitted]
    return fitted


def _one_call_each(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            yield message
            continue
        results: list[dict[str, Any]] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for call in calls:
            yield message | {"tool_calls": [call]}
            message = {"role": "assistant", "content": ""}
            own = (result for result in results if result.get("tool_call_id") in (call["id"], None))
            if (result := next(own, None)) is not None:
                results.remove(result)
                yield result
        yield from results


def _with_short_ids(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    unanswered: list[str] = []  # ids of the last calls, for results without one
    for at, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [call | {"id": _short_id(call["id"] or f"{at}.{number}")} for number, call in enumerate(calls)]
            unanswered = [call["id"] for call in calls]
            yield message | {"tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            short = _short_id(given or (unanswered[0] if unanswered else str(at)))
            unanswered = [id for id in unanswered if id != short]
            yield message | {"tool_call_id": short}
        else:
            yield message


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls} if calls else message


def _short_id(id: str) -> str:
    return id if re.fullmatch(r"[a-zA-Z0-9]{9}", id) else hashlib.sha256(id.encode()).hexdigest()[:9]


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
