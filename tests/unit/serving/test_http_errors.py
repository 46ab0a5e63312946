"""Errors in the names of the protocol that a client speaks."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict

from moetool.serving.http_errors import error_object, install


@pytest.mark.parametrize(
    ("param", "message", "expected"),
    [
        (
            "messages",
            "9 were requested (8 in the messages, 1 in the answer); shorten the messages or lower max_tokens",
            "9 were requested (8 in the input, 1 in the answer); shorten the input or lower max_output_tokens",
        ),
        ("messages", "messages: 9 characters; shorten the messages", "input: 9 characters; shorten the input"),
        (
            "messages",
            "the model's chat template refuses the messages: no place for 'messages' or max_tokens",
            "the model's chat template refuses the input: no place for 'messages' or max_tokens",
        ),
        ("response_format", "response_format: no type 'messages'", "text.format: no type 'messages'"),
        ("max_tokens", "max_tokens: found 'max_tokens'", "max_output_tokens: found 'max_tokens'"),
        ("tools", "tools: a function named messages", "tools: a function named messages"),
    ],
)
def test_responses_rename_fields_and_leave_words_of_the_client(param: str, message: str, expected: str) -> None:
    error = error_object(message, 400, param, path="/v1/responses")["error"]
    assert error["message"] == expected
    assert (error["param"] in expected) and error_object(message, 400, param)["error"]["message"] == message


class _Message(BaseModel):
    role: str
    content: str | list[str]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    messages: list[_Message]


def test_every_wrong_field_is_named_once_and_briefly() -> None:
    app = FastAPI()
    install(app)

    @app.post("/v1/chat/completions")
    def answer(body: _Body) -> None:
        pass

    def told(**fields: object) -> dict[str, str]:
        error: dict[str, str] = TestClient(app).post("/v1/chat/completions", json=fields).json()["error"]
        return error

    error = told(messages=[{"role": 1, "content": 2}, {"role": "user", "content": 3}])
    faults = [fault.partition(":")[0] for fault in error["message"].split("; ")]
    assert faults == ["messages[0].role", "messages[0].content", "messages[1].content"]
    assert error["param"] == faults[0]
    message = told(messages=[], **{f"{'k' * 500}{i}": 1 for i in range(10)})["message"]
    assert message.endswith("; and 2 more") and len(message) < 1000
