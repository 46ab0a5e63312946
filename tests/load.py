"""Many random clients of one server: some wait, some disconnect, some send invalid requests."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PROMPTS = ("Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 =", "User: hello there")
_ENDS = {"stop", "length"}


@dataclass(slots=True)
class Tally:
    """Outcomes of the requests.

    Attributes:
        outcomes: number of requests by outcome.
        wrong: violations, in words; empty after a good run.
        texts: the first greedy answer to each prompt; later ones must equal it.
        latest: longest seconds between a request and its answer.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    latest: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, outcome: str) -> None:
        """Count an outcome."""
        with self._lock:
            self.outcomes[outcome] += 1

    def fault(self, words: str) -> None:
        """Record a violation."""
        with self._lock:
            self.wrong.append(words)

    def same_text(self, prompt: str, text: str) -> None:
        """Record a greedy answer."""
        with self._lock:
            if self.texts.setdefault(prompt, text) != text:
                self.wrong.append(f"{prompt!r} was answered {self.texts[prompt]!r} and then {text!r}")

    def took(self, seconds: float) -> None:
        """Record the seconds until an answer."""
        with self._lock:
            self.latest = max(self.latest, seconds)


def run_clients(url: str, num_clients: int, seconds: float, *, seed: int = 0) -> Tally:
    """Run clients for a while.

    A 503 must have a reason, and no other 5xx may occur. Every answer that has begun must be complete or end with an
    error, unless its client disconnected.
    """
    tally, until = Tally(), time.monotonic() + seconds

    def live(number: int) -> None:
        client = _Client(url, random.Random(seed * 10_007 + number), tally)
        while time.monotonic() < until:
            client.ask()

    with ThreadPoolExecutor(num_clients) as pool:
        for client in [pool.submit(live, number) for number in range(num_clients)]:
            client.result()
    return tally


class _Client:
    """One client with random requests and random reactions to the answers."""

    def __init__(self, url: str, draw: random.Random, tally: Tally) -> None:
        self._address = urlsplit(url).netloc
        self._draw = draw
        self._tally = tally
        self._ways: list[tuple[Callable[[], None], int]] = [
            (self._whole, 6),
            (self._streamed, 6),
            (self._chat, 3),
            (self._scored, 2),
            (self._hurried, 2),
            (self._leaves_a_stream, 4),
            (self._leaves_at_once, 4),
            (self._leaves_while_sending, 1),
            (self._impossible, 2),
        ]

    def ask(self) -> None:
        ways, weights = zip(*self._ways, strict=True)
        way = self._draw.choices(ways, weights)[0]
        try:
            way()
        except (OSError, http.client.HTTPException) as error:
            self._tally.fault(f"{way.__name__}: {type(error).__name__}: {error}")

    def _body(self, **more: Any) -> dict[str, Any]:
        return {
            "model": "reference",
            "prompt": self._draw.choice(PROMPTS),
            "max_tokens": 12,
            "temperature": 0,
            **more,
        }

    def _request(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        return connection

    def _answer(self, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> dict[str, Any] | None:
        """The answer, or None if the server refused for a valid reason."""
        began = time.monotonic()
        connection = self._request(body, path, **headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        self._tally.took(time.monotonic() - began)
        if response.status == 200:
            self._tally.count("answered")
            return answer
        self._refused(response.status, answer, response.headers)
        return None

    def _refused(self, status: int, answer: dict[str, Any], headers: http.client.HTTPMessage) -> None:
        self._tally.count(str(status))
        if status not in (400, 429, 503) or not answer["error"]["message"]:
            self._tally.fault(f"status {status}: {answer}")
        if status in (429, 503) and "Retry-After" not in headers:
            self._tally.fault(f"status {status} without Retry-After")
        if status == 429:
            time.sleep(self._draw.uniform(0.05, 0.3))

    def _whole(self) -> None:
        num = self._draw.choice([1, 1, 3])
        body = self._body(n=num)
        if answer := self._answer(body):
            if len(answer["choices"]) != num or any(c["finish_reason"] not in _ENDS for c in answer["choices"]):
                self._tally.fault(f"not whole: {answer}")
            for choice in answer["choices"]:
                self._tally.same_text(body["prompt"], choice["text"])

    def _chat(self) -> None:
        body = {"model": "reference", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = self._answer({**body, "temperature": 0.8, "seed": self._draw.randrange(9)}, "/v1/chat/completions")
        if answer and answer["choices"][0]["finish_reason"] not in _ENDS:
            self._tally.fault(f"not whole: {answer}")

    def _scored(self) -> None:
        answer = self._answer(self._body(echo=True, logprobs=1, max_tokens=self._draw.randrange(2)))
        if answer and not all(value <= 0 for value in answer["choices"][0]["logprobs"]["token_logprobs"][1:]):
            self._tally.fault(f"log-probabilities above 0: {answer}")

    def _hurried(self) -> None:
        self._answer(self._body(max_tokens=200), **{"X-Request-Timeout": f"{self._draw.uniform(0.01, 0.5):.3f}"})

    def _impossible(self) -> None:
        wrong = self._draw.choice([{"max_tokens": 10**6}, {"prompt": []}, {"temperature": "hot"}, {"prompt": [-1]}])
        if self._answer(self._body(**wrong)) is not None:
            self._tally.fault(f"was served: {wrong}")

    def _streamed(self) -> None:
        body = self._body(stream=True)
        connection = self._request(body)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.status != 200:
            self._refused(response.status, json.loads(text), response.headers)
            return
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        if not events or events[-1] != "[DONE]":
            self._tally.fault(f"a stream broke off: {events[-1:]}")
            return
        self._tally.count("streamed")
        chunks = [json.loads(event) for event in events[:-1]]
        self._tally.same_text(body["prompt"], "".join(chunk["choices"][0]["text"] for chunk in chunks))

    def _leaves_a_stream(self) -> None:
        connection = self._request(self._body(stream=True, max_tokens=400))
        response = connection.getresponse()
        if response.status != 200:
            self._refused(response.status, json.loads(response.read()), response.headers)
        else:
            for _ in range(self._draw.randrange(6)):
                response.readline()
            self._tally.count("left a stream")
        connection.close()

    def _leaves_at_once(self) -> None:
        connection = self._request(self._body(max_tokens=400, n=2, echo=self._draw.random() < 0.3, logprobs=1))
        time.sleep(self._draw.uniform(0, 0.2))
        connection.close()
        self._tally.count("left")

    def _leaves_while_sending(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=120)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b'{"model": "refer')
        connection.close()
        self._tally.count("left while sending")
