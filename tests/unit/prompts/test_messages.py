"""Messages in the form of chat templates."""

import pytest
from pydantic import ValidationError

from moetool.prompts.messages import ChatMessage, as_template_arguments, for_template


def test_arguments_for_templates() -> None:
    assert as_template_arguments('{"a": 1}') == {"a": 1}
    assert as_template_arguments("no json") == "no json" and as_template_arguments("[1]") == "[1]"


def test_templates_get_system_for_developer_and_text_for_null() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    assert for_template(message)["content"] == ""
    assert for_template(message)["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert for_template(ChatMessage(role="developer", content="x")) == {"role": "system", "content": "x"}
    with pytest.raises(ValidationError, match="tool_calls"):
        ChatMessage.model_validate({"role": "user", "content": None})
