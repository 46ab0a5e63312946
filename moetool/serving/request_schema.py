"""The supported requests of the OpenAI protocol.

Unsupported fields that would change the answer are refused by name. Any other unknown field is ignored, because clients
send many. `null` means the default.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moetool.prompts.messages import MAX_TOOLS, ChatMessage, JsonObject, JsonValue, Only, RequestBody, Text
from moetool.serving.http_errors import Refusal

MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
"""Limit of characters in a stop string, and so of the text that each new text of a choice is searched with."""
MAX_BIASES = 1024
MAX_CHOICES = 128
"""Limit of choices in one request, over all its prompts."""

_FORMATS = {
    **dict.fromkeys(("guided_json", "json_schema"), "give the schema as response_format"),
    **dict.fromkeys(
        (
            *("structured_outputs", "guided_regex", "guided_choice", "guided_grammar"),  # vLLM
            *("regex", "ebnf", "structural_tag", "grammar"),  # SGLang, llama.cpp
        ),
        "this server's only formats are json_schema and json_object, as response_format",
    ),
}
"""Other servers' fields for the format of an answer, with the remedy."""

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stops = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]


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


class StreamOptions(RequestBody):
    include_usage: bool = False


class JsonSchema(RequestBody):
    """Schema of a response_format, which always holds; `strict` has no effect."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)

    json_schema: JsonObject = Field(default={}, alias="schema")


class ResponseFormat(RequestBody):
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


class GenerationRequest(RequestBody):
    """Fields of both endpoints."""

    model: Text
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Annotated[_Stops, BeforeValidator(_as_stops, json_schema_input_type=_Stop | _Stops)] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(default=False, description="Generate up to the limit; used by load generators")

    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASES)] = Field(default={})
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    top_k: int = Field(default=0, ge=-1, le=2**31, description="0 and -1 keep all tokens")
    min_p: float = Field(default=0.0, ge=0, le=1)
    response_format: ResponseFormat | None = None
    return_routed_experts: bool = Field(default=False, description="Experts of every token, as vLLM and SGLang do")
    return_token_ids: bool = Field(default=False, description="Token ids of prompt and answer, as vLLM does")

    min_tokens: Annotated[Any, Only(0)] = None
    bad_words: Annotated[Any, Only([])] = None
    stop_token_ids: Annotated[Any, Only([])] = None
    allowed_token_ids: Annotated[Any, Only([])] = None
    length_penalty: Annotated[Any, Only(1)] = None
    use_beam_search: Annotated[Any, Only(False)] = None

    @model_validator(mode="before")
    @classmethod
    def _format_by_its_name(cls, data: Any) -> Any:
        for name, remedy in _FORMATS.items() if isinstance(data, dict) else ():
            if data.get(name):
                raise ValueError(f"{name}: not supported; {remedy}")
        return data

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
        list[Text] | list[list[int]],
        BeforeValidator(_as_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(default=None, description="Must equal n")

    suffix: Annotated[Any, Only("")] = None

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


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(RequestBody):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[Text, JsonValue]

    name: FunctionName
    parameters: JsonObject = Field(default={})


class Tool(RequestBody):
    """A tool of type function; other types are hosted by vendors."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[Text, JsonValue]

    type: Literal["function"]
    function: Function


class ChosenFunction(RequestBody):
    """The name of a function."""

    name: str


class ToolChoice(RequestBody):
    """One function that must be called."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ConversationRequest(RequestBody):
    """Messages, and the functions that the answer may call."""

    model: Text
    messages: Sequence[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    chat_template_kwargs: JsonObject = Field(default={}, description="Variables of the chat template, as in vLLM")

    chat_template: Annotated[Any, Only()] = None
    continue_final_message: Annotated[Any, Only(False)] = None
    documents: Annotated[Any, Only([])] = None

    @model_validator(mode="after")
    def _chooses_a_tool(self) -> Self:
        chosen = self.tool_choice
        if isinstance(chosen, ToolChoice) and chosen.function.name not in {tool.function.name for tool in self.tools}:
            raise ValueError(f"tool_choice: there is no function {chosen.function.name[:64]!r} among the tools")
        if chosen == "required" and not self.tools:
            raise ValueError("tool_choice: required, and there are no tools to choose from")
        return self

    @classmethod
    def of(cls, values: dict[str, Any], **fields: str) -> Self:
        """Return the request with these values, which another protocol's request has.

        Args:
            fields: the other protocol's names of fields, where they differ.

        Raises:
            Refusal: the values are no request, in the other protocol's names.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            message = first["msg"].removeprefix("Value error, ")
            if first["loc"]:
                message = f"{first['loc'][0]}: {message}"
            name, _, reason = message.partition(":")
            name = fields.get(name, name)
            raise Refusal(f"{name}:{reason}", param=name) from None

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

    add_generation_prompt: Annotated[Any, Only(True)] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None

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


class TokenizeRequest(RequestBody):
    """POST /tokenize, of a text"""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ConversationRequest):
    """POST /tokenize, of a conversation"""

    model: Text | None = None  # type: ignore[assignment]
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(RequestBody):
    """POST /detokenize"""

    model: Text | None = None
    tokens: list[int]
