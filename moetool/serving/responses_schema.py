"""The supported requests of OpenAI's Responses protocol, and the chat requests that they mean.

Nothing is stored, so requests that need an earlier response are refused by name. Tools that a vendor hosts are left out
of a request that also has functions, since agents send them with every request. A custom tool, which takes a text, is a
function of one string; a grammar of the text is not enforced.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from moetool.prompts.messages import MAX_TOOLS, JsonObject, JsonValue, Only, RequestBody, Text, join_turns
from moetool.serving.request_schema import ChatRequest, FunctionName, JsonSchema


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value]


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(RequestBody):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalPart(RequestBody):
    """A refusal to answer."""

    type: Literal["refusal"]
    refusal: Text


_Part = TextPart | RefusalPart
_Parts = Annotated[
    list[Annotated[_Part, Field(discriminator="type")]],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[_Part]),
]


class MessageItem(RequestBody):
    """A message."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: _Parts


class ReasoningPart(RequestBody):
    """A text of the model's reasoning."""

    text: Text


class ReasoningItem(RequestBody):
    """The model's reasoning."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] = Field(default=[])


class FunctionCallItem(RequestBody):
    """A call by the model."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text = ""


class CustomCallItem(RequestBody):
    """A call of a custom tool by the model."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text


class FunctionOutputItem(RequestBody):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: _Parts


_Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | FunctionOutputItem


CALLABLE = ("function", "custom")


class ResponsesTool(RequestBody):
    """A function, a custom tool, a namespace of both, or a tool that a vendor hosts."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[Text, JsonValue]

    type: Text
    name: FunctionName | None = None
    description: Text | None = None
    parameters: JsonObject = Field(default={})
    tools: "list[ResponsesTool]" = Field(default=[], max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if self.name is None and self.type in (*CALLABLE, "namespace"):
            raise ValueError(f"a tool of type {self.type!r} needs a name")
        return self


class ResponsesToolChoice(RequestBody):
    """One function that must be called."""

    type: Literal["function", "custom"]
    name: Text


class TextFormat(JsonSchema):
    """The form of an answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(RequestBody):
    """The answer's text."""

    format: TextFormat = TextFormat()


class ResponsesRequest(RequestBody):
    """POST /v1/responses"""

    model: Text
    input: Annotated[
        list[Annotated[_Item, Field(discriminator="type")]],
        BeforeValidator(_as_items, json_schema_input_type=str | list[_Item]),
    ]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    tools: list[ResponsesTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    stream: bool = False
    metadata: JsonObject = Field(default={}, description="Returned with the answer")

    chat_template_kwargs: Annotated[Any, Only({})] = None
    store: Annotated[Any, Only(False)] = None
    previous_response_id: Annotated[Any, Only()] = None
    conversation: Annotated[Any, Only()] = None
    background: Annotated[Any, Only(False)] = None
    prompt: Annotated[Any, Only()] = None
    truncation: Annotated[Any, Only("disabled")] = None
    top_logprobs: Annotated[Any, Only(0)] = None
    include: list[Text] = Field(default=[])

    @field_validator("include")
    @classmethod
    def _includes_no_logprobs(cls, value: list[str]) -> list[str]:
        if "message.output_text.logprobs" in value:
            raise ValueError("message.output_text.logprobs is not supported by this server; leave it out")
        return value

    @model_validator(mode="after")
    def _has_functions_among_its_tools(self) -> Self:
        if self.tools and not self.functions:
            kinds = ", ".join(sorted({tool.type for tool in self.tools}))
            raise ValueError(f"tools: this server hosts none ({kinds[:200]}); send functions, or leave tools out")
        return self

    @property
    def functions(self) -> dict[str, tuple[str | None, ResponsesTool]]:
        """Return (namespace, function) by the name that the model sees."""
        found: dict[str, tuple[str | None, ResponsesTool]] = {}
        for tool in self.tools:
            if tool.type in CALLABLE:
                found[str(tool.name)] = (None, tool)
            elif tool.type == "namespace":
                functions = [inner for inner in tool.tools if inner.type in CALLABLE]
                found |= {f"{tool.name}.{inner.name}": (tool.name, inner) for inner in functions}
        return found

    def as_chat(self) -> ChatRequest:
        """Return the chat request that this one means. Raises: Refusal."""
        choice, form = self.tool_choice, self.text.format
        schema = {"json_schema": {"schema": form.json_schema}} if form.type == "json_schema" else {}
        names = ("model", "temperature", "top_p", "parallel_tool_calls", "stream")
        return ChatRequest.of(
            {name: getattr(self, name) for name in names}
            | {
                "messages": join_turns(self._turns()),
                "max_tokens": self.max_output_tokens,
                "tools": [
                    {"type": "function", "function": _function(name, tool)}
                    for name, (_, tool) in self.functions.items()
                ],
                "tool_choice": choice if isinstance(choice, str) else {"function": {"name": choice.name}},
                "response_format": {"type": form.type, **schema},
            },
            messages="input",
            response_format="text.format",
        )

    def _turns(self) -> Iterator[dict[str, Any]]:
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        names: dict[str, str] = {}
        for item in self.input:
            match item:
                case MessageItem():
                    yield {"role": item.role, "content": _text(item.content)}
                case ReasoningItem():
                    reasoning = "\n\n".join(part.text for part in item.content)
                    yield {"role": "assistant", "content": "", "reasoning_content": reasoning}
                case FunctionCallItem():
                    name = f"{item.namespace}.{item.name}" if item.namespace else item.name
                    names[item.call_id] = name
                    call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
                    yield {"role": "assistant", "content": "", "tool_calls": [call]}
                case CustomCallItem():
                    names[item.call_id] = item.name
                    arguments = json.dumps({"input": item.input}, ensure_ascii=False)
                    call = {"id": item.call_id, "function": {"name": item.name, "arguments": arguments}}
                    yield {"role": "assistant", "content": "", "tool_calls": [call]}
                case FunctionOutputItem():
                    result = {"tool_call_id": item.call_id, "name": names.get(item.call_id)}
                    yield {"role": "tool", "content": _text(item.output), **result}


def _text(parts: list[TextPart | RefusalPart]) -> str:
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)


def _function(name: str, tool: ResponsesTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": name, **described, "parameters": text if tool.type == "custom" else tool.parameters}
