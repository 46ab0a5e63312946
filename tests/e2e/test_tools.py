"""Tools, response formats and sampling options with the real client; answers of a script, and of the real model."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest

from moetool.prompts.gather import gather
from moetool.serving.server_options import ServerOptions
from tests.refusals import refused
from tests.scripted_engine import ScriptedEngine
from tests.servers import client_of, connect, get, post, serving, serving_reference

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "chat_templates"
TEMPLATE = """{% if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{% for message in messages %}<|{{ message.role }}|>{{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""In the manner of Hermes and Qwen."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: list[Any] = [{"role": "user", "content": "What is the weather?"}]
REPLY = (
    'One moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
ANSWER: dict[str, Any] = {"model": "reference", "messages": ASK, "temperature": 0, "max_tokens": 200}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(reply=REPLY, max_context=2000)
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine) as (url, _):
        yield engine, url


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    with serving_reference(TEMPLATE) as url:
        yield url


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_calls_whole(scripted: tuple[ScriptedEngine, str]) -> None:
    client = client_of(scripted[1])
    done = client.chat.completions.create(tools=TOOLS, **ANSWER).choices[0]
    assert (done.finish_reason, done.message.content) == ("tool_calls", "One moment.")
    assert calls_of(done.message) == [("weather", {"city": "Köln", "days": 2}), ("now", {})]
    ids = [call.id for call in done.message.tool_calls or []]
    assert len(set(ids)) == 2 and all(re.fullmatch(r"call_[0-9a-f]{24}", id) for id in ids)
    one = client.chat.completions.create(tools=TOOLS, parallel_tool_calls=False, **ANSWER).choices[0]
    assert calls_of(one.message) == [("weather", {"city": "Köln", "days": 2})]
    for plain in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        done = client.chat.completions.create(**plain, **ANSWER).choices[0]
        assert (done.finish_reason, done.message.content, done.message.tool_calls) == ("stop", REPLY, None)


def test_calls_streamed(scripted: tuple[ScriptedEngine, str]) -> None:
    with client_of(scripted[1]).chat.completions.stream(tools=TOOLS, n=2, **ANSWER) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 6  # as they come, not at the end
    for choice in final.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
        assert calls_of(choice.message) == [("weather", {"city": "Köln", "days": 2}), ("now", {})]


def test_results_go_through_the_template(scripted: tuple[ScriptedEngine, str]) -> None:
    url = scripted[1]
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    asked = {"model": "reference", "messages": messages, "tools": TOOLS}
    status, made = post(url, "/tokenize", asked)
    assert status == 200 and made["count"] == len(made["tokens"]) and made["max_model_len"] == 2000
    status, text = post(url, "/detokenize", {"tokens": made["tokens"]})
    assert '<tool_call>{"arguments": {"zone": "CET"}, "name": "now"}</tool_call>' in text["prompt"].replace(
        '{"name": "now", "arguments": {"zone": "CET"}}', '{"arguments": {"zone": "CET"}, "name": "now"}'
    )
    assert "<|tool|>12:00" in text["prompt"] and '"weather"' in text["prompt"]
    done = client_of(url).chat.completions.create(**{**ANSWER, "messages": messages}, tools=TOOLS)
    assert done.usage and done.usage.prompt_tokens == made["count"]


_TURN = {
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n"
    "<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "glm_4_6": "<tool_call>now\n</tool_call>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
    "<arg_value>Köln</arg_value>\n</tool_call><|observation|>",
    "mistral_small_3_2": "[TOOL_CALLS]now[CALL_ID]callNow01[ARGS]{}"
    '[TOOL_CALLS]weather[CALL_ID]callRain2[ARGS]{"city": "Köln"}',
    "gpt_oss": "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"12:00"<|end|>'
    "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>",
}
"""Two calls in one turn, as published templates show them."""


@pytest.mark.parametrize("name", _TURN)
def test_published_templates_show_what_agents_send(name: str, tmp_path: Path) -> None:
    engine = ScriptedEngine(max_context=2000)
    engine.tokenizer.chat_template = (GOLDEN / f"{name}.jinja").read_text()
    rain = {"id": "callRain2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    with serving(engine) as (url, _):
        for arguments, said in product(
            ({"arguments": text} for text in ("{}", "", " \n", "null", None)), ({"content": None}, {"content": ""}, {})
        ):
            now = {"id": "callNow01", "type": "function", "function": {"name": "now", **arguments}}
            messages = [
                *ASK,
                {"role": "assistant", "tool_calls": [now, rain], **said},
                {"role": "tool", "tool_call_id": "callNow01", "content": "12:00"},
                {"role": "tool", "tool_call_id": "callRain2", "content": "wet"},
            ]
            status, served = post(url, "/tokenize", {"model": "reference", "messages": messages})
            assert status == 200, served
            assert _TURN[name] in engine.tokenizer.decode(served["tokens"]), (arguments, said)
            (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
            (prompt,) = gather([str(tmp_path / "chat.jsonl")]).prompts
            assert prompt.token_ids(engine.tokenizer, engine.vocab_size) == served["tokens"]


def test_a_template_without_tools_refuses_them() -> None:
    with serving(ScriptedEngine(max_context=2000)) as (url, _):
        client = client_of(url)
        with refused(openai.BadRequestError, "no tools"):
            client.chat.completions.create(tools=TOOLS, **ANSWER)
        client.chat.completions.create(tools=TOOLS, tool_choice="none", **ANSWER)


@pytest.mark.follows("moetool.serving.tool_use tool_use")
def test_an_unknown_format_is_named_by_an_option() -> None:
    engine = ScriptedEngine(reply=REPLY, max_context=2000)
    engine.tokenizer.chat_template = TEMPLATE.replace("<tool_call>", "[call]")
    with serving(engine) as (url, _), refused(openai.BadRequestError, "tool_format"):
        client_of(url).chat.completions.create(tools=TOOLS, **ANSWER)
    engine = ScriptedEngine(reply=REPLY, max_context=2000)
    engine.tokenizer.chat_template = TEMPLATE.replace("<tool_call>", "[call]")
    with serving(engine, options=ServerOptions(tool_format="hermes")) as (url, _):
        assert len(calls_of(client_of(url).chat.completions.create(tools=TOOLS, **ANSWER).choices[0].message)) == 2


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ({"parameters": {"a": "\ud800"}}, "tools[0].function.parameters"),
        ({"description": "\ud800"}, "tools[0].function.description"),
        ({"parameters": json.loads('{"a":' * 300 + "0" + "}" * 300)}, "tools[0].function.parameters"),
        ({"\ud800": 1}, "tools[0].function"),
    ],
)
def test_json_that_cannot_be_written_again(
    scripted: tuple[ScriptedEngine, str], function: dict[str, Any], field: str
) -> None:
    asked = {**ANSWER, "tools": [{"type": "function", "function": {"name": "now", **function}}]}
    status, body = post(scripted[1], "/v1/chat/completions", asked)
    assert (status, body["error"]["param"]) == (400, field)


def test_a_template_that_fails_is_refused(scripted: tuple[ScriptedEngine, str]) -> None:
    call = {"id": "a", "function": {"name": "now", "arguments": '{"a":' + "[" * 900 + "]" * 900 + "}"}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a"}]
    status, body = post(scripted[1], "/v1/chat/completions", {**ANSWER, "messages": messages})
    assert (status, body["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_schemas_hold_with_seeds_and_logprobs(real: str, seed: int) -> None:
    asked: dict[str, Any] = {
        **ANSWER,
        "temperature": 1.0,
        "seed": seed,
        "logprobs": True,
        "top_logprobs": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
    }
    # The first answer forwards the whole prompt; the others reuse its prefix, which rounds differently.
    _, first, again = (client_of(real).chat.completions.create(**asked).choices[0] for _ in range(3))
    assert first.finish_reason == "stop" and first.message.content == again.message.content
    made = json.loads(first.message.content or "")
    assert set(made) == {"city", "days"} and 0 <= made["days"] <= 9 and len(made["city"]) <= 8
    assert first.logprobs and first.logprobs.content and again.logprobs
    # Of the model itself: the grammar's choice is seldom among its likeliest.
    assert first.logprobs.content == again.logprobs.content
    assert all(entry.logprob <= entry.top_logprobs[0].logprob for entry in first.logprobs.content)
    assert any(entry.token not in {top.token for top in entry.top_logprobs} for entry in first.logprobs.content)


def test_json_objects_and_forced_calls(real: str) -> None:
    client = client_of(real)
    warm = {**ANSWER, "temperature": 1.0, "seed": 5, "max_tokens": 400}
    done = client.chat.completions.create(**warm, response_format={"type": "json_object"}).choices[0]
    if done.finish_reason == "stop":
        assert isinstance(json.loads(done.message.content or ""), dict)
    else:
        assert (done.message.content or "").startswith("{")
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in (named, "required"):
        done = client.chat.completions.create(**warm, tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False)
        assert done.choices[0].finish_reason == "tool_calls"
        ((name, arguments),) = calls_of(done.choices[0].message)
        assert name == "weather" and set(arguments) == {"city", "days"}
    with client.chat.completions.stream(**warm, tools=TOOLS[:1], tool_choice=named) as stream:
        assert calls_of(stream.get_final_completion().choices[0].message)[0][0] == "weather"


def test_schemas_that_cannot_be_followed(real: str) -> None:
    for schema in ({"type": "frob"}, {"not": {"type": "string"}}, {"type": "string", "pattern": "("}):
        wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
        status, body = post(real, "/v1/chat/completions", {**ANSWER, "response_format": wanted})
        assert status == 400 and body["error"]["param"] == "response_format", body


WIDE: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
LOOP: dict[str, Any] = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


@pytest.fixture(scope="module")
def roomy() -> Iterator[tuple[ScriptedEngine, str]]:
    engine = ScriptedEngine(max_context=10**6, room=10**6)
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine) as (url, _):
        yield engine, url


def _failures(url: str) -> float:
    return float(re.findall(r"^moetool_failures_total (\S+)", get(url, "/metrics")[2], re.MULTILINE)[0])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (WIDE, "2007 items"),
        ({"type": "object", "properties": {"b/a": {"type": "array", "items": WIDE}}}, "2007 items"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/wide"}}, "$defs": {"wide": WIDE}}, "2007 items"),
        ({"$ref": "#"}, "references"),
        ({"$ref": "#/$defs/a", "$defs": LOOP}, "references"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": LOOP}, "references"),
        ({"allOf": [{"$ref": "#"}, {"type": "object"}]}, "cannot be followed"),
        ({"type": "object", "description": "x" * 300_000}, "characters, expected at most 262144"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_refused_before_its_request_runs(
    roomy: tuple[ScriptedEngine, str], schema: dict[str, Any], reason: str, stream: bool
) -> None:
    engine, url = roomy
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    tool = {"type": "function", "function": {"name": "now", "parameters": schema}}
    chat = {**ANSWER, "n": 2, "stream": stream}
    forced = {"type": "function", "function": {"name": "now"}}
    plain = {"model": "reference", "prompt": ["a", "b"], "n": 2, "stream": stream, "echo": True, "logprobs": 1}
    for path, body, param in [
        ("chat/completions", chat | {"response_format": wanted}, "response_format"),
        ("completions", plain | {"response_format": wanted}, "response_format"),
        ("chat/completions", chat | {"tools": [tool], "tool_choice": "required"}, "tools"),
        ("chat/completions", chat | {"tools": [tool], "tool_choice": forced}, "tools"),
    ]:
        status, answer = post(url, f"/v1/{path}", body)
        error = answer["error"]
        assert (status, error["param"]) == (400, param) and reason in error["message"] and "\n" not in error["message"]
    assert engine.submitted == []


def test_references_that_end_are_followed(real: str) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
        "additionalProperties": False,
    }
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    parameters = {"type": "object", "properties": {"list": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    tool = {"type": "function", "function": {"name": "now", "parameters": parameters | {"required": ["list"]}}}
    asked = {**ANSWER, "logit_bias": {}, "max_tokens": 40}
    for more in (
        {"response_format": wanted},
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "now"}}},
    ):
        status, body = post(real, "/v1/chat/completions", asked | more)
        assert status == 200, body


def test_a_grammar_that_gives_up_within_an_answer_is_no_failure_of_the_engine(real: str) -> None:
    before = _failures(real)
    # llguidance notices only within the text that this pattern is too large.
    schema = {"type": "string", "pattern": "^(([a-z]{1,1000}){1,1000}){1,1000}$", "minLength": 100}
    wanted = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    status, body = post(real, "/v1/chat/completions", {**ANSWER, "response_format": wanted})
    assert status == 400 and "the answer cannot go on: lexer error" in body["error"]["message"]
    connection_body = {**ANSWER, "response_format": wanted, "stream": True}
    connection = connect(real)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(connection_body), {"Content-Type": "application/json"}
    )
    events = connection.getresponse().read().decode().strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "invalid_request_error"
    assert _failures(real) == before == 0


def test_options_of_sampling_reach_the_engine(real: str) -> None:
    client = client_of(real)
    asked: dict[str, Any] = {"model": "reference", "prompt": "12 + 7 =", "temperature": 0, "max_tokens": 8}
    plain = client.completions.create(**asked).choices[0].text
    _, made = post(real, "/tokenize", {"prompt": "Z", "add_special_tokens": False, "return_token_strs": True})
    assert (made["count"], made["token_strs"]) == (1, ["Z"])
    assert client.completions.create(**asked, logit_bias={str(made["tokens"][0]): 100}).choices[0].text == "Z" * 8
    hot = {**asked, "temperature": 2.0, "seed": 1}
    for one in ({"top_k": 1}, {"min_p": 1.0}, {"top_k": 1, "top_p": 1e-46}, {"top_p": 0}):
        assert client.completions.create(**hot, extra_body=one).choices[0].text == plain
    texts = set()
    for one in ({}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 5.0}):
        more = {"ignore_eos": True, **one}
        texts.add(client.completions.create(**{**asked, "max_tokens": 60}, extra_body=more).choices[0].text)
    assert len(texts) == 4


def test_a_chat_that_outgrows_the_context() -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    for number in range(30):
        turns += [
            {"role": "user", "content": f"turn {number}: " + "word " * 10},
            {"role": "assistant", "content": "ok"},
        ]
    asked: dict[str, Any] = {"model": "reference", "messages": [*turns, *ASK], "temperature": 0}
    with serving(ScriptedEngine(), options=ServerOptions()) as (url, _):
        status, body = post(url, "/v1/chat/completions", asked)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    engine = ScriptedEngine()
    with serving(engine, options=ServerOptions(drop_oldest_turns=True)) as (url, _):
        raw = client_of(url).chat.completions.with_raw_response.create(**asked)
        usage = raw.parse().usage
        assert usage is not None
        dropped = usage.model_dump()["dropped_messages"]
        assert 2 <= dropped < 60 and raw.headers["x-dropped-messages"] == str(dropped)
        assert usage.prompt_tokens + engine.max_context // 4 <= engine.max_context
        kept = [turns[0], *turns[1 + dropped :], *ASK]
        assert post(url, "/tokenize", {"messages": kept})[1]["count"] == usage.prompt_tokens
        # One turn more would leave too little room for an answer.
        more = [turns[0], *turns[1 + dropped - 2 :], *ASK]
        assert post(url, "/tokenize", {"messages": more})[1]["count"] > engine.max_context * 3 // 4
        short = client_of(url).chat.completions.create(model="reference", messages=ASK)
        assert short.usage and "dropped_messages" not in short.usage.model_dump()
        status, body = post(
            url, "/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": "word " * 400}]}
        )
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


def test_answers_without_a_limit_are_bounded() -> None:
    engine = ScriptedEngine(max_context=20_000)
    with serving(engine) as (url, _):
        client_of(url).chat.completions.create(model="reference", messages=ASK, temperature=0)
    assert engine.submitted[-1].max_tokens == ServerOptions().default_max_tokens == 4096


def test_the_page_is_without_data_and_links_what_is_there() -> None:
    with serving(ScriptedEngine(), api_key="secret") as (url, _):
        status, headers, page = get(url, "/")
        assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
        assert "reference" not in page and get(url, "/stats")[0] == 401
    with serving(ScriptedEngine()) as (url, _):
        links = re.findall(r'href="([^"]+)"', get(url, "/")[2])
        assert len(links) == 5
        assert {get(url, f"/{link}")[0] for link in links} == {200}


def test_white_space_between_parts_is_bounded(real: str, tokenizer: Any) -> None:
    blanks = [token for token in range(len(tokenizer)) if (text := tokenizer.decode([token])) and not text.strip()]
    schema = {
        "name": "a",
        "schema": {**SCHEMA, "required": ["days"], "properties": {"days": SCHEMA["properties"]["days"]}},
    }
    done = client_of(real).chat.completions.create(
        **ANSWER,
        logit_bias={str(token): 100 for token in blanks},
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert done.choices[0].finish_reason == "stop"
    text = done.choices[0].message.content or ""
    assert set(json.loads(text)) == {"days"} and text.count("\n") > 3


def test_a_format_cannot_go_on_past_its_end(real: str) -> None:
    asked = {**ANSWER, "ignore_eos": True, "response_format": {"type": "json_object"}}
    status, body = post(real, "/v1/chat/completions", asked)
    assert status == 400 and body["error"]["message"].startswith("ignore_eos")
