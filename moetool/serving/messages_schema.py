"""The supported requests of Anthropic's Messages protocol, and the chat requests that they mean.

Fields that choose a vendor's accounting, caching or effort are ignored, as are thinking budgets: a model thinks as its
chat template says. Images, documents and hosted tools are refused by name.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from moetool.prompts.messages import MAX_TOOLS, JsonObject, Only, RequestBody, Text, join_turns
from moetool.serving.request_schema import MAX_STOP_LENGTH, MAX_STOPS, ChatRequest, FunctionName, JsonSchema

_BILLING = "x-anthropic-billing-header:"
"""Beginning of a text among the instructions that is not meant for the model, and differs between versions."""


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(RequestBody):
    """A text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(RequestBody):
    """The model's reasoning; its signature is ignored."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(RequestBody):
    """Reasoning that only its vendor can read; ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(RequestBody):
    """A call by the model."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject = Field(default={})


TextBlocks = Annotated[
    list[Annotated[TextBlock, Field(discriminator="type")]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(RequestBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextBlocks = Field(default=[])


_Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessagesTurn(RequestBody):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[_Block, Field(discriminator="type")]],
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Block]),
    ]


def _not_hosted(kind: Any) -> Any:
    if kind != "custom":
        raise ValueError(f"this server hosts no tool of type {str(kind)[:64]!r}; leave the tool out")
    return kind


class MessagesTool(RequestBody):
    """A function that the model may call."""

    type: Annotated[Any, AfterValidator(_not_hosted), WithJsonSchema({"enum": ["custom", None]})] = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonObject = Field(default={})


class MessagesToolChoice(RequestBody):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(JsonSchema):
    """The schema of an answer."""

    type: Literal["json_schema"]


class OutputConfig(RequestBody):
    """The form of an answer."""

    format: OutputFormat | None = None


class MessagesPrompt(RequestBody):
    """POST /v1/messages/count_tokens"""

    model: Text
    messages: list[MessagesTurn] = Field(min_length=1)
    system: TextBlocks = Field(default=[])
    tools: list[MessagesTool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice = MessagesToolChoice(type="auto")
    output_config: OutputConfig | None = None

    chat_template_kwargs: Annotated[Any, Only({})] = None
    mcp_servers: Annotated[Any, Only([])] = None
    container: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> Self:
        said = [message for message in self.messages if message.content]
        if not said:
            raise ValueError("messages: none has content")
        if said[-1].role == "assistant":
            raise ValueError("messages: the last one must be the user's; this server cannot continue an answer")
        return self

    def as_chat(self) -> ChatRequest:
        """Return the chat request that this one means. Raises: Refusal."""
        choice = self.tool_choice
        kinds = {"auto": "auto", "any": "required", "none": "none", "tool": {"function": {"name": choice.name or ""}}}
        values: dict[str, Any] = {
            "model": self.model,
            "messages": join_turns(self._turns()),
            "tools": [{"type": "function", "function": _function(tool)} for tool in self.tools],
            "tool_choice": kinds[choice.type],
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"schema": self.output_config.format.json_schema}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest.of(values | self._settings(), response_format="output_config.format", stop="stop_sequences")

    def _settings(self) -> dict[str, Any]:
        """Return the fields of the chat request that say how to generate."""
        return {}

    def _turns(self) -> Iterator[dict[str, Any]]:
        for text in self.system:
            if not text.text.startswith(_BILLING):
                yield {"role": "system", "content": text.text}
        names: dict[str, str] = {}
        for message in self.messages:
            for block in message.content:
                match block:
                    case TextBlock():
                        yield {"role": message.role, "content": block.text}
                    case ThinkingBlock():
                        yield {"role": message.role, "content": "", "reasoning_content": block.thinking}
                    case ToolUseBlock():
                        names[block.id] = block.name
                        function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                        yield {
                            "role": message.role,
                            "content": "",
                            "tool_calls": [{"id": block.id, "function": function}],
                        }
                    case ToolResultBlock():
                        result = {"tool_call_id": block.tool_use_id, "name": names.get(block.tool_use_id)}
                        yield {"role": "tool", "content": "\n".join(part.text for part in block.content), **result}


class MessagesRequest(MessagesPrompt):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0, le=1)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0, le=2**31)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] = Field(
        default=[], max_length=MAX_STOPS
    )
    stream: bool = False

    def _settings(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _function(tool: MessagesTool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": tool.input_schema}
