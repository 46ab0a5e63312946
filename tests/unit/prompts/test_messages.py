"""Messages in the form of chat templates."""

import pytest
from pydantic import ValidationError

from moetool.prompts.messages import ChatMessage, as_template_arguments, for_template, join_turns


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
    with pytest.raises(ValidationError, match="tool_calls"):
        ChatMessage.model_validate({"role": "user", "content": None})


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
