"""Anthropic's Messages protocol with its own client, over an engine that follows a script, and over the real model."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine
from tests.servers import PATIENCE_S, connect, get, post, serving, serving_reference

from .test_tools import REPLY, SCHEMA, TEMPLATE

TOOLS: list[Any] = [
    {"name": "weather", "description": "Forecast", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object"}},
]
ASK: list[Any] = [{"role": "user", "content": "What is the weather?"}]
RAW: dict[str, Any] = {"model": "reference", "messages": ASK, "temperature": 0, "max_tokens": 200}
GREEDY: dict[str, Any] = {"model": "reference", "messages": ASK, "max_tokens": 200, "extra_body": {"temperature": 0}}
"""The newest client has no argument for a temperature any more."""


def client_of(url: str, **more: Any) -> anthropic.Anthropic:
    given: dict[str, Any] = {"api_key": "none", "auth_token": None, "max_retries": 0, "timeout": PATIENCE_S, **more}
    return anthropic.Anthropic(base_url=url, **given)


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(reply=REPLY, max_context=2000, reused=7)
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine) as (url, _):
        yield engine, url


def plain(reply: str = "Hello 🙂 你好, world.", **more: Any) -> Any:
    engine = ScriptedEngine(reply=reply, max_context=2000, **more)
    return serving(engine)


def text_of(url: str, body: dict[str, Any]) -> str:
    """The prompt of a chat, by the template."""
    tokens = post(url, "/tokenize", body)[1]["tokens"]
    return str(post(url, "/detokenize", {"tokens": tokens})[1]["prompt"])


def test_calls_whole_and_streamed(scripted: tuple[ScriptedEngine, str]) -> None:
    client = client_of(scripted[1])
    done = client.messages.create(tools=TOOLS, **GREEDY)
    assert [block.type for block in done.content] == ["text", "tool_use", "tool_use"]
    text, weather, now = done.content
    assert (text.text, weather.name, weather.input) == ("One moment.", "weather", {"city": "Köln", "days": 2})
    assert (now.name, now.input) == ("now", {}) and now.id != weather.id
    assert (done.stop_reason, done.stop_sequence, done.role, done.model) == ("tool_use", None, "assistant", "reference")
    with client.messages.stream(tools=TOOLS, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in done.content
    ]
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == done.usage.output_tokens
    kinds = [event.type for event in events if not event.type.startswith(("text", "input_json"))]
    starts = [at for at, kind in enumerate(kinds) if kind == "content_block_start"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert len(starts) == 3 == kinds.count("content_block_stop")
    assert all(kinds[at - 1] in ("message_start", "content_block_stop") for at in starts)
    assert kinds.count("content_block_delta") > 10  # as they come, not at the end
    one = client.messages.create(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **GREEDY)
    assert [block.type for block in one.content] == ["text", "tool_use"]
    none = client.messages.create(tools=TOOLS, tool_choice={"type": "none"}, **GREEDY)
    assert none.stop_reason == "end_turn" and none.content[0].text == REPLY


def test_token_counts(scripted: tuple[ScriptedEngine, str]) -> None:
    client = client_of(scripted[1])
    asked = {"model": "reference", "messages": ASK, "system": "Be brief.", "tools": TOOLS}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**GREEDY | asked).usage
    assert usage.cache_read_input_tokens == 7 and usage.input_tokens + 7 == counted
    with client.messages.stream(**GREEDY | asked) as stream:
        assert stream.get_final_message().usage.input_tokens == usage.input_tokens


def test_a_conversation_reaches_the_template_as_openais_does(scripted: tuple[ScriptedEngine, str]) -> None:
    url = scripted[1]
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "Hint."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me see.", "citations": None},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Köln", "days": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "12:04", "cache_control": None},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t3", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1;"},
        {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Two."},
    ]
    calls = [
        {"id": "t1", "function": {"name": "now", "arguments": ""}},
        {"id": "t2", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}},
    ]
    same = [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "a\n\nb\n\nHint."},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "12:04"},
        {"role": "tool", "tool_call_id": "t2", "content": "rain"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    functions = [
        {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    ]
    counted = client_of(url).messages.count_tokens(model="reference", messages=messages, system=system, tools=TOOLS)
    prompt = post(url, "/tokenize", {"messages": same, "tools": functions})[1]
    assert counted.input_tokens == prompt["count"]
    assert "billing" not in text_of(url, {"messages": same, "tools": functions})


@pytest.mark.parametrize(
    ("more", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Hello 🙂 你好, world."),
        ({"stop_sequences": ["nope", ", w"]}, "stop_sequence", ", w", "Hello 🙂 你好"),
        ({"max_tokens": 1}, "max_tokens", None, "H"),
        ({"extra_body": {"temperature": 0, "top_p": 0}}, "end_turn", None, "Hello 🙂 你好, world."),
        ({"max_tokens": 10**6}, "end_turn", None, "Hello 🙂 你好, world."),
    ],
)
def test_stop_reasons(more: dict[str, Any], reason: str, sequence: str | None, text: str) -> None:
    with plain() as (url, _):
        client = client_of(url)
        with client.messages.stream(**GREEDY | more) as stream:
            streamed = stream.get_final_message()
        for done in (streamed, client.messages.create(**GREEDY | more)):
            assert (done.stop_reason, done.stop_sequence) == (reason, sequence)
            assert done.content[0].text == text


def test_the_context_may_end_an_answer() -> None:
    engine = ScriptedEngine(reply="word " * 300, max_context=100)
    with serving(engine) as (url, _):
        done = client_of(url).messages.create(**GREEDY | {"max_tokens": 32_000})
        assert done.stop_reason == "model_context_window_exceeded"
        assert done.usage.input_tokens + done.usage.output_tokens == 100
        long = [{"role": "user", "content": "word " * 200}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* 100 tokens"):
            client_of(url).messages.create(**GREEDY | {"messages": long})


CALL = {"type": "tool_use", "id": "a", "name": "now"}
CALLED = {"role": "assistant", "content": [CALL]}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
DEEP = {"x": json.loads("[" * 900 + "]" * 900)}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, r"messages\[0\]\.content\[0\]\.type: 'image'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            r"messages\[0\]\.content\[0\]\.content\[0\]\.type",
        ),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            r"tools\[0\]\.type: .*'web_search_20250305'.* tool",
        ),
        ({"messages": [*ASK, {"role": "assistant", "content": "It is"}]}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": "It is"}, {"role": "user", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any"}, "output_config": {"format": {"type": "json_schema"}}},
            r"output_config\.format",
        ),
        ({"tool_choice": {"type": "tool", "name": "now"}}, "tool_choice: .*'now'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"tools": [*TOOLS, {"name": "no spaces", "input_schema": {}}]}, r"tools\[2\]\.name"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"tools": [{"name": "now", "input_schema": {"x": "\ud800"}}]}, r"tools\[0\]\.input_schema"),
        ({"messages": [CALLED | {"content": [CALL | {"input": {"x": "\ud800"}}]}, RESULT]}, r"content\[0\]\.input"),
        ({"messages": [CALLED | {"content": [CALL | {"input": DEEP}]}, RESULT]}, r"content\[0\]\.input"),
        ({"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}, r"content\[0\]\.type"),
    ],
)
def test_refusals_name_the_field(scripted: tuple[ScriptedEngine, str], more: dict[str, Any], field: str) -> None:
    status, body = post(scripted[1], "/v1/messages", RAW | more)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert re.search(field, body["error"]["message"]), body


def test_errors_have_the_protocols_form(scripted: tuple[ScriptedEngine, str]) -> None:
    client = client_of(scripted[1])
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**GREEDY | {"model": "claude-1"})
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id
    assert post(scripted[1], "/v1/messages", b"{")[1]["type"] == "error"
    assert post(scripted[1], "/v1/messages/batches", {})[1]["error"]["type"] == "not_found_error"
    with plain(fail_at=2) as (url, _):
        with pytest.raises(anthropic.APIStatusError) as whole:
            client_of(url).messages.create(**GREEDY)
        assert whole.value.status_code == 500 and whole.value.body["error"]["type"] == "api_error"
        with (
            pytest.raises(anthropic.APIStatusError, match="on fire"),
            client_of(url).messages.stream(**GREEDY) as stream,
        ):
            stream.until_done()
    with plain(state="stuck") as (url, _), pytest.raises(anthropic.APIStatusError) as busy:
        client_of(url).messages.create(**GREEDY)
    assert busy.value.status_code == 503 and busy.value.body["error"]["type"] == "overloaded_error"


def test_keys() -> None:
    engine = ScriptedEngine(max_context=2000)
    with serving(engine, api_key="s3cret") as (url, _):
        for right in ({"api_key": "s3cret"}, {"api_key": None, "auth_token": "s3cret"}):
            assert client_of(url, **right).messages.create(**GREEDY).stop_reason == "end_turn"
            assert [model.id for model in client_of(url, **right).models.list()] == ["lab/reference"]
        for wrong in ("s3cre", "", "S3CRET"):
            status, body = post(url, "/v1/messages", RAW, **{"x-api-key": wrong})
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        # The wrong key in one header is no help to the right one in the other.
        headers = {"Authorization": "Bearer wrong", "x-api-key": "s3cret"}
        assert get(url, "/v1/models", **headers)[0] == 401


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def answering(call: str, template: str = TEMPLATE) -> Any:
    engine = ScriptedEngine(reply=call, max_context=2000)
    engine.tokenizer.chat_template = template
    return serving(engine)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"x": [1e999, -1e999]}', {"x": [sys.float_info.max, -sys.float_info.max]}),
        (r'{"x\ud800": [["\ud800"], {"y": "\ud83d\ude42"}]}', {"x\ufffd": [["\ufffd"], {"y": "🙂"}]}),
        ("null", {}),
        (r'"{\"x\": 1}"', {"x": 1}),
    ],
)
def test_arguments_that_few_clients_can_read(arguments: str, value: dict[str, Any]) -> None:
    with answering(called("now", arguments)) as (url, _):
        status, body = post(url, "/v1/messages", RAW | {"tools": TOOLS})
        assert (status, body["stop_reason"]) == (200, "tool_use")
        assert [(block["type"], block["input"]) for block in body["content"]] == [("tool_use", value)]


@pytest.mark.parametrize(
    "arguments",
    ['{"x": 1 2}', "[1]", '{"x": NaN}', '"x"', '{"x": %s}' % ("1" * 5000), '{"x":%s}' % ("[" * 200 + "]" * 200)],
)
def test_a_malformed_call_is_text(arguments: str) -> None:
    good = called("now", "{}")
    bad = called("now", arguments)
    asked = RAW | {"tools": TOOLS, "max_tokens": 6000}
    for reply, kinds, reason in ((bad, ["text"], "end_turn"), (bad + good, ["text", "tool_use"], "tool_use")):
        engine = ScriptedEngine(reply=reply, max_context=8000)
        engine.tokenizer.chat_template = TEMPLATE
        with serving(engine) as (url, _):
            status, body = post(url, "/v1/messages", asked)
        assert (status, body["stop_reason"]) == (200, reason)
        assert [block["type"] for block in body["content"]] == kinds
        assert "now" in body["content"][0]["text"] and arguments.strip('"') in body["content"][0]["text"]


def test_a_call_that_the_limit_cuts_off_is_no_text() -> None:
    with answering('<tool_call>{"name": "now", "arguments": {"x": "aaaaaaaaaaaaaaaaaaaaaaaa') as (url, _):
        body = post(url, "/v1/messages", RAW | {"tools": TOOLS, "max_tokens": 25})[1]
        assert (body["stop_reason"], body["content"][0]["input"]) == ("max_tokens", {})


@pytest.mark.parametrize("name", [r"\ud800", "now"])
def test_names_that_are_no_unicode_end_no_stream(name: str) -> None:
    with answering(called(name, r'"\ud800"')) as (url, _):
        for stream in (False, True):
            connection = connect(url)
            data = json.dumps(RAW | {"tools": TOOLS, "stream": stream})
            connection.request("POST", "/v1/messages", data, {"Content-Type": "application/json"})
            text = connection.getresponse().read().decode()
            assert '"stop_reason":' in text and ("message_stop" in text) is stream


MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{% for message in messages %}{% if message.tool_calls %}[TOOL_CALLS]{% for call in message.tool_calls %}
{% if call.id | length != 9 %}{{ raise_exception("an id has 9 characters") }}{% endif %}
{{ call.function.name }}[CALL_ID]{{ call.id }}{% endfor %}
{% elif message.role == "tool" %}{% if message.tool_call_id | length != 9 %}{{ raise_exception("an id") }}{% endif %}
[TOOL_RESULTS]{{ message.tool_call_id }}{{ message.content }}{% else %}{{ message.content }}{% endif %}{% endfor %}"""


def test_ids_of_calls_come_back_to_a_template_that_checks_them() -> None:
    with answering('[TOOL_CALLS][{"name": "now", "arguments": {}}]', MISTRAL) as (url, _):
        client = client_of(url)
        first = client.messages.create(tools=TOOLS, **GREEDY)
        (call,) = first.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "12:04"}
        turns: list[Any] = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = client.messages.create(**GREEDY | {"messages": turns}, tools=TOOLS)
        assert second.content[0].name == "now" and second.usage.input_tokens > first.usage.input_tokens


def test_a_slow_prompt_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.serving.replies.PartsReply.patience_s", 0.05)
    with serving(ScriptedEngine(max_context=2000, step_s=0.3)) as (url, _):
        connection = connect(url)
        body = json.dumps(RAW | {"max_tokens": 3, "stream": True})
        connection.request("POST", "/v1/messages", body, {"Content-Type": "application/json"})
        lines = connection.getresponse().read().decode().splitlines()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert kinds[0] == "message_start" and kinds.count("ping") >= 2 and kinds[-1] == "message_stop"
    assert [json.loads(line[6:])["type"] for line in lines if line.startswith("data: ")] == kinds


def test_reasoning_is_a_thinking_block() -> None:
    reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Rain."
    engine = ScriptedEngine(reply=reply, max_context=2000)
    engine.tokenizer.chat_template = TEMPLATE + "{# <|channel|> #}"
    with serving(engine) as (url, _):
        done = client_of(url).messages.create(**GREEDY)
        assert [(block.type, getattr(block, block.type)) for block in done.content] == [
            ("thinking", "Hm."),
            ("text", "Rain."),
        ]
        with client_of(url).messages.stream(**GREEDY) as stream:
            assert [block.type for block in stream.get_final_message().content] == ["thinking", "text"]


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    with serving_reference(TEMPLATE, options=ServerOptions(request_timeout_s=60)) as url:
        yield url


def test_forced_calls_follow_their_schema(real: str) -> None:
    pytest.importorskip("llguidance")
    choices: list[Any] = [{"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}]
    for choice in choices:
        done = client_of(real).messages.create(tools=TOOLS, tool_choice=choice, **GREEDY)
        (call,) = done.content
        assert done.stop_reason == "tool_use" and call.type == "tool_use" and call.name in ("weather", "now")
        if call.name == "weather":
            assert set(call.input) == {"city", "days"} and 0 <= call.input["days"] <= 9
    form: dict[str, Any] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    text = client_of(real).messages.create(output_config=form, **GREEDY).content[0].text
    assert set(json.loads(text)) == {"city", "days"}


def test_the_next_turn_reuses_the_prompt(real: str) -> None:
    client = client_of(real)
    system = "You answer about the weather. " * 20
    first = client.messages.create(system=system, **GREEDY | {"max_tokens": 8})
    more = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And tomorrow?"}]
    second = client.messages.create(system=system, **GREEDY | {"max_tokens": 8, "messages": more})
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens - 16  # one page
