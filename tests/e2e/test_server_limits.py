"""Keys, request numbers, the access log, back-pressure, deadlines and turns."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from moetool.base.errors import MoetoolError, UsageError
from moetool.cli.main import app
from moetool.runtime.request import SamplingParams, Sink, TokenLogprob
from moetool.serving.chat import Conversation, ServerRefused
from moetool.serving.server_options import ServerOptions
from moetool.serving.status_line import Rates
from tests.refusals import refused
from tests.scripted_engine import ScriptedEngine
from tests.servers import client_of, connect, eventually, get, post, serving

ASK: dict[str, Any] = {"model": "reference", "prompt": "hello", "temperature": 0, "max_tokens": 20}


def test_a_key_is_asked_for_everywhere_but_health() -> None:
    with serving(ScriptedEngine(), api_key="s3cret") as (url, _):
        for path in ("/v1/models", "/metrics", "/stats", "/openapi.json", "/nothing"):
            status, headers, body = get(url, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert get(url, "/health")[0] == 200
        for wrong in ("s3cret", "Basic s3cret", "Bearer s3cre", "Bearer s3crets", "Bearer \xe9"):
            assert post(url, "/v1/completions", ASK, Authorization=wrong)[0] == 401
        assert post(url, "/v1/completions", ASK, Authorization="bearer s3cret")[0] == 200
        with refused(openai.AuthenticationError, "Bearer", "KEY"):
            client_of(url).models.list()
        with refused(MoetoolError, "401", "API"):
            Conversation(url)


def test_requests_are_numbered_and_logged_without_their_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "access.jsonl"
    caplog.set_level("INFO", "moetool.serving.access")
    with serving(ScriptedEngine(), options=ServerOptions(access_log=str(log))) as (url, _):
        for number in ("abc-1", "", "two words", "x" * 200):
            connection = connect(url)
            headers = {"X-Request-Id": number, "Content-Type": "application/json"}
            body = json.dumps({**ASK, "prompt": "very secret"})
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            given = response.headers["X-Request-Id"]
            assert response.read() and (given == "abc-1") == (number == "abc-1") and given
        list(client_of(url).completions.create(stream=True, **ASK))
        assert get(url, "/v1/nothing")[0] == 404
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [("/v1/completions", 200)] * 5 + [("/v1/nothing", 404)]
    assert lines[0]["request_id"] == "abc-1" and len({line["request_id"] for line in lines}) == 6
    assert all(line["generated_tokens"] > 3 and line["prompt_tokens"] > 0 for line in lines[:5])
    assert all(0 < line["first_token_s"] <= line["seconds"] for line in lines[:5])
    assert "secret" not in log.read_text() + caplog.text
    said = [record.getMessage() for record in caplog.records if record.name == "moetool.serving.access"]
    assert ["prompt tokens" in line for line in said] == [True] * 5 + [False] and "None" not in caplog.text


def test_an_access_log_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with (
        refused(MoetoolError, "write", "access", "log"),
        serving(engine, options=ServerOptions(access_log=str(tmp_path / "no" / "log"))),
    ):
        pass
    engine.close()


def test_too_many_are_told_when_to_come_back() -> None:
    engine = ScriptedEngine(reply="word " * 60, step_s=0.02, max_requests=1, max_running=1)
    with serving(engine, options=ServerOptions(max_queue=2)) as (url, _), ThreadPoolExecutor(8) as pool:
        running = [pool.submit(post, url, "/v1/completions", {**ASK, "max_tokens": 40}) for _ in range(4)]
        eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_waiting"] == 2)
        connection = connect(url)
        connection.request("POST", "/v1/completions", json.dumps(ASK), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 429 and 1 <= int(response.headers["Retry-After"]) <= 60
        assert json.loads(response.read())["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client_of(url).completions.create(**ASK)
        assert post(url, "/v1/completions", {**ASK, "n": 4})[0] == 429  # all or none
        status, body = post(url, "/v1/completions", {**ASK, "n": 5})
        assert status == 400 and "5 choices in one request; this server holds at most 4" in body["error"]["message"]
        assert [job.result()[0] for job in running] == [200] * 4
        eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_in_engine"] == 0)
        assert post(url, "/v1/completions", ASK)[0] == 200


def test_a_large_request_does_not_hold_up_a_small_one() -> None:
    engine = ScriptedEngine(reply="word " * 60, step_s=0.01, max_requests=1, max_running=1)
    with serving(engine) as (url, _), ThreadPoolExecutor() as pool:
        large = pool.submit(post, url, "/v1/completions", {**ASK, "n": 12})
        eventually(lambda: len(engine.submitted) == 2)
        assert post(url, "/v1/completions", ASK)[0] == 200
        assert not large.done() and len(engine.submitted) < 8
        assert len(large.result()[1]["choices"]) == 12


def test_a_client_that_goes_takes_its_place_in_the_queue_along() -> None:
    engine = ScriptedEngine(reply="word " * 200, step_s=0.02, max_requests=1, max_running=1)
    with serving(engine) as (url, _), ThreadPoolExecutor() as pool:
        long = pool.submit(post, url, "/v1/completions", {**ASK, "max_tokens": 40, "n": 2})
        eventually(lambda: len(engine.submitted) == 2)
        gone = connect(url)
        gone.request("POST", "/v1/completions", json.dumps({**ASK, "n": 3}), {"Content-Type": "application/json"})
        eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_waiting"] == 3)
        gone.close()
        eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_waiting"] == 0)
        assert long.result()[0] == 200 and len(engine.submitted) == 2


def test_deadlines() -> None:
    engine = ScriptedEngine(reply="word " * 200, step_s=0.02)
    with serving(engine, options=ServerOptions(request_timeout_s=0.5)) as (url, _):
        status, body = post(url, "/v1/completions", {**ASK, "max_tokens": 200}, **{"X-Request-Timeout": "0.1"})
        assert status == 503 and "within 0.1 s" in body["error"]["message"]
        began = time.monotonic()
        status, body = post(url, "/v1/completions", {**ASK, "max_tokens": 200}, **{"X-Request-Timeout": "1e9"})
        assert status == 503 and "within 0.5 s" in body["error"]["message"] and time.monotonic() - began >= 0.5
        eventually(lambda: engine.num_live == 0)
        with refused(openai.APIError, "0.5 s"):
            list(client_of(url).completions.create(stream=True, **{**ASK, "max_tokens": 200}))
        for wrong in ("soon", "0", "-1", "nan"):
            assert post(url, "/v1/completions", ASK, **{"X-Request-Timeout": wrong})[0] == 400


class _Stuck(ScriptedEngine):
    seconds = 0.0

    def metrics(self) -> Any:
        return {**super().metrics(), "forward_running_seconds": self.seconds}


def test_a_forward_that_does_not_end_is_seen() -> None:
    engine = _Stuck()
    with serving(engine, options=ServerOptions(stuck_after_s=5)) as (url, _):
        engine.seconds = 6.0
        assert json.loads(get(url, "/health")[2])["status"] == "stuck"
        status, body = post(url, "/v1/completions", ASK)
        assert status == 503 and "running for 6 s" in body["error"]["message"]
        engine.seconds = 0.0
        assert get(url, "/health")[0] == 200 and post(url, "/v1/completions", ASK)[0] == 200


class _Refusing(ScriptedEngine):
    """Takes the first choice and then no more, as an engine that fails does."""

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        if self.submitted:
            raise MoetoolError("the engine failed just now")
        return super().submit(prompt, params, sink)


def test_an_engine_that_fails_between_two_choices_leaves_nobody_waiting() -> None:
    with serving(_Refusing(max_requests=1)) as (url, _):
        status, body = post(url, "/v1/completions", {**ASK, "n": 4})
        assert status == 503 and "failed just now" in body["error"]["message"]
        eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_in_engine"] == 0)


def test_an_engine_that_fails_answers_a_queue_of_any_length() -> None:
    engine = _Refusing(max_requests=1)
    with serving(engine, options=ServerOptions(max_queue=5000)) as (url, server):
        server.frontend.in_engine = 2  # no place yet
        with ThreadPoolExecutor(12) as pool:
            waiting = [pool.submit(post, url, "/v1/completions", {**ASK, "n": 128}) for _ in range(12)]
            eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_waiting"] == 12 * 128)
            engine.submitted.append(SamplingParams(max_tokens=1))  # from here it takes nothing
            server.frontend.in_engine = 0
            assert post(url, "/v1/completions", ASK)[0] == 503
            assert [job.result()[0] for job in waiting] == [503] * 12


class _SlowToScore(ScriptedEngine):
    """Scores a prompt when told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.go_on = Event()
        self.scored = 0

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        self.scored += 1
        self.go_on.wait(20)
        return super().prompt_logprobs(prompt, top)


def test_scoring_keeps_to_the_deadline_and_to_one_thread() -> None:
    engine, score = _SlowToScore(), {**ASK, "echo": True, "logprobs": 1, "max_tokens": 0}
    with serving(engine) as (url, _):
        for _ in range(2):
            status, body = post(url, "/v1/completions", score, **{"X-Request-Timeout": "0.1"})
            assert status == 503 and "within 0.1 s" in body["error"]["message"]
        for _ in range(10):
            gone = connect(url)
            gone.request("POST", "/v1/completions", json.dumps(score), {"Content-Type": "application/json"})
            gone.close()
        assert post(url, "/v1/completions", ASK)[0] == 200  # threads are left to tokenise with
        assert engine.scored == 1  # which nobody waits for any more
        engine.go_on.set()
        assert post(url, "/v1/completions", score)[0] == 200
        eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_waiting"] == 0)
        assert engine.scored <= 3


def test_a_request_that_would_take_long_to_understand_is_refused() -> None:
    with serving(ScriptedEngine()) as (url, _):
        status, body = post(url, "/v1/completions", {**ASK, "n": 128, "stop": "a" * 1_500_000})
        assert status == 400 and body["error"]["param"] == "stop"
        assert post(url, "/v1/completions", {**ASK, "stop": ["a" * 1024] * 4})[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_page_in_a_browser_cannot_ask(kind: str) -> None:
    """These are the types that a page may send to another origin without asking; nothing here allows it to ask."""
    with serving(ScriptedEngine()) as (url, _):
        data = json.dumps(ASK).encode()
        assert post(url, "/v1/completions", data, **{"Content-Type": kind})[0] == 400
        connection = connect(url)
        asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", "/v1/completions", headers=asks)
        response = connection.getresponse()
        assert response.status == 403 and "Access-Control-Allow-Origin" not in response.headers


def test_what_is_not_served_is_said() -> None:
    with serving(ScriptedEngine()) as (url, _):
        for path in ("/v1/nothing", "/v1/embeddings"):
            status, body = post(url, path, {"model": "reference", "input": "a"})
            assert status == 404 and f"{path}; this server has /v1/models, /v1/completions" in body["error"]["message"]
            assert body["error"]["code"] == "unknown_url"
        paths = json.loads(get(url, "/openapi.json")[2])["paths"]
        answers = paths["/v1/completions"]["post"]["responses"]
        assert set(answers) == {"200", "400", "404", "408", "413", "429", "503"}
        served = {"/v1/models", "/v1/models/{name}", "/v1/completions", "/v1/chat/completions"}
        agents = {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens"}
        others = {"/", "/health", "/metrics", "/stats", "/tokenize", "/detokenize"}
        assert set(paths) == served | agents | others


def test_the_description_says_what_is_taken_and_given() -> None:
    with serving(ScriptedEngine()) as (url, _):
        description = json.loads(get(url, "/openapi.json")[2])
    fields = description["components"]["schemas"]["CompletionRequest"]["properties"]
    for name in ("prompt", "stop"):
        assert {"string", "array"} == {one["type"] for one in fields[name]["anyOf"]}
    assert fields["min_tokens"]["enum"] == [0, None] and fields["top_k"]["minimum"] == -1
    paths = description["paths"]
    assert list(paths["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = paths[path]["post"]
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert [one["name"] for one in operation["parameters"]] == ["X-Request-Id", "X-Request-Timeout"]
    assert list(paths["/tokenize"]["post"]["responses"]["200"]["content"]) == ["application/json"]


def test_a_body_that_trickles_is_given_up() -> None:
    with serving(ScriptedEngine(step_s=0.05), options=ServerOptions(body_timeout_s=0.3)) as (url, _):
        slow = connect(url)
        slow.putrequest("POST", "/v1/completions")
        slow.putheader("Content-Type", "application/json")
        slow.putheader("Content-Length", "1000")
        slow.endheaders(b"{")
        for _ in range(3):
            time.sleep(0.05)
            slow.send(b" ")
        response = slow.getresponse()
        body = json.loads(response.read())
        assert response.status == 408 and "within 0.3 s" in body["error"]["message"]
        assert response.headers["Connection"] == "close"
        # An answer may take longer than its question.
        assert post(url, "/v1/completions", {**ASK, "ignored": 1})[0] == 200


@pytest.mark.parametrize("settings", [{"max_queue": -1}, {"request_timeout_s": 0}, {"stuck_after_s": float("nan")}])
def test_options_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        ServerOptions(**settings)


def test_a_conversation() -> None:
    with serving(ScriptedEngine(), api_key="k") as (url, _):
        conversation = Conversation(f"{url}/v1", "k", {"temperature": 0})
        pieces = list(conversation.ask("hello"))
        assert "".join(pieces) == "Hello 🙂 你好, world." and len(pieces) > 3
        list(conversation.ask("again"))
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
        assert conversation.usage["completion_tokens"] > 3
    with refused(MoetoolError, url, "moetool serve"):
        Conversation(url)
    with refused(UsageError, "server", "address"):
        Conversation("ftp://a")


def test_a_conversation_drops_its_oldest_turns_where_it_outgrows_the_context() -> None:
    with serving(ScriptedEngine(max_context=200)) as (url, _):
        conversation = Conversation(url, settings={"temperature": 0})
        for number in range(12):
            list(conversation.ask(f"turn {number}: " + "word " * 10))
        assert conversation.num_dropped > 2 and len(conversation.messages) + conversation.num_dropped == 24
        assert conversation.messages[-2]["content"].startswith("turn 11")
        before = list(conversation.messages)
        with refused(ServerRefused, "maximum", "context", "length"):
            list(conversation.ask("word " * 400))
        assert conversation.messages == before
        done = CliRunner().invoke(app, ["chat", url, "--set", "temperature=0"], input=("word " * 30 + "\n") * 6)
    assert done.exit_code == 0 and "its oldest turns were dropped" in done.stderr


def test_a_conversation_that_breaks_off_is_not_remembered() -> None:
    with serving(ScriptedEngine(fail_at=3)) as (url, _):
        conversation = Conversation(url)
        with refused(MoetoolError, "disk", "fire"):
            list(conversation.ask("hello"))
        assert conversation.messages == []


def test_an_answer_without_a_chat_template_is_as_long_as_asked() -> None:
    engine = ScriptedEngine()
    engine.tokenizer.chat_template = None
    with serving(engine) as (url, _):
        for settings, expected in (({}, 128), ({"max_tokens": 200}, 200)):
            list(Conversation(url, settings={"temperature": 0, **settings}).ask("hello"))
            assert engine.submitted[-1].max_tokens == expected


def test_a_refused_turn_is_told_and_the_next_one_taken() -> None:
    with serving(ScriptedEngine(reply="a\x1b[2J\tb", room=60)) as (url, _):
        done = CliRunner().invoke(app, ["chat", url, "--set", "temperature=0"], input="long " * 200 + "\nhello\n")
    assert done.exit_code == 0 and done.stdout == "a\\x1b[2J\tb\n"
    assert "moetool: the server refused (400)" in done.stderr and "do not fit into 60" in done.stderr


def test_the_status_line() -> None:
    rates = Rates()
    before = {"tokens_generated": 100, "hits_kept": 50, "misses": 50, "bytes_read": 0}
    now = {"tokens_generated": 140, "hits_kept": 80, "misses": 60, "bytes_read": 5e8}
    rates.line(10.0, before)
    assert rates.line(12.0, {**now, "queue_running": 2}) == (
        "20.0 tokens/s | hits 75 % | 250 MB/s | 2 running, 0 waiting"
    )
    assert rates.line(13.0, now).startswith("13.3 tokens/s")  # a slow token makes no line of zeros
    assert rates.line(14.9, now).startswith("8.2 tokens/s")
    assert rates.line(20.0, now).startswith("0.0 tokens/s | hits - |")
