"""An engine without a model, for tests of the HTTP API: deterministic, in its own thread, with a set delay per step."""

import os
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moetool.base import assets
from moetool.base.errors import CapacityError
from moetool.runtime.request import Finish, Output, SamplingParams, Sink, State, TokenLogprob, Unavailable

END = 0
"""The embedded tokenizer's end-of-sequence token."""


@dataclass
class _Request:
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    answer: list[int]
    num_done: int = 0


@dataclass
class ScriptedEngine:
    """Answers every request with `reply`, one token of every running request per step, then end-of-sequence.

    With a temperature above 0 the tokens are random, from the seed, without end.

    Attributes:
        step_s: seconds between steps.
        fail_at: number of the token that is replaced by an error.
        max_running: further requests wait.
        cancelled: ids of the requests cancelled while they ran or waited.
        submitted: parameters of all requests, in order.
        room: longest prompt; a longer one raises CapacityError.
        reused: prompt tokens of every request that count as cached.
    """

    reply: str = "Hello 🙂 你好, world."
    step_s: float = 0.0
    fail_at: int | None = None
    max_running: int = 64
    max_context: int = 256
    max_requests: int = 64
    room: int = 10_000
    reused: int = 0
    model_name: str = "lab/reference"
    state: State = "ready"
    problems: tuple[str, ...] = ()
    cancelled: list[int] = field(default_factory=list)
    submitted: list[SamplingParams] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(assets.path("data", "reference-moe"))
        self.vocab_size = len(self.tokenizer)
        self._ids: dict[str, list[int]] = {}
        self._requests: dict[int, _Request] = {}
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @property
    def max_unbegun(self) -> int:
        return max(1, self.max_requests // 2)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        if len(prompt) > self.room:
            raise CapacityError(f"{len(prompt)} prompt tokens do not fit into {self.room}")

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}")
        self.check(prompt, params)
        if self.reply not in self._ids:
            self._ids[self.reply] = self.tokenizer.encode(self.reply, add_special_tokens=False)
        answer = [*self._ids[self.reply], END]
        if params.ignore_eos:
            answer += [END] * params.max_tokens
        if params.temperature > 0:
            draw = random.Random(params.seed)
            # skips special tokens, so that all tokens have text
            answer = [draw.randrange(4, self.vocab_size) for _ in range(params.drawn + params.max_tokens)]
        if params.temperature == 0 or params.seed is not None:
            assert prompt[len(prompt) - params.drawn :] == answer[: params.drawn]
        answer = answer[params.drawn :]
        with self._wake:
            self.submitted.append(params)
            request = len(self.submitted)
            self._requests[request] = _Request(prompt, params, sink, answer)
            self._wake.notify()
        return request

    def cancel(self, request: int) -> None:
        with self._wake:
            if found := self._requests.pop(request, None):
                self.cancelled.append(request)
                found.sink(Output(request, None, finish="cancelled"))

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        return [None, *(self._score(token, top) for token in prompt[1:])]

    def metrics(self) -> Mapping[str, float]:
        with self._wake:
            num = len(self._requests)
        running = min(num, self.max_running)
        return {"hits_kept": 7, "misses": 3, "bytes_read": 4096, "slots": 64, "queue_running": running, "oddity": 1.5}

    def stats(self) -> Mapping[str, Any]:
        return {"hit_rate": 0.7}

    @property
    def num_live(self) -> int:
        """Number of unfinished requests."""
        with self._wake:
            return len(self._requests)

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._requests or self._closed)
                if self._closed:
                    return
                for id, request in list(self._requests.items())[: self.max_running]:
                    output = self._step(id, request)
                    if output.finish is not None:
                        del self._requests[id]
                    request.sink(output)
            time.sleep(self.step_s)

    def _step(self, id: int, request: _Request) -> Output:
        if request.num_done == self.fail_at:
            return Output(id, None, finish="error", error="the disk is on fire")
        if request.params.max_tokens == 0:
            return Output(id, None, finish="length")
        token = request.answer[request.num_done]
        request.num_done += 1
        finish: Finish | None = None
        if token == END and not request.params.ignore_eos:
            finish = "stop"
        elif request.num_done == request.params.max_tokens:
            finish = "length"
        logprobs = request.params.logprobs
        reused = self.reused if request.num_done == 1 else 0
        return Output(id, token, None if logprobs is None else self._score(token, logprobs), finish, reused=reused)

    def _score(self, token: int, top: int) -> TokenLogprob:
        """A synthetic score: the token itself is second, and one alternative is impossible."""
        others = [(token + 1) % self.vocab_size, token, *range(4, 4 + top)]
        values = [-0.25, -0.5, float("-inf"), *[-9.0] * top]
        return TokenLogprob(-0.5, list(zip(others, values, strict=False))[:top])
