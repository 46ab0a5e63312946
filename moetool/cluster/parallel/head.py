"""The head of the ranks: one engine for the OpenAI server, batch after batch, generation after generation."""

import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from moetool.cluster.parallel.channel import Channel, Listener
from moetool.cluster.parallel.control import Control, Decision, Waiting
from moetool.cluster.parallel.members import Launcher, Members
from moetool.cluster.parallel.placing import Placing
from moetool.cluster.parallel.records import BatchRecord, record_of
from moetool.cluster.parallel.requests import Request, Requests
from moetool.errors import CapacityError, MismatchError, MoetoolError, UsageError, first_line
from moetool.request import SamplingParams, Sink, State, TokenLogprob, Unavailable
from moetool.types import Cluster, ModelSpec

_KEPT = 100
"""Batches that are remembered."""
_TICK_S = 0.25


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
        batches: those that have run since `use`, the last hundred.

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
        self._requests = Requests()
        self._next_id = 0
        self._over = False  # nobody will hear of what is put into the queue
        self._batch = -1
        self._batch_began: float | None = None
        self._ended = 0.0  # when the last one had
        self._done: dict[int, dict[str, Any]] = {}
        self._first_token = False
        self._store: Any = None
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._reason = ""
        self._counts = dict.fromkeys(("forwards", "failures", "moved"), 0)
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

    def start(self, timeout_s: float = 180.0, read_s: float = 3600.0) -> None:
        """Start the ranks; ready when this returns.

        Args:
            timeout_s: for all of them to come.
            read_s: for them to read their experts after that.

        Raises:
            MoetoolError: a rank cannot be built, or does not come in time.
        """
        from datetime import timedelta

        import torch.distributed as dist

        token = secrets.token_bytes(32)
        self._listener = Listener(self._host, token, self._hear)
        with socket.create_server((self._host, 0)) as sock:  # left to itself, the store would listen on every address
            port = sock.getsockname()[1]
            self._store = dist.TCPStore(
                *(self._host, port, None, True, timedelta(seconds=10)),
                wait_for_workers=False,
                master_listen_fd=sock.detach(),
            )
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
                late_s, there = time.monotonic() - deadline, len(self._ranks.there)
                if late_s > 0 and there < len(arguments):
                    raise MoetoolError(f"{there} of {len(arguments)} ranks came within {timeout_s:g} s")
                if late_s > read_s:
                    raise MoetoolError(f"the ranks did not read their experts within {read_s:g} s")
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
        while self._batch_began is not None or self._requests.pending or not self._events.empty():
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
        return self._queue(Request(prompt=list(prompt), params=params, sink=sink))

    def cancel(self, request: int) -> None:
        """Stop a request; its sink gets a last message unless it has ended already."""
        self._events.put(("cancel", request))

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probabilities of a prompt's tokens; waits for the batch that it is in. Raises: as `submit`."""
        self._require_ready()
        params = SamplingParams(max_tokens=0)
        self.check(prompt, params)
        answer: Future[list[TokenLogprob | None]] = Future()
        self._queue(Request(prompt=list(prompt), params=params, score=answer, top=top))
        return answer.result()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name."""
        began = self._batch_began
        return {
            "tokens_prompt": self._requests.prompt,
            "tokens_generated": self._requests.generated,
            "forwards": self._counts["forwards"],
            "failures": self._counts["failures"],
            "requests_retried": self._requests.retried,
            "queue_running": len(self._requests.running),
            "queue_waiting": len(self._requests.pending),
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

    def _queue(self, request: Request) -> int:
        with self._lock:
            if self._over:
                raise Unavailable(f"the server is {self.state}; try again later")
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
                    waits = self._requests.pending and self._ranks.whole and self._batch_began is None
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
            with self._lock:
                self._over = True
            unheard = []
            while not self._events.empty():
                kind, value = self._events.get_nowait()
                if kind == "submit":
                    unheard.append(value)
                elif kind == "use":
                    value[3].set()
            self._requests.refuse_all(unheard, self._reason)

    def _handle(self, kind: str, value: Any) -> None:
        match kind:
            case "submit":
                self._requests.admit(value)
            case "cancel":
                if (gpu := self._requests.cancel(value)) is not None:
                    self._ranks.send(gpu, {"kind": "cancel", "request": value})
            case "hello":
                self._greet(*value)
            case "gone":
                self._lose(*value)
            case "died":
                self._ranks.died(value)
            case "waits":  # for a machine
                pass
            case "message":
                gpu, channel, message = value
                if self._ranks.knows(gpu, channel):
                    self._heard(gpu, message)
            case "decided":
                epoch, batch, found = value
                self._migrate(self._placing.decided(epoch, batch, found, self._batch))
            case "use":
                self._use(*value)

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
        self._requests.begin_again()
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
                    self._first_token = True
                    self._requests.answer(output)
            # One of a generation that has ended meanwhile says nothing of the batch that runs now.
            case "done" if generation == self._ranks.generation and message["batch"] == self._batch:
                self._done[gpu] = message
                if len(self._done) == len(self._ranks.members):
                    self._finish()

    def _advance(self) -> None:
        """Begin what can begin now."""
        if self.state == "ready" and self._ranks.gone:
            raise MoetoolError("all ranks are gone, and none of them can be started again")
        if self.state == "starting" and len(self._ranks.there) == len(self.cluster.gpus) and not self._ranks.members:
            self._form()
        if self.state == "starting" or not self._ranks.whole or self._batch_began is not None:
            # A queue that fills the next batch tells all of it at once; one that does not is given time to fill.
            known = self._first_token or len(self._requests.pending) >= self.max_requests
            if known and self.control.looks_ahead and self._ranks.whole:
                self._decide()
            return
        if self._ranks.there != self._ranks.members:  # somebody is back, and nothing runs
            self._form()
        elif self._requests.pending and self._is_due():
            if not self.control.looks_ahead:
                self._decide()
            asked = self._placing.deciding
            if asked is None or time.monotonic() - max(asked, self._ended) > self._patience_s:
                self._begin()

    def _is_due(self) -> bool:
        full = len(self._requests.pending) * len(self.cluster.gpus) >= self.max_requests * len(self._ranks.members)
        return full or time.monotonic() - self._requests.pending[0].began >= self._gather_s

    def _choose(self) -> list[Request]:
        """The requests of the next batch, each with its GPU."""
        return self._requests.choose(self._ranks.members, self.max_requests // len(self.cluster.gpus))

    def _decide(self) -> None:
        """Have the control look at the batch that comes, once, if all ranks are there to be placed on."""
        whole = len(self._ranks.members) == len(self.cluster.gpus)
        coming = self._batch + 1
        if not whole or not self._requests.pending or not self.control.decides:
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
        shares = self._requests.begin(chosen)
        for gpu in self._ranks.members:
            self._ranks.send(
                gpu,
                {
                    "kind": "batch",
                    "batch": self._batch,
                    "version": self._placing.version,
                    "requests": shares.get(gpu, []),
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
        self.batches = [*self.batches, record][-_KEPT:]  # each has the uses of every expert
        self._counts["forwards"] += record.steps
        self._counts["moved"] += record.moved_bytes
        self._during += record.moved_during_exchange
        self._placing.note(record, moved_s, len(self._ranks.members))
        self._requests.refuse_running("the request was lost by its rank")  # which said that all had ended

    def _use(self, control: Control, placed_GLE: np.ndarray, migrate: str, over: threading.Event) -> None:
        if self._batch_began is not None or self._requests.pending or self._placing.deciding is not None:
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
