"""The head of the ranks: one engine for the OpenAI server, batch after batch, generation after generation."""

import contextlib
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from moetool.cluster.parallel.channel import Channel, Listener
from moetool.cluster.parallel.control import Control, Decision, Waiting
from moetool.cluster.parallel.members import Launcher, Members
from moetool.cluster.parallel.placing import Placing
from moetool.cluster.parallel.records import BatchRecord, record_of
from moetool.errors import CapacityError, MismatchError, MoetoolError, UsageError, first_line
from moetool.request import Output, SamplingParams, Sink, State, TokenLogprob, Unavailable
from moetool.types import Cluster, ModelSpec

_RETRIES = 3
_KEPT = 1000
"""Batches that are remembered."""
_TICK_S = 0.25


@dataclass(slots=True, kw_only=True)
class _Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    sink: Sink | None = None
    score: "Future[list[TokenLogprob | None]] | None" = None
    top: int = 0
    made: list[int] = field(default_factory=list)
    gpu: int = -1
    retries: int = 0
    began: float = 0.0


class Head:
    """An `EngineLike` over ranks in lockstep.

    Requests wait in one queue. The next batch is its first `seats` requests for each rank, dealt round robin (as
    plans reckon unless told otherwise; a plan for other `starts` is served so too). While one batch runs, the control
    may place for the requests that wait, and their experts move.
    A batch is static, as DIRECTOR's: whoever comes later waits for its end.

    When a rank is gone all others drop what they do and form the next generation without it at once, its experts read
    from their own disks; requests under way begin again with the tokens they have as part of their prompt (the same
    tokens follow, for what was drawn before is known by seed and number), at most three times. The rank is started
    again and taken in between two batches.

    Args:
        model: as ranks locate it.
        cluster: whose GPUs the ranks are, with all of their memory.
        placed_GLE: the placement to begin with, and of every generation in which all ranks are there.
        control: decides on others.
        launcher: of the ranks.
        rank_options: of `RankOptions`, by name.
        host: this machine's address, as the ranks reach it.
        gather_s: how long a batch that is not full waits for more requests.
        patience_s: how long a batch waits for a decision about it that is under way.

    Attributes:
        batches: those that have run since `use`, the last thousand.

    Effects: `start` starts the ranks; `close` ends them.
    """

    def __init__(
        self,
        model: str,
        spec: ModelSpec,
        cluster: Cluster,
        placed_GLE: np.ndarray,
        control: Control,
        launcher: Launcher,
        *,
        tokenizer: Any,
        vocab_size: int,
        rank_options: Mapping[str, Any],
        host: str = "127.0.0.1",
        gather_s: float = 0.01,
        patience_s: float = 1.0,
    ) -> None:
        self.model_name, self.tokenizer, self.vocab_size = model, tokenizer, vocab_size
        self.spec, self.cluster = spec, cluster
        self.state: State = "starting"
        self.max_context = self.max_requests = 0
        self.batches: list[BatchRecord] = []
        self._launcher, self._rank_options = launcher, dict(rank_options)
        self._gather_s, self._patience_s = gather_s, patience_s
        self._host = host
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._ranks = Members(len(cluster.gpus), launcher, lambda kind, value: self._events.put((kind, value)))
        self._placing = Placing(
            spec,
            cluster,
            control,
            placed_GLE,
            self._rank_options.get("migrate", "overlap"),
            link_bytes_s=self._rank_options.get("link_bytes_s", 0.0) or cluster.link_bytes_s,
            row_s=max(self._rank_options.get("expert_token_s", 0.0), 1e-6),
            post=lambda kind, value: self._events.put((kind, value)),
        )
        self._lock = threading.Lock()
        self._pending: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._next_id = 0
        self._batch = -1
        self._batch_began: float | None = None
        self._ended = 0.0  # when the last one had
        self._done: dict[int, dict[str, Any]] = {}
        self._first_token = False
        self._store: Any = None
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._reason = ""
        self._counts = dict.fromkeys(("prompt", "generated", "forwards", "failures", "retried", "moved"), 0)
        self._during = 0

    @property
    def control(self) -> Control:
        """Who decides."""
        return self._placing.control

    @property
    def decisions(self) -> list[Decision]:
        """What was decided since `use`, the last thousand."""
        return self._placing.decisions

    # -- from any thread ---------------------------------------------------------------------------------------

    def start(self, timeout_s: float = 180.0) -> None:
        """Start the ranks; ready when this returns.

        Raises:
            MoetoolError: a rank cannot be built, or does not come in time.
        """
        from datetime import timedelta

        import torch.distributed as dist

        token = secrets.token_bytes(32)
        self._listener = Listener(self._host, token, self._hear)
        self._store = dist.TCPStore(self._host, 0, None, True, timedelta(seconds=10), wait_for_workers=False)
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)
        self._thread.start()
        arguments = [
            {
                "gpu": gpu,
                "model": self.model_name,
                "server_G": list(self.cluster.server_G),
                "head": tuple(self._listener.address),
                "store": (self._host, self._store.port),
                "token": token.hex(),
                "options": self._rank_options,
            }
            for gpu in range(len(self.cluster.gpus))
        ]
        try:
            self._launcher.launch(arguments, lambda gpu: self._events.put(("died", gpu)))
            deadline = time.monotonic() + timeout_s
            while self.state == "starting":
                if time.monotonic() > deadline:
                    raise MoetoolError(
                        f"{len(self._ranks.there)} of {len(arguments)} ranks came within {timeout_s:g} s"
                    )
                time.sleep(0.02)
            if self.state == "failed":
                raise MoetoolError(self._reason)
        except BaseException:
            self.close()
            raise

    def use(self, control: Control, placed_GLE: np.ndarray, migrate: str | None = None) -> None:
        """Begin anew with another control, placement and way to migrate, when nothing runs; records begin anew."""
        over = threading.Event()
        self._events.put(("use", (control, placed_GLE, migrate or self._rank_options.get("migrate", "overlap"), over)))
        while not over.wait(0.1):
            if self.state == "failed":
                raise MoetoolError(self._reason)

    def settle(self) -> None:
        """Wait until nothing runs or waits."""
        while self._batch_began is not None or self._pending or not self._events.empty():
            if self.state == "failed":
                raise MoetoolError(self._reason)
            time.sleep(0.005)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raises: UsageError, CapacityError: the request can never be served."""
        if not prompt:
            raise UsageError("the prompt is empty: it has no token to begin with; send at least one character")
        if (bad := next((t for t in prompt if not 0 <= t < self.vocab_size), None)) is not None:
            raise UsageError(f"the prompt has token id {bad}, expected 0 to {self.vocab_size - 1}")
        if len(prompt) + params.max_tokens > self.max_context:
            raise CapacityError(
                f"the prompt has {len(prompt):,} tokens and {params.max_tokens:,} more are asked for, but the context "
                f"holds {self.max_context:,}; shorten the prompt or ask for fewer tokens"
            )

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request; its tokens go to `sink`, on the head's thread. Raises: as `check`; Unavailable."""
        self._require_ready()
        self.check(prompt, params)
        if params.seed is None:  # so that a retry draws what the first try would have
            params = replace(params, seed=secrets.randbits(63))
        return self._queue(_Request(id=-1, prompt=list(prompt), params=params, sink=sink))

    def cancel(self, request: int) -> None:
        """Stop a request; its sink gets a last message unless it has ended already."""
        self._events.put(("cancel", request))

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probabilities of a prompt's tokens; waits for the batch that it is in. Raises: as `submit`."""
        self._require_ready()
        params = SamplingParams(max_tokens=0)
        self.check(prompt, params)
        answer: Future[list[TokenLogprob | None]] = Future()
        self._queue(_Request(id=-1, prompt=list(prompt), params=params, score=answer, top=top))
        return answer.result()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name."""
        began = self._batch_began
        return {
            "tokens_prompt": self._counts["prompt"],
            "tokens_generated": self._counts["generated"],
            "forwards": self._counts["forwards"],
            "failures": self._counts["failures"],
            "requests_retried": self._counts["retried"],
            "queue_running": len(self._running),
            "queue_waiting": len(self._pending),
            "ranks": len(self._ranks.members),
            "generation": self._ranks.generation,
            "batches": self._batch + 1,
            "batch_running_seconds": 0.0 if began is None else time.monotonic() - began,
            "placement_version": self._placing.version,
            "decisions_late": self._placing.late,
            "migrated_bytes": self._counts["moved"],
            "migrated_bytes_during_all_to_all": self._during,
        }

    def stats(self) -> dict[str, Any]:
        """The same for people, the last batches and decisions."""
        return {
            "placement": self.control.placement,
            "ranks": self._ranks.members,
            "generation": self._ranks.generation,
            "experts_held": self._placing.placed_GLE.sum(axis=(1, 2)).tolist(),
            "batches": [record.to_json() for record in self.batches[-8:]],
            "control_error": self._placing.error or None,
            "decisions": [decision.to_json() for decision in self.decisions[-8:]],
            "counters": self.metrics(),
        }

    def close(self) -> None:
        """End the ranks and tell everybody who still waits."""
        if self.state != "failed":
            self.state = "draining"
        self._events.put(("close", None))
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self._launcher.close()
        if self._listener is not None:
            self._listener.close()
        self._store = None

    def _require_ready(self) -> None:
        if self.state != "ready":
            raise Unavailable(f"the server is {self.state}; try again later")

    def _queue(self, request: _Request) -> int:
        with self._lock:
            request.id, self._next_id = self._next_id, self._next_id + 1
        self._events.put(("submit", request))
        return request.id

    # -- a thread for each rank --------------------------------------------------------------------------------

    def _hear(self, channel: Channel) -> None:
        gpu = None
        try:
            hello, _ = channel.receive()
            gpu = hello["gpu"]
            self._events.put(("hello", (gpu, channel, hello)))
            while True:
                message, _ = channel.receive()
                self._events.put(("message", (gpu, channel, message)))
        finally:
            self._events.put(("gone", (gpu, channel)))

    # -- the head's own thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                try:
                    waits = self._pending and self._ranks.whole and self._batch_began is None
                    kind, value = self._events.get(timeout=min(_TICK_S, self._gather_s) if waits else _TICK_S)
                except queue.Empty:
                    kind, value = "tick", None
                if kind == "close":
                    self._reason = self._reason or "the engine was closed"
                    break
                self._handle(kind, value)
                self._ranks.end_silent()
                self._advance()
        except MoetoolError as error:
            self._reason = first_line(error)
        except BaseException as error:
            self._reason = f"the head failed: {first_line(error)}"
            raise
        finally:
            if self.state != "draining":
                self.state = "failed"
            self._ranks.dismiss()
            for request in [*self._running.values(), *self._pending]:
                self._refuse(request, self._reason)
            while not self._events.empty():
                kind, value = self._events.get_nowait()
                if kind == "submit":
                    self._refuse(value, self._reason)
                elif kind == "use":
                    value[3].set()

    def _handle(self, kind: str, value: Any) -> None:
        match kind:
            case "submit":
                self._admit(value)
            case "cancel":
                self._cancel(value)
            case "hello":
                self._greet(*value)
            case "gone":
                self._lose(*value)
            case "died":
                self._ranks.died(value)
            case "message":
                gpu, channel, message = value
                if self._ranks.knows(gpu, channel):
                    self._heard(gpu, message)
            case "decided":
                epoch, batch, found = value
                self._migrate(self._placing.decided(epoch, batch, found, self._batch))
            case "use":
                self._use(*value)

    def _admit(self, request: _Request) -> None:
        request.began = time.monotonic()
        if request.score is None and request.params.max_tokens == 0:
            self._give(request, Output(request.id, None, finish="length"))
        else:
            self._pending.append(request)

    def _cancel(self, number: int) -> None:
        if number in self._running:
            gpu = self._running[number].gpu
            self._ranks.send(gpu, {"kind": "cancel", "request": number})
            return
        for request in self._pending:
            if request.id == number:
                self._pending.remove(request)
                self._give(request, Output(number, None, finish="cancelled"))
                return

    def _greet(self, gpu: int, channel: Channel, hello: dict[str, Any]) -> None:
        if hello["revision"] != self.spec.revision:
            self._reason = f"GPU {gpu} has another checkpoint of {self.model_name} than the plan was made for"
            self.state = "failed"
            raise MismatchError(self._reason)
        self._ranks.greet(gpu, channel, hello["migration"])
        self.max_context = hello["max_context"]
        self.max_requests = hello["seats"] * len(self.cluster.gpus)

    def _lose(self, gpu: int | None, channel: Channel) -> None:
        if gpu is not None and self._ranks.knows(gpu, channel) and self._ranks.lose(gpu):
            self._counts["failures"] += 1
            self._form()

    def _form(self) -> None:
        """Have all ranks that are there form the next generation; what ran begins again later."""
        for request in sorted(self._running.values(), key=lambda r: r.id, reverse=True):
            request.retries += 1
            self._counts["retried"] += 1
            if request.retries > _RETRIES:
                self._refuse(request, f"ranks were lost {request.retries} times while this request ran; try it again")
            else:
                self._pending.appendleft(request)
        self._running.clear()
        self._batch_began = None
        self._done.clear()
        self._ranks.call(self._placing.order(self._ranks.there))

    def _heard(self, gpu: int, message: dict[str, Any]) -> None:
        generation = message.get("generation", self._ranks.generation)
        match message["kind"]:
            case "alive" | "holds" | "formed" as kind:
                if self._ranks.heard(gpu, kind, generation) and self.state == "starting":
                    self.state = "ready"
            case "broken" if generation == self._ranks.generation:
                self._form()
            case "tokens" if generation == self._ranks.generation:
                for output in message["outputs"]:
                    self._token(output)
            case "done" if message["batch"] == self._batch:
                self._done[gpu] = message
                if len(self._done) == len(self._ranks.members):
                    self._finish()

    def _token(self, said: dict[str, Any]) -> None:
        request = self._running.get(said["request"])
        if request is None:
            return
        self._first_token = True
        if request.score is not None:
            del self._running[request.id]
            if "error" in said:
                request.score.set_exception(MoetoolError(said["error"]))
            elif "scored" in said:
                request.score.set_result([None, *(TokenLogprob(value, _pairs(top)) for value, top in said["scored"])])
            else:
                request.score.set_exception(MoetoolError("cancelled"))
            return
        logprob = said.get("logprob")
        if said["token"] is not None:
            request.made.append(said["token"])
            self._counts["generated"] += 1
        output = Output(
            request.id,
            said["token"],
            None if logprob is None else TokenLogprob(logprob[0], _pairs(logprob[1])),
            said["finish"],
            said.get("error"),
        )
        self._give(request, output)

    def _advance(self) -> None:
        """Begin what can begin now."""
        if self.state == "ready" and self._ranks.gone:
            raise MoetoolError("all ranks are gone, and none of them can be started again")
        if self.state == "starting" and len(self._ranks.there) == len(self.cluster.gpus) and not self._ranks.members:
            self._form()
        if self.state == "starting" or not self._ranks.whole or self._batch_began is not None:
            # A queue that fills the next batch tells all of it at once; one that does not is given time to fill.
            known = self._first_token or len(self._pending) >= self.max_requests
            if known and self.control.looks_ahead and self._ranks.whole:
                self._decide()
            return
        if self._ranks.there != self._ranks.members:  # somebody is back, and nothing runs
            self._form()
        elif self._pending and self._is_due():
            if not self.control.looks_ahead:
                self._decide()
            asked = self._placing.deciding
            if asked is None or time.monotonic() - max(asked, self._ended) > self._patience_s:
                self._begin()

    def _is_due(self) -> bool:
        full = len(self._pending) * len(self.cluster.gpus) >= self.max_requests * len(self._ranks.members)
        return full or time.monotonic() - self._pending[0].began >= self._gather_s

    def _choose(self) -> list[_Request]:
        """The requests of the next batch, each with its GPU."""
        seats = self.max_requests // len(self.cluster.gpus) * len(self._ranks.members)
        chosen = list(self._pending)[:seats]
        for place, request in enumerate(chosen):
            request.gpu = self._ranks.members[place % len(self._ranks.members)]
        return chosen

    def _decide(self) -> None:
        """Have the control look at the batch that comes, once, if all ranks are there to be placed on."""
        whole = len(self._ranks.members) == len(self.cluster.gpus)
        coming = self._batch + 1
        if not whole or not self._pending or not self.control.decides:
            return
        if self._placing.asked_for(coming) or self._placing.deciding is not None:
            return
        waiting = [
            Waiting(
                prompt=[*request.prompt, *request.made],
                new_tokens=request.params.max_tokens - len(request.made),
                gpu=request.gpu,
            )
            for request in self._choose()
        ]
        began = self._batch_began
        self._placing.ask(coming, waiting, None if began is None else time.monotonic() - began)

    def _migrate(self, stages: list[dict[str, Any]]) -> None:
        if stages:
            self._ranks.tell({"kind": "migrate", "stages": stages})

    def _begin(self) -> None:
        """Begin the next batch."""
        self._migrate(self._placing.stages())
        chosen = self._choose()
        self._batch += 1
        self._batch_began, self._first_token = time.monotonic(), False
        shares: dict[int, list[dict[str, Any]]] = {gpu: [] for gpu in self._ranks.members}
        for request in chosen:
            self._pending.popleft()
            self._running[request.id] = request
            one: dict[str, Any] = {"id": request.id, "prompt": [*request.prompt, *request.made]}
            if request.score is not None:
                one["top"] = request.top
            else:
                left = request.params.max_tokens - len(request.made)
                one["params"] = asdict(replace(request.params, max_tokens=left))
                one["drawn"] = len(request.made)
            self._counts["prompt"] += len(request.prompt)
            shares[request.gpu].append(one)
        for gpu in self._ranks.members:
            self._ranks.send(
                gpu,
                {
                    "kind": "batch",
                    "batch": self._batch,
                    "version": self._placing.version,
                    "requests": shares[gpu],
                },
            )
        self._batch_size = len(chosen)

    def _finish(self) -> None:
        """The batch has ended on all ranks."""
        assert self._batch_began is not None
        record = record_of(
            self._batch, self._batch_size, time.monotonic() - self._batch_began, self._done, self.cluster
        )
        moved_s = sum(done["moved"]["seconds"] for done in self._done.values())
        self._batch_began, self._ended = None, time.monotonic()
        self._done = {}
        self.batches = [*self.batches[-_KEPT:], record]
        self._counts["forwards"] += record.steps
        self._counts["moved"] += record.moved_bytes
        self._during += record.moved_during_exchange
        self._placing.note(record, moved_s, len(self._ranks.members))
        for request in list(self._running.values()):  # a rank said that all had ended
            self._refuse(request, "the request was lost by its rank")

    def _use(self, control: Control, placed_GLE: np.ndarray, migrate: str, over: threading.Event) -> None:
        if self._batch_began is not None or self._pending or self._placing.deciding is not None:
            self._events.put(("use", (control, placed_GLE, migrate, over)))
            time.sleep(0.01)
            return
        self._placing.use(control, placed_GLE, migrate)
        self.batches = []
        self._form()
        threading.Thread(target=self._when_formed, args=(over,), daemon=True).start()

    def _when_formed(self, over: threading.Event) -> None:
        while not self._ranks.whole and self.state == "ready":
            time.sleep(0.005)
        over.set()

    def _give(self, request: _Request, output: Output) -> None:
        if output.finish is not None:
            self._running.pop(request.id, None)
        if request.sink is not None:
            with contextlib.suppress(Exception):  # one broken sink must not end the others
                request.sink(output)

    def _refuse(self, request: _Request, reason: str) -> None:
        self._running.pop(request.id, None)
        if request.score is not None:
            request.score.set_exception(MoetoolError(reason))
        else:
            self._give(request, Output(request.id, None, finish="error", error=reason))


def _pairs(top: Sequence[Sequence[Any]]) -> list[tuple[int, float]]:
    return [(int(token), float(value)) for token, value in top]
