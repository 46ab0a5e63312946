"""The supported requests of the OpenAI protocol.

Unsupported fields that would change the answer are refused by name. Any other unknown field is ignored, because clients
send many. `null` means the default.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
"""Limit of characters in a stop string, and so of the text that each new text of a choice is searched with."""
MAX_BIASES = 1024
MAX_TOOLS = 128
MAX_CHOICES = 128
"""Limit of choices in one request, over all its prompts."""


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write half of a surrogate pair
        raise ValueError("is not valid Unicode") from None
    return value


_Text = Annotated[str, AfterValidator(_unicode)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]


class _Only:
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


def _as_prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _are_ids(value):
            return [value]
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _as_stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


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


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(_Body):
    include_usage: bool = False


class JsonSchema(_Body):
    """Schema of a response_format, which always holds; `strict` has no effect."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    json_schema: dict[str, Any] = Field(default={}, alias="schema")


class ResponseFormat(_Body):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _with_its_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and only with it")
        return self

    @property
    def schema_text(self) -> str | None:
        """Return the JSON schema of the answer; None where any text is allowed."""
        if self.type == "text":
            return None
        return json.dumps(self.json_schema.json_schema if self.json_schema else {"type": "object"})


class GenerationRequest(_Body):
    """Fields of both endpoints."""

    model: _Text
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Annotated[_Stops, BeforeValidator(_as_stops, json_schema_input_type=_Stop | _Stops)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(default=False, description="Generate up to the limit; used by load generators")

    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASES)] = {}
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    top_k: int = Field(default=0, ge=-1, le=2**31, description="0 and -1 keep all tokens")
    min_p: float = Field(default=0.0, ge=0, le=1)
    response_format: ResponseFormat | None = None
    return_routed_experts: bool = Field(default=False, description="Experts of every token, as vLLM and SGLang do")
    return_token_ids: bool = Field(default=False, description="Token ids of prompt and answer, as vLLM does")

    min_tokens: Annotated[Any, _Only(0)] = None

    @field_validator("stream_options")
    @classmethod
    def _for_streams(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("only allowed with stream")
        return value

    @field_validator("return_routed_experts", "return_token_ids")
    @classmethod
    def _with_whole_answers(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("stream"):
            raise ValueError("not supported with stream; leave out stream")
        return value

    @model_validator(mode="after")
    def _may_end(self) -> Self:
        if self.ignore_eos and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("ignore_eos: an answer with a response_format ends by itself; leave one of them out")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        list[_Text] | list[list[int]],
        BeforeValidator(_as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(default=None, description="Must equal n")

    suffix: Annotated[Any, _Only("")] = None

    @field_validator("prompt")
    @classmethod
    def _bounded(cls, value: list[Any], info: ValidationInfo) -> list[Any]:
        if (num_choices := info.data.get("n", 1) * len(value)) > MAX_CHOICES:
            raise ValueError(f"{num_choices} choices in one request, expected at most {MAX_CHOICES}")
        return value

    @field_validator("best_of")
    @classmethod
    def _as_many_as_returned(cls, value: int, info: ValidationInfo) -> int:
        if value != info.data.get("n"):
            raise ValueError("not supported by this server unless equal to n")
        return value


class FunctionCall(_Body):
    """A call by the model; `arguments` are JSON in a string."""

    name: _Text
    arguments: _Text = ""


class ToolCall(_Body):
    """A call in a message of the assistant."""

    id: _Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[_Text, BeforeValidator(_as_text), WithJsonSchema(_CONTENT)] | None = None
    tool_calls: list[ToolCall] = Field(default=[], max_length=MAX_TOOLS)
    tool_call_id: _Text | None = None
    name: _Text | None = None

    function_call: Annotated[Any, _Only()] = None

    @model_validator(mode="after")
    def _require_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls of the assistant")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the assistant may have tool_calls")
        return self


class Function(_Body):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    parameters: dict[str, Any] = {}


class Tool(_Body):
    """A tool of type function; other types are hosted by vendors."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class ChosenFunction(_Body):
    """The name of a function."""

    name: str


class ToolChoice(_Body):
    """One function that must be called."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ConversationRequest(_Body):
    """Messages, and the functions that the answer may call."""

    model: _Text
    messages: Sequence[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"

    @model_validator(mode="after")
    def _chooses_a_tool(self) -> Self:
        chosen = self.tool_choice
        if isinstance(chosen, ToolChoice) and chosen.function.name not in {tool.function.name for tool in self.tools}:
            raise ValueError(f"tool_choice: there is no function {chosen.function.name[:64]!r} among the tools")
        if chosen == "required" and not self.tools:
            raise ValueError("tool_choice: required, and there are no tools to choose from")
        return self

    @property
    def offered(self) -> list[Tool]:
        """Return the functions that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools


class ChatRequest(GenerationRequest, ConversationRequest):
    """POST /v1/chat/completions"""

    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    parallel_tool_calls: bool = True

    functions: Annotated[Any, _Only([])] = None
    function_call: Annotated[Any, _Only("none", "auto")] = None
    modalities: Annotated[Any, _Only(["text"])] = None
    audio: Annotated[Any, _Only()] = None
    web_search_options: Annotated[Any, _Only()] = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if not info.data.get("logprobs"):
            raise ValueError("only allowed with logprobs")
        return value

    @model_validator(mode="after")
    def _one_form_of_answer(self) -> Self:
        forced = self.offered and self.tool_choice != "auto"
        if forced and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format: tool_choice makes the answer a call; leave one of them out")
        return self


class TokenizeRequest(_Body):
    """POST /tokenize, of a text"""

    model: _Text | None = None
    prompt: _Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ConversationRequest):
    """POST /tokenize, of a conversation"""

    model: _Text | None = None  # type: ignore[assignment]
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """POST /detokenize"""

    model: _Text | None = None
    tokens: list[int]
