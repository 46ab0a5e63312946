"""Tools of a chat request: template arguments, grammar, parsing of the answer."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moetool.runtime.request import EngineLike, Grammar
from moetool.serving.grammars import Grammars, arguments_schema, calls_schema
from moetool.serving.http_errors import Refusal
from moetool.serving.json_stream import TextBuffer
from moetool.serving.request_schema import ChatRequest, ConversationRequest, ToolChoice
from moetool.serving.tool_calls import FORMATS, Parsing, format_of, named_call, required_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Grammar and parser of one request's answer.

    Attributes:
        parse: finds the calls in the answer; None where it is plain text.
        shown: special tokens to keep in the text for that.
    """

    grammar: Grammar | None = None
    parse: Callable[[TextBuffer], Parsing] | None = None
    shown: frozenset[int] = frozenset()


def template_of(engine: EngineLike, body: ConversationRequest) -> str:
    """Return the chat template for a conversation with these tools.

    Raises:
        Refusal: the model has no template, or the template does not support tools or their results.
    """
    if not engine.tokenizer.chat_template:
        raise Refusal(f"model {engine.model_name!r} has no chat template; use /v1/completions", param="messages")
    template: str = engine.tokenizer.get_chat_template(tools=offered(body))
    if body.offered and not re.search(r"\btools\b", template):
        raise Refusal("tools: the model's chat template takes no tools; leave them out", param="tools")
    results = any(message.role == "tool" or message.tool_calls for message in body.messages)
    if results and not re.search(r"['\"](tool|tool_calls|ipython)['\"]|\.tool_calls", template):
        raise Refusal("messages: the model's chat template has no place for calls and their results", param="messages")
    return template


def offered(body: ConversationRequest) -> list[dict[str, Any]] | None:
    """Return the tools in the form of templates."""
    return [tool.model_dump() for tool in body.offered] or None


def tool_use(engine: EngineLike, body: ChatRequest, grammars: Grammars, tool_format: str) -> ToolUse:
    """Return grammar and parser of a chat request's answer.

    Args:
        tool_format: format of calls (empty: by the template).

    Raises:
        Refusal: as `template_of`; the format is unknown; a schema cannot be followed.
    """
    template = template_of(engine, body)
    if body.offered and isinstance(body.tool_choice, ToolChoice):
        name = body.tool_choice.function.name
        grammar = grammars.json(arguments_schema(body.offered, name), "tools")
        return ToolUse(grammar=grammar, parse=named_call(name))
    if body.offered and body.tool_choice == "required":
        grammar = grammars.json(calls_schema(body.offered, several=body.parallel_tool_calls), "tools")
        return ToolUse(grammar=grammar, parse=required_calls)
    schema = body.response_format.schema_text if body.response_format is not None else None
    asked = grammars.json(schema, "response_format") if schema is not None else None
    found = tool_format or format_of(template)
    if body.offered and found is None:
        raise Refusal(
            "tools: the model's format of tool calls is unknown; start the server with --set server.tool_format=NAME, "
            f"for {', '.join(FORMATS)}, or choose a function with tool_choice",
            param="tools",
        )
    if found is None or not (body.offered or FORMATS[found].always):
        return ToolUse(grammar=asked)
    return ToolUse(grammar=asked, parse=FORMATS[found].parse, shown=_ids(engine.tokenizer, FORMATS[found].shown))


def _ids(tokenizer: Any, names: Any) -> frozenset[int]:
    """Return the vocabulary's tokens with these names."""
    found = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    return frozenset(id for name, id in found if id is not None and tokenizer.convert_ids_to_tokens(id) == name)
