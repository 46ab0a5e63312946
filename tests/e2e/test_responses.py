"""OpenAI's Responses protocol with its own client, over an engine that follows a script, and over the real model."""

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.scripted_engine import ScriptedEngine
from tests.servers import client_of, connect, post, serving, serving_reference

from .test_tools import REPLY, SCHEMA, TEMPLATE

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Forecast", "parameters": SCHEMA, "strict": False},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
GREEDY: dict[str, Any] = {"model": "reference", "input": "What is the weather?", "temperature": 0}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(reply=REPLY, max_context=2000, reused=7)
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine) as (url, _):
        yield engine, url


def events_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, as bytes."""
    connection = connect(url)
    data = json.dumps(body | {"stream": True})
    connection.request("POST", "/v1/responses", data, {"Content-Type": "application/json"})
    lines = connection.getresponse().read().decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_calls_whole_and_streamed(scripted: tuple[ScriptedEngine, str]) -> None:
    client = client_of(scripted[1])
    done = client.responses.create(tools=TOOLS, **GREEDY)
    assert [item.type for item in done.output] == ["message", "function_call", "function_call"]
    text, weather, now = done.output
    assert (done.status, done.output_text, text.status, done.store) == ("completed", "One moment.", "completed", False)
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"city": "Köln", "days": 2})
    assert (now.name, now.arguments) == ("now", "{}") and now.call_id != weather.call_id
    assert [tool.name for tool in done.tools] == ["weather", "now"]
    assert all("tools" not in tool.model_dump() for tool in done.tools)
    with client.responses.stream(tools=TOOLS, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "One moment." and final.usage == done.usage
    assert [item.arguments for item in final.output[1:]] == [weather.arguments, now.arguments]
    assert kinds.count("response.function_call_arguments.delta") > 6  # as they come, not at the end
    one = client.responses.create(tools=TOOLS, parallel_tool_calls=False, **GREEDY)
    assert [item.type for item in one.output] == ["message", "function_call"]
    none = client.responses.create(tools=TOOLS, tool_choice="none", **GREEDY)
    assert none.output_text == REPLY


def test_the_sequence_of_events(scripted: tuple[ScriptedEngine, str]) -> None:
    events = events_of(scripted[1], GREEDY | {"tools": TOOLS})
    kinds = [event["type"].removeprefix("response.") for event in events]
    short = [kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind]  # deltas once
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert short == ["created", "in_progress", *text, "output_item.done", *call, *call, "completed"]
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    assert deltas == {0: output[0]["content"][0]["text"], 1: output[1]["arguments"], 2: output[2]["arguments"]}
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert finished == output and all(item["status"] == "completed" for item in output)


def test_token_counts(scripted: tuple[ScriptedEngine, str]) -> None:
    client = client_of(scripted[1])
    asked: dict[str, Any] = {"model": "reference", "input": "Hi", "instructions": "Be brief.", "tools": TOOLS}
    counted = client.responses.input_tokens.count(**asked).input_tokens
    usage = client.responses.create(temperature=0, **asked).usage
    assert usage is not None and usage.input_tokens == counted and usage.input_tokens_details.cached_tokens == 7
    assert usage.total_tokens == counted + usage.output_tokens


def test_a_conversation_reaches_the_template_as_chats_do(scripted: tuple[ScriptedEngine, str]) -> None:
    url = scripted[1]
    output = [{"type": "output_text", "text": "Let me see.", "annotations": []}]
    items: list[Any] = [
        {"role": "developer", "content": "Two."},
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "Hint."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "status": "completed", "content": output},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": ""},
        {"type": "function_call", "call_id": "c2", "name": "weather", "namespace": "sky", "arguments": '{"days": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "12:04"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        {"role": "user", "content": "And?"},
    ]
    calls = [
        {"id": "c1", "function": {"name": "now", "arguments": None}},
        {"id": "c2", "function": {"name": "sky.weather", "arguments": '{"days": 2}'}},
    ]
    same = [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "a\n\nHint."},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "12:04"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    counted = client_of(url).responses.input_tokens.count(model="reference", instructions="One.", input=items)
    assert counted.input_tokens == post(url, "/tokenize", {"messages": same})[1]["count"]


def test_functions_of_a_namespace_and_hosted_tools() -> None:
    engine = ScriptedEngine(reply='<tool_call>{"name": "sky.weather", "arguments": {}}</tool_call>', max_context=2000)
    engine.tokenizer.chat_template = TEMPLATE
    space = {"type": "namespace", "name": "sky", "description": "Sky", "tools": TOOLS[:1]}
    with serving(engine) as (url, _):
        tools = [space, {"type": "web_search", "external_web_access": False}]
        status, body = post(url, "/v1/responses", GREEDY | {"tools": tools})
        assert status == 200 and [tool["type"] for tool in body["tools"]] == ["namespace"]
        (call,) = body["output"]
        assert (call["namespace"], call["name"], call["arguments"]) == ("sky", "weather", "{}")
        assert [tool["name"] for tool in body["tools"][0]["tools"]] == ["weather"]
        assert "tools" not in body["tools"][0]["tools"][0]
        status, body = post(url, "/v1/responses", GREEDY | {"tools": tools[1:]})
        assert status == 400 and "web_search" in body["error"]["message"] and body["error"]["param"] == "tools"


HARMONY = """{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}
{% if message.tool_calls %}{% set tool_call = message.tool_calls[0] %}<call {{ tool_call.function.name }}>
{% elif message.role == "tool" %}<result {{ message.content }}>
{% else %}<{{ message.role }} {{ message.content }}>{% endif %}{% endfor %}{# <|channel|> #}"""
"""Shows one call of a message, as gpt-oss's does."""


def test_calls_at_once_reach_a_template_of_single_calls() -> None:
    engine = ScriptedEngine(max_context=2000)
    engine.tokenizer.chat_template = HARMONY
    prompts: list[str] = []
    submit = engine.submit

    def submitted(prompt: list[int], *more: Any) -> int:
        prompts.append(engine.tokenizer.decode(prompt))
        return submit(prompt, *more)

    engine.submit = submitted  # type: ignore[method-assign]
    calls = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in ("A", "B")]
    results = [{"type": "function_call_output", "call_id": name, "output": f"of {name}"} for name in ("B", "A")]
    with serving(engine) as (url, _):
        items: Any = [{"role": "user", "content": "Both?"}, *calls, *results]
        client_of(url).responses.create(**GREEDY | {"input": items}, tools=TOOLS)
    assert re.findall(r"<(?:call|result) [^>]*>", prompts[0]) == [
        "<call A>",
        "<result of A>",
        "<call B>",
        "<result of B>",
    ]


PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edit", "format": {"type": "text"}}


@pytest.mark.parametrize(
    ("arguments", "given"),
    [(r'{"input": "*** \"a\"\n+b"}', '*** "a"\n+b'), ("{}", "{}"), ('{"input": [1]}', '{"input": [1]}')],
)
def test_custom_tools_take_a_text(arguments: str, given: str) -> None:
    reply = f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'
    engine = ScriptedEngine(reply=reply, max_context=2000)
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine) as (url, _):
        client = client_of(url)
        for tools in ([PATCH], [*TOOLS, PATCH]):
            done = client.responses.create(tools=tools, **GREEDY)
            assert done.tools[-1].model_dump(exclude_unset=True) == PATCH
            (call,) = done.output
            assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", given)
        with client.responses.stream(tools=[PATCH], **GREEDY) as stream:
            deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
            assert stream.get_final_response().output[0].input == given == "".join(deltas)
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
        items: Any = [{"role": "user", "content": "Hi"}, call, result]
        counted = client.responses.input_tokens.count(model="reference", input=items).input_tokens
    made = {"name": "patch", "arguments": json.dumps({"input": given})}
    same = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": call.call_id, "function": made}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "ok"},
    ]
    with serving(engine) as (url, _):
        assert counted == post(url, "/tokenize", {"messages": same})[1]["count"]


def test_a_sampling_share_of_0_is_accepted(scripted: tuple[ScriptedEngine, str]) -> None:
    assert post(scripted[1], "/v1/responses", GREEDY | {"top_p": 0})[0] == 200


def test_ends_of_an_answer() -> None:
    with serving(ScriptedEngine(max_context=2000)) as (url, _):
        client = client_of(url)
        done = client.responses.create(max_output_tokens=2, **GREEDY)
        assert (done.status, done.output[0].status) == ("incomplete", "incomplete")
        assert done.incomplete_details and done.incomplete_details.reason == "max_output_tokens"
        assert events_of(url, GREEDY | {"max_output_tokens": 2})[-1]["type"] == "response.incomplete"
        done = client.responses.create(max_output_tokens=10**6, **GREEDY)
        assert done.status == "completed" and done.output_text == "Hello 🙂 你好, world."
    with serving(ScriptedEngine(max_context=2000, fail_at=2)) as (url, _):
        last = events_of(url, GREEDY)[-1]
        assert last["type"] == "response.failed" and "on fire" in last["response"]["error"]["message"]
        with pytest.raises(openai.InternalServerError):
            client_of(url).responses.create(**GREEDY)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": []}, "input:"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice:"),
        ({"tools": [*TOOLS, {"type": "function", "name": "no spaces"}]}, "tools[2].name"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": float("nan")}}, "metadata"),
        ({"metadata": {"a": "\ud800"}, "stream": True}, "metadata"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"a": "\ud800"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "strict": float("inf")}]}, "tools[0].strict"),
        ({"text": {"format": {"type": "json_schema", "schema": {"a": float("nan")}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "strng"}}}}, "text.format: the schema"),
    ],
)
def test_refusals_name_the_field(scripted: tuple[ScriptedEngine, str], more: dict[str, Any], field: str) -> None:
    status, body = post(scripted[1], "/v1/responses", GREEDY | more)
    assert status == 400 and re.match(re.escape(field), body["error"]["message"]), body
    assert body["error"]["param"] in (None, body["error"]["message"].partition(":")[0])


def test_a_long_input_is_refused_by_the_names_of_this_protocol(scripted: tuple[ScriptedEngine, str]) -> None:
    status, body = post(scripted[1], "/v1/responses", GREEDY | {"input": "Hi " * 1500})
    assert (status, body["error"]["param"]) == (400, "input")
    assert "in the input" in body["error"]["message"] and "lower max_output_tokens" in body["error"]["message"]


def test_harmless_fields_are_accepted(scripted: tuple[ScriptedEngine, str]) -> None:
    more = {
        "store": False,
        "previous_response_id": None,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "metadata": {"a": "b"},
    }
    status, body = post(scripted[1], "/v1/responses", GREEDY | more)
    assert (status, body["metadata"]) == (200, {"a": "b"})


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    with serving_reference(TEMPLATE) as url:
        yield url


def test_forced_calls_and_schemas(real: str) -> None:
    pytest.importorskip("llguidance")
    client = client_of(real)
    choices: list[Any] = [{"type": "function", "name": "weather"}, "required"]
    for choice in choices:
        done = client.responses.create(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **GREEDY)
        (call,) = done.output
        assert call.type == "function_call" and call.name in ("weather", "now") and isinstance(call.arguments, str)
        if call.name == "weather":
            assert set(json.loads(call.arguments)) == {"city", "days"}
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}
    assert set(json.loads(client.responses.create(text=form, **GREEDY).output_text)) == {"city", "days"}


def test_the_next_turn_reuses_the_prompt(real: str) -> None:
    client = client_of(real)
    asked: dict[str, Any] = {"model": "reference", "instructions": "Answer about the weather. " * 20, "temperature": 0}
    first = client.responses.create(input="Rain?", max_output_tokens=8, **asked)
    items = [{"role": "user", "content": "Rain?"}, *first.output, {"role": "user", "content": "And tomorrow?"}]
    second = client.responses.create(input=items, max_output_tokens=8, **asked)
    assert first.usage and second.usage
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 16  # one page
