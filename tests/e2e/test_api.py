"""The OpenAI protocol on a real server, with the real client, over an engine that follows a script."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine
from tests.servers import PATIENCE_S, client_of, connect, eventually, get, post, serving

REPLY = "Hello 🙂 你好, world."


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serving(engine) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return client_of(url)


HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"model": "reference", "temperature": 0, "max_tokens": 50}


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["lab/reference"]
    for name in ("lab/reference", "reference"):
        assert client.models.retrieve(name).id == "lab/reference"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    done = client.completions.create(prompt="hello", **GREEDY)
    assert (done.object, done.model) == ("text_completion", "reference")
    assert (done.choices[0].text, done.choices[0].finish_reason, done.choices[0].logprobs) == (REPLY, "stop", None)
    num_prompt = len(engine.tokenizer.encode("hello"))
    num_answer = len(engine.tokenizer.encode(REPLY)) + 1  # with the end of the sequence
    assert done.usage is not None
    usage = (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens)
    assert usage == (num_prompt, num_answer, num_prompt + num_answer)


def test_defaults_are_openais(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    done = client.completions.create(model="reference", prompt="hello")
    assert done.choices[0].finish_reason == "length" and done.usage and done.usage.completion_tokens == 16
    assert (engine.submitted[-1].temperature, engine.submitted[-1].top_p, engine.submitted[-1].seed) == (1.0, 1.0, None)


@pytest.mark.parametrize(
    ("prompt", "num"), [("a", 1), (["a", "b c"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2), (["a"], 1), ([[5]], 1)]
)
def test_every_kind_of_prompt(client: openai.OpenAI, prompt: Any, num: int) -> None:
    done = client.completions.create(prompt=prompt, n=2, **GREEDY)
    assert [choice.index for choice in done.choices] == list(range(2 * num))
    assert {choice.text for choice in done.choices} == {REPLY}


def test_completion_stream_equals_whole(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(prompt="hello", stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert len({chunk.id for chunk in chunks}) == 1
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == REPLY
    assert len(texts) > 5 and not any("\ufffd" in chunk.choices[0].text for chunk in texts)
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["stop"]
    assert last.choices == [] and last.usage == client.completions.create(prompt="hello", **GREEDY).usage
    assert all(chunk.usage is None for chunk in texts)


def test_chat(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    done = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert (done.object, done.choices[0].message.role) == ("chat.completion", "assistant")
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (REPLY, "stop")
    templated = engine.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    num_prompt = len(engine.tokenizer.encode(templated))
    assert done.usage and done.usage.prompt_tokens == num_prompt
    # Without a limit the answer may fill the context.
    client.chat.completions.create(model="reference", messages=HELLO, temperature=0)
    assert engine.submitted[-1].max_tokens == engine.max_context - num_prompt
    client.chat.completions.create(model="reference", messages=HELLO, max_completion_tokens=7, max_tokens=9)
    assert engine.submitted[-1].max_tokens == 7


def test_generating_to_the_limit(client: openai.OpenAI) -> None:
    for done in (
        client.completions.create(prompt="hello", extra_body={"ignore_eos": True}, **GREEDY),
        client.chat.completions.create(messages=HELLO, extra_body={"ignore_eos": True}, **GREEDY),
    ):
        assert done.choices[0].finish_reason == "length" and done.usage and done.usage.completion_tokens == 50
    assert client.completions.create(prompt="a", extra_body={"ignore_eos": True}, **GREEDY).choices[0].text == REPLY


def test_chat_content_parts_roles_and_ignored_fields(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    done = client.chat.completions.create(
        messages=messages,
        user="someone",
        tools=[],
        logit_bias={},
        presence_penalty=0,
        response_format={"type": "text"},
        extra_body={"made_up": 1, "stop": None, "n": None},
        **GREEDY,
    )
    same = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}, *messages[2:]]
    again = client.chat.completions.create(messages=same, **GREEDY)
    assert done.choices[0].message.content == REPLY and done.usage == again.usage


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(messages=HELLO, stream=True, n=2, **GREEDY))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == REPLY
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_the_stream_on_the_wire(url: str) -> None:
    connection = connect(url)
    body = {"prompt": "hello", "stream": True, **GREEDY, "max_tokens": 2}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert [json.loads(event.removeprefix("data: "))["choices"][0]["index"] for event in events] == [0, 0]
    # The connection is as good as before.
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("🙂", "Hello "),
        (["好", "llo 🙂 "], "He"),
        (["nothing", "like this"], REPLY),
        (["."], REPLY[:-1]),
        (["Hello"], ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(url: str, engine: ScriptedEngine, stop: Any, text: str, stream: bool) -> None:
    client = client_of(url)
    if stream:
        chunks = list(client.completions.create(prompt="a", stop=stop, stream=True, **GREEDY))
        got = "".join(chunk.choices[0].text for chunk in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(prompt="a", stop=stop, **GREEDY).choices[0]
        got, finish = choice.text, choice.finish_reason
    assert (got, finish) == (text, "stop")


def test_a_stop_string_stops_the_engine() -> None:
    engine = ScriptedEngine(reply="one two three " * 20, step_s=0.005)
    with serving(engine) as (url, _):
        done = client_of(url).completions.create(prompt="a", stop="three", **{**GREEDY, "max_tokens": 200})
        assert done.choices[0].text == "one two " and done.usage and done.usage.completion_tokens < 30
        assert engine.cancelled == [1] and engine.num_live == 0


def test_seeds(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    def texts(seed: int | None, n: int) -> list[str]:
        done = client.completions.create(model="reference", prompt="a", seed=seed, n=n)
        return [choice.text for choice in done.choices]

    several = texts(7, 3)
    assert len(set(several)) == 3
    assert [texts(seed, 1)[0] for seed in (7, 8, 9)] == several
    assert texts(None, 1) != texts(None, 1)
    texts(-1, 1)
    assert engine.submitted[-1].seed == 2**63 - 1  # the engine's seeds are not negative


def test_completion_logprobs(client: openai.OpenAI) -> None:
    done = client.completions.create(prompt="a", logprobs=2, **GREEDY).choices[0]
    assert done.logprobs and done.logprobs.tokens and done.logprobs.top_logprobs and done.logprobs.text_offset
    assert "bytes:\\xf0" in done.logprobs.tokens and done.logprobs.tokens[0] == "H"
    # A token that carries on a character begins where the character begins.
    for token, offset in zip(done.logprobs.tokens, done.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or REPLY.startswith(token, offset)
    assert done.logprobs.token_logprobs == [-0.5] * len(done.logprobs.tokens)
    assert all(len(top) == 2 for top in done.logprobs.top_logprobs)
    # The chosen token is among the likeliest even where nothing else was asked for.
    none = client.completions.create(prompt="a", logprobs=0, **GREEDY).choices[0].logprobs
    assert none and none.top_logprobs and none.top_logprobs[0] == {"H": -0.5}


def test_logprobs_end_with_the_text(client: openai.OpenAI) -> None:
    done = client.completions.create(prompt="a", logprobs=1, stop="🙂", **GREEDY).choices[0]
    assert done.text == "Hello " and done.logprobs and "".join(done.logprobs.tokens or []) == "Hello "


def test_chat_logprobs_streamed_and_whole(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole and whole.content
    assert bytes(byte for entry in whole.content for byte in entry.bytes or []).decode() == REPLY
    assert [top.logprob for top in whole.content[0].top_logprobs] == [-0.25, -0.5, -9999.0]
    parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(stream=True, **asked)]
    assert [entry for part in parts if part for entry in part.content or []] == whole.content
    assert client.chat.completions.create(messages=HELLO, **GREEDY).choices[0].logprobs is None


@pytest.mark.parametrize("prompt", ["say 好", "<|user|>say", [5, 2, 6]])
def test_echo(client: openai.OpenAI, engine: ScriptedEngine, prompt: Any) -> None:
    text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
    done = client.completions.create(prompt=prompt, echo=True, logprobs=1, **GREEDY).choices[0]
    assert done.text == text + REPLY
    assert done.logprobs and done.logprobs.tokens and done.logprobs.token_logprobs and done.logprobs.text_offset
    assert done.logprobs.token_logprobs[0] is None and done.logprobs.token_logprobs[1:] == [-0.5] * (
        len(done.logprobs.tokens) - 1
    )
    for token, offset in zip(done.logprobs.tokens, done.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or done.text.startswith(token, offset)
    chunks = client.completions.create(prompt=prompt, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text + REPLY


def test_scoring_a_prompt(client: openai.OpenAI) -> None:
    done = client.completions.create(prompt=[5, 6, 7], echo=True, logprobs=1, **{**GREEDY, "max_tokens": 0})
    assert done.choices[0].logprobs and len(done.choices[0].logprobs.tokens or []) == 3
    assert done.choices[0].finish_reason == "length" and done.usage and done.usage.completion_tokens == 0


@pytest.mark.parametrize(
    ("param", "extra"),
    [
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("logit_bias", {"logit_bias": {"4096": 1}}),
        ("logit_bias.5", {"logit_bias": {"5": 101}}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": -3}),
        ("top_k", {"top_k": -2}),
        ("min_p", {"min_p": 1.5}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("repetition_penalty", {"repetition_penalty": 5e-324}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("min_tokens", {"min_tokens": 5}),
        ("use_beam_search", {"use_beam_search": True}),
        ("guided_json", {"guided_json": {"type": "object"}}),
        ("structured_outputs", {"structured_outputs": {"choice": ["yes", "no"]}}),
        ("structural_tag", {"structural_tag": "{}"}),
        ("chat_template", {"chat_template": "{{ messages }}"}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("continue_final_message", {"continue_final_message": True}),
        ("documents", {"documents": [{"text": "a"}]}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": -1e-9}),
        ("n", {"n": 0}),
        ("n", {"n": "1"}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("stop", {"stop": ""}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "tool", "content": "a"}]}),
        ("messages[0].role", {"messages": [{"role": "critic", "content": "a"}]}),
        ("messages[0]", {"messages": [{"role": "assistant"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        ("model", {"model": None}),
    ],
)
def test_refused_chats(url: str, param: str, extra: dict[str, Any]) -> None:
    status, body = post(url, "/v1/chat/completions", {"model": "reference", "messages": HELLO} | extra)
    assert status == 400 and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param and body["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("param", "extra"),
    [
        ("prompt[1]", {"prompt": ["a", "\ud800"]}),
        ("suffix", {"suffix": "x"}),
        ("best_of", {"best_of": 3}),
        ("logprobs", {"logprobs": 6}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": ["a", 5]}),
        ("prompt", {"prompt": [True]}),
        ("prompt", {"prompt": [4096]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": ["a"] * 100, "n": 2}),
    ],
)
def test_refused_completions(url: str, param: str, extra: dict[str, Any]) -> None:
    status, body = post(url, "/v1/completions", {"model": "reference", "prompt": "a"} | extra)
    assert (status, body["error"]["param"]) == (400, param)


def test_all_wrong_fields_are_named_at_once(url: str) -> None:
    wrong = {"model": "reference", "prompt": "a", "max_tokens": "a", "temperature": "b", "stop": [1, 2]}
    error = post(url, "/v1/completions", wrong)[1]["error"]
    fields = [part.partition(":")[0] for part in error["message"].split("; ")]
    assert sorted(fields) == ["max_tokens", "stop[0]", "stop[1]", "temperature"] and error["param"] == fields[0]


def test_too_long_for_the_context(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 256 tokens, but 310 were") as caught:
        client.completions.create(model="reference", prompt=[5] * 10, max_tokens=300)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="reference", messages=[{"role": "user", "content": "word " * 400}])
    # What is far too long is not even tokenised, which would take a minute.
    with pytest.raises(openai.BadRequestError, match=r"1800000 characters, .* of 256 tokens holds at most"):
        client.completions.create(model="reference", prompt="a b " * 450_000)
    with pytest.raises(openai.BadRequestError, match=r"characters, .* of 256 tokens holds at most"):
        client.chat.completions.create(model="reference", messages=[{"role": "user", "content": "word " * 300_000}])
    # A default limit gives way to the context.
    done = client.completions.create(model="reference", prompt=[5] * 250)
    assert done.usage and done.usage.completion_tokens == 6


def test_a_format_by_another_servers_name_is_refused(url: str) -> None:
    asked = {"model": "reference", "prompt": "a"}
    _, body = post(url, "/v1/completions", asked | {"guided_regex": "[a-z]+"})
    assert body["error"]["message"].startswith(
        "guided_regex: not supported; this server's only formats are json_schema"
    )
    _, body = post(url, "/v1/completions", asked | {"guided_json": {"type": "object"}})
    assert body["error"]["message"] == "guided_json: not supported; give the schema as response_format"
    nothing = {"guided_regex": None, "ebnf": "", "guided_json": [], "json_schema": {}, "grammar": False}
    assert post(url, "/v1/completions", asked | nothing)[0] == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_template_variables_are_refused_where_the_protocol_has_none(url: str, path: str) -> None:
    body = {"model": "reference", "messages": HELLO, "input": "hello", "max_tokens": 4}
    status, answer = post(url, path, body | {"chat_template_kwargs": {"enable_thinking": True}})
    assert status == 400 and answer["error"]["message"].startswith("chat_template_kwargs: not supported")
    assert post(url, path, body | {"chat_template_kwargs": {}})[0] == 200


def test_a_chat_template_gets_its_variables(client: openai.OpenAI, engine: ScriptedEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ 'thinking' if enable_thinking else 'plain' }}")

    def prompt_tokens(**variables: bool | str) -> int:
        more = {"chat_template_kwargs": variables}
        answer = client.chat.completions.create(model="reference", messages=HELLO, extra_body=more)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    lengths = [len(engine.tokenizer.encode(text)) for text in ("thinking", "plain")]
    assert [prompt_tokens(enable_thinking=True), prompt_tokens(enable_thinking=False)] == lengths
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize(
    "name",
    ["tools", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "messages", "self"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_an_argument_is_no_variable_of_a_chat_template(url: str, path: str, name: str) -> None:
    body = {"model": "reference", "messages": HELLO}
    status, answer = post(url, path, body | {"chat_template_kwargs": {"documents": [], name: True}})
    assert status == 400 and answer["error"]["param"] == "chat_template_kwargs"
    assert answer["error"]["message"].startswith(f"chat_template_kwargs: {name}: not a variable")
    assert post(url, path, body | {"chat_template_kwargs": {"documents": []}})[0] == 200


def test_what_the_engine_refuses(client: openai.OpenAI, engine: ScriptedEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine, "room", 3)
    with pytest.raises(openai.BadRequestError, match="do not fit"):
        client.completions.create(model="reference", prompt=[[5], [5] * 4])
    eventually(lambda: engine.num_live == 0)  # the first prompt's request was cancelled


def test_no_chat_template(client: openai.OpenAI, engine: ScriptedEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="reference", messages=HELLO)


def test_a_chat_template_that_refuses(client: openai.OpenAI, engine: ScriptedEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        client.chat.completions.create(model="reference", messages=HELLO)


def test_other_errors(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    status, body = post(url, "/v1/completions", b'{"model": ')
    assert status == 400 and "not JSON" in body["error"]["message"]
    status, body = post(url, "/v1/completions", b"[" * 100_000)
    assert status == 400 and "nested too deeply" in body["error"]["message"]
    status, body = post(url, "/v1/completions", b'{"model": "reference", "prompt": "\xff"}')
    assert status == 400 and "not JSON in UTF-8" in body["error"]["message"]
    for broken in (b'{"model": "reference", "prompt": "\\ud800"}', b'{"model": "\\ud800", "prompt": "a"}'):
        status, body = post(url, "/v1/completions", broken)
        assert status == 400 and "Unicode" in body["error"]["message"]
    status, body = post(url, "/v1/completions", b"prompt=a", **{"Content-Type": "application/x-www-form-urlencoded"})
    assert status == 400 and "Content-Type: application/json" in body["error"]["message"]
    assert post(url, "/v1/embeddings", {})[0] == 404
    assert get(url, "/v1/completions")[0] == 405 and '"error"' in get(url, "/v1/completions")[2]


def test_what_other_servers_have(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"/v1/embeddings; .* /v1/chat/completions .* 'messages'") as caught:
        client.embeddings.create(model="reference", input="hello")
    assert caught.value.code == "unknown_url"


def test_large_bodies(url: str) -> None:
    body = json.dumps({"model": "reference", "prompt": "a" * (3 * 2**20)}).encode()
    assert post(url, "/v1/completions", body)[0] == 413
    connection = connect(url)
    chunks = (b" " * 2**20 for _ in range(12))
    connection.request("POST", "/v1/completions", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
    response = connection.getresponse()
    assert response.status == 413 and "2097152 bytes" in json.loads(response.read())["error"]["message"]


def test_health_and_metrics(url: str, client: openai.OpenAI) -> None:
    status, _, text = get(url, "/health")
    assert status == 200 and json.loads(text) == {"status": "ok", "model": "reference"}
    client.completions.create(prompt="hello", **GREEDY)
    status, headers, text = get(url, "/metrics")
    lines = text.splitlines()
    assert status == 200 and headers["content-type"].startswith("text/plain")
    for line in (
        'moetool_expert_uses_total{outcome="kept"} 7.0',
        'moetool_expert_uses_total{outcome="missed"} 3.0',
        "moetool_read_bytes_total 4096.0",
        "moetool_slots 64.0",
        "moetool_oddity 1.5",
        "moetool_ready 1.0",
    ):
        assert line in lines
    counts = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(counts["moetool_time_to_first_token_seconds_count"]) > 0
    assert float(counts["moetool_inter_token_seconds_count"]) > 10
    names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    helped = {line.split(" ")[2] for line in lines if line.startswith("# HELP")}
    assert all(any(name.startswith(known) for known in helped) for name in names)


@pytest.mark.parametrize("state", ["starting", "draining", "failed"])
def test_an_engine_that_is_not_ready(
    url: str, client: openai.OpenAI, engine: ScriptedEngine, monkeypatch: Any, state: Any
) -> None:
    monkeypatch.setattr(engine, "state", state)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="reference", prompt="a")
    assert caught.value.status_code == 503 and int(caught.value.response.headers["retry-after"]) > 0
    status, headers, text = get(url, "/health")
    assert (status, json.loads(text)["status"]) == (503, state) and headers["retry-after"]
    assert "moetool_ready 0.0" in get(url, "/metrics")[2]


def test_an_engine_that_fails_on_the_way() -> None:
    with serving(ScriptedEngine(fail_at=4)) as (url, _):
        client = client_of(url)
        with pytest.raises(openai.InternalServerError, match="the disk is on fire") as caught:
            client.completions.create(prompt="a", **GREEDY)
        assert caught.value.status_code == 500
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="the disk is on fire"):
            chunks = client.completions.create(prompt="a", stream=True, **GREEDY)
            texts.extend(chunk.choices[0].text for chunk in chunks)
        assert "".join(texts) == "Hello "


def test_a_bug_in_the_engine_is_no_text_for_clients(
    client: openai.OpenAI, engine: ScriptedEngine, monkeypatch: Any
) -> None:
    def submit(*args: object) -> int:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine, "submit", submit)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="reference", prompt="a")
    assert caught.value.status_code == 500 and "secret" not in str(caught.value)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_goes_is_cancelled(stream: bool, waiting: bool) -> None:
    engine = ScriptedEngine(reply="word " * 100, step_s=0.02, max_running=0 if waiting else 8)
    with serving(engine) as (url, _):
        connection = connect(url)
        body = {"prompt": "a", "n": 2, "stream": stream, **GREEDY, "max_tokens": 200}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        eventually(lambda: engine.num_live == 2)
        if stream and not waiting:
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            response.close()
        connection.close()
        eventually(lambda: engine.num_live == 0)
        assert sorted(engine.cancelled) == [1, 2]


def test_a_slow_client_holds_up_nobody() -> None:
    engine = ScriptedEngine(max_context=30_000)
    with serving(engine) as (url, _):
        slow = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"model": "reference", "prompt": "a", "stream": True, "max_tokens": 20_000}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"])
        slow.sendall(head.encode() + body)
        eventually(lambda: len(engine.submitted) == 1)
        assert client_of(url).completions.create(prompt="a", **GREEDY).choices[0].text == REPLY
        eventually(lambda: engine.num_live == 0)  # the engine did not wait for the client either
        slow.close()


def test_many_clients() -> None:
    engine = ScriptedEngine(step_s=0.001, max_running=4)
    with serving(engine) as (url, _):
        client = client_of(url)

        def ask(index: int) -> tuple[str, str]:
            asked: dict[str, Any] = {"model": "reference", "prompt": f"client {index}", "seed": index, "max_tokens": 20}
            chunks = client.completions.create(stream=True, **asked)
            return "".join(chunk.choices[0].text for chunk in chunks), client.completions.create(**asked).choices[
                0
            ].text

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(16)))
        assert all(streamed == whole for streamed, whole in answers)
        assert len(set(answers)) == 16
        assert engine.cancelled == [] and len(engine.submitted) == 32


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    engine = ScriptedEngine(reply="word " * 30, step_s=0.02)
    with serving(engine) as (url, server), ThreadPoolExecutor() as pool:
        client = client_of(url)
        running = pool.submit(lambda: client.completions.create(prompt="a", **GREEDY).choices[0].text)
        eventually(lambda: engine.num_live == 1)
        server.interrupt()
        eventually(lambda: get(url, "/health")[0] == 503)
        assert json.loads(get(url, "/health")[2])["status"] == "draining"
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(prompt="b", **GREEDY)
        assert caught.value.status_code == 503
        assert running.result() == "word " * 30

        def refused() -> bool:
            try:
                socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)).close()
            except ConnectionRefusedError:
                return True
            return False

        eventually(refused)


@pytest.mark.parametrize("stream", [False, True])
def test_draining_does_not_wait_for_ever(stream: bool) -> None:
    engine = ScriptedEngine(max_running=0)
    with serving(engine, options=ServerOptions(drain_timeout_s=0.3)) as (url, server), ThreadPoolExecutor() as pool:

        def ask() -> None:
            answer = client_of(url).completions.create(prompt="a", stream=stream, **GREEDY)
            if stream:
                list(answer)

        running = pool.submit(ask)
        eventually(lambda: engine.num_live == 1)
        server.interrupt()
        with pytest.raises(openai.APIError, match="shutting down"):
            running.result()
        eventually(lambda: engine.cancelled == [1])


def test_a_second_interruption_stops_at_once() -> None:
    engine = ScriptedEngine(max_running=0)
    with serving(engine) as (url, server), ThreadPoolExecutor() as pool:
        running = pool.submit(lambda: client_of(url).completions.create(prompt="a", **GREEDY))
        eventually(lambda: engine.num_live == 1)
        server.interrupt()
        server.interrupt()
        with pytest.raises(openai.InternalServerError, match="the server was stopped"):
            running.result(timeout=PATIENCE_S)
        eventually(lambda: engine.cancelled == [1])
