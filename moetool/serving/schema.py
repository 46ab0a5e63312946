"""The requests of the OpenAI protocol, as far as they are served.

Fields that would change the answer and are not served are refused by name; any other unknown field is ignored,
because clients send many. `null` means the default.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

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
"""Characters of a stop string: each choice of a request prepares its own search for it."""
MAX_CHOICES = 128
"""Choices of one request, over all its prompts."""


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write half of a surrogate pair
        raise ValueError("is not valid Unicode") from None
    return value


_Text = Annotated[str, AfterValidator(_unicode)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]


class _Only:
    """For a field that is accepted only with a value that changes nothing."""

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
    """The content of a message: a string, or parts of type text."""
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


class GenerationRequest(_Body):
    """What both endpoints have in common."""

    model: _Text
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Annotated[_Stops, BeforeValidator(_as_stops, json_schema_input_type=_Stop | _Stops)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(default=False, description="Generate to the limit: what load generators ask for")

    logit_bias: Annotated[Any, _Only({})] = None
    presence_penalty: Annotated[Any, _Only(0)] = None
    frequency_penalty: Annotated[Any, _Only(0)] = None
    repetition_penalty: Annotated[Any, _Only(1)] = None
    top_k: Annotated[Any, _Only(0, -1)] = None
    min_p: Annotated[Any, _Only(0)] = None
    min_tokens: Annotated[Any, _Only(0)] = None
    response_format: Annotated[Any, _Only({"type": "text"})] = None

    @field_validator("stream_options")
    @classmethod
    def _for_streams(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if not info.data.get("stream"):
            raise ValueError("only allowed with stream")
        return value

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
    best_of: int | None = Field(default=None, description="Only the same as n")

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


class Message(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[_Text, BeforeValidator(_as_text), WithJsonSchema(_CONTENT)]

    tool_calls: Annotated[Any, _Only([])] = None
    function_call: Annotated[Any, _Only()] = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Sequence[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    tools: Annotated[Any, _Only([])] = None
    tool_choice: Annotated[Any, _Only("none", "auto")] = None
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
