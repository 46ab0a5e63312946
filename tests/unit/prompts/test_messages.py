"""Messages in the form of chat templates."""

from typing import Any

import pytest
from pydantic import ValidationError

from moetool.prompts.messages import (
    MAX_DEPTH,
    ChatMessage,
    as_plain_json,
    as_template_arguments,
    fit_template,
    for_template,
    join_turns,
)


def test_arguments_for_templates() -> None:
    assert as_template_arguments('{"a": 1}') == {"a": 1}
    assert as_template_arguments("no json") == "no json" and as_template_arguments("[1]") == "[1]"
    assert [as_template_arguments(none) for none in ("", " \n", "null", None)] == [{}] * 4


def test_templates_get_system_for_developer_and_text_for_null() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    assert for_template(message)["content"] == ""
    assert for_template(message)["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert for_template(ChatMessage(role="developer", content="x")) == {"role": "system", "content": "x"}
    for role in ("user", "system", "developer", "assistant"):
        with pytest.raises(ValidationError, match=role):
            ChatMessage.model_validate({"role": role, "content": None})


@pytest.mark.parametrize(
    "more", [{"role": "tool", "tool_call_id": "c"}, {"role": "assistant", "reasoning_content": "x"}]
)
def test_content_that_is_null_is_empty(more: dict[str, Any]) -> None:
    made = for_template(ChatMessage.model_validate(more | {"content": None}))
    assert made["content"] == "" and made == for_template(ChatMessage.model_validate(more | {"content": ""}))


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": None}, {}, {"arguments": "{}"}])
def test_calls_without_arguments_have_an_object(arguments: dict[str, object]) -> None:
    calls = [{"id": str(number), "function": {"name": "now", **arguments}} for number in range(2)]
    message = ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": calls})
    assert [call["function"]["arguments"] for call in for_template(message)["tool_calls"]] == [{}, {}]


def test_reasoning_has_the_names_of_templates() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert for_template(ChatMessage.model_validate(message)) == message | {"thinking": "hm"}
    called = message | {"tool_calls": [{"function": {"name": "f"}}]}
    assert "thinking" not in for_template(ChatMessage.model_validate(called))
    assert "reasoning_content" not in for_template(ChatMessage.model_validate(message | {"role": "user"}))


def test_parts_of_a_turn_are_one_message() -> None:
    call = {"id": "c", "function": {"name": "f"}}
    turns = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "system", "content": "f"},
    ]
    assert join_turns(turns) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\n\nd"},
        {"role": "assistant", "content": "e", "reasoning_content": "hm", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "f"},
    ]
    assert join_turns([{"role": "developer", "content": "a"}]) == [{"role": "system", "content": "a"}]


def _call(id: str | None, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}


def _shown(messages: list[dict[str, Any]]) -> list[str]:
    """Names of calls and texts of other messages, in order."""
    shown: list[str] = []
    for message in messages:
        shown += [call["function"]["name"] for call in message.get("tool_calls", ())] or [message["content"]]
    return shown


ONE_CALL = "{% set tool_call = message.tool_calls[0] %}{{ tool_call.function.name }}"


@pytest.mark.parametrize(
    ("ids", "results", "order"),
    [
        (("1", "2"), [("1", "ra"), ("2", "rb")], ["A", "ra", "B", "rb"]),
        (("1", "2"), [("2", "rb"), ("1", "ra")], ["A", "ra", "B", "rb"]),
        (("1", "2"), [("2", "rb")], ["A", "B", "rb"]),
        (("1", "2"), [], ["A", "B"]),
        ((None, None), [(None, "ra"), (None, "rb")], ["A", "ra", "B", "rb"]),
        (("1", "2"), [("1", "ra"), ("3", "rc"), ("2", "rb")], ["A", "ra", "B", "rb", "rc"]),
    ],
)
def test_a_template_that_shows_one_call_gets_each_before_its_result(
    ids: tuple[str | None, ...], results: list[tuple[str | None, str]], order: list[str]
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": list(map(_call, ids, "AB"))},
        *({"role": "tool", "content": text} | ({"tool_call_id": id} if id else {}) for id, text in results),
        {"role": "user", "content": "And?"},
    ]
    fitted = fit_template(messages, ONE_CALL)
    assert _shown(fitted) == [*order, "And?"]
    assert [message["thinking"] for message in fitted if "thinking" in message] == ["hm"]
    several = "{% if m.tool_calls[0] %}{% for tool_call in m.tool_calls %}{{ tool_call }}{% endfor %}{% endif %}"
    assert fit_template(messages, several) == messages


def test_ids_of_nine_characters_where_the_template_checks_them() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [_call("toolu_0123456789", "A"), _call("abcDEF123", "B")]},
        {"role": "tool", "content": "ra", "tool_call_id": "toolu_0123456789"},
        {"role": "tool", "content": "rb", "tool_call_id": "abcDEF123"},
        {"role": "assistant", "content": "", "tool_calls": [_call(None, "A"), _call(None, "B")]},
        {"role": "tool", "content": "ra"},
        {"role": "tool", "content": "rb"},
    ]
    checks = "{%- if not tool_call.id is defined or tool_call.id|length != 9 %}"
    fitted = fit_template(messages, checks)
    called = [call["id"] for message in fitted for call in message.get("tool_calls", ())]
    assert called == [message["tool_call_id"] for message in fitted if message["role"] == "tool"]
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in called)
    assert len(set(called)) == 4 and called[1] == "abcDEF123"
    assert fit_template(messages, "{{ tool_call.id }}") == messages


def test_arguments_are_text_where_the_template_appends_them() -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [_call("1", "A")]}, {"role": "user", "content": "b"}]
    messages[0]["tool_calls"][0]["function"]["arguments"] = {"city": "Köln"}  # type: ignore[index]
    first, last = fit_template(messages, "{{ '```json' + tool['function']['arguments'] + '```' }}")
    assert first["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}' and last == messages[1]
    assert fit_template(messages, "{{ tool['function']['arguments'] | tojson }}") == messages


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), "\ud800", {"\udc00": 1}, [{"a": ["\ud800"]}]])
def test_values_that_no_json_can_have(value: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON|Unicode"):
        as_plain_json({"a": value})


def test_depth_is_bounded() -> None:
    value: Any = "x"
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert as_plain_json(value) is value
    with pytest.raises(ValueError, match=str(MAX_DEPTH)):
        as_plain_json([value])
