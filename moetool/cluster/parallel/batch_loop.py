"""The head's event loop, in its own thread: batches and generations."""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, MoetoolError, first_line
from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.parallel.batch_placement import BatchReplacement, Waiting
from moetool.cluster.parallel.batch_records import BatchRecord, record_of
from moetool.cluster.parallel.channel import RankChannel
from moetool.cluster.parallel.members import Members
from moetool.cluster.parallel.placement_state import PlacementState
from moetool.cluster.parallel.rank_options import HeadOptions
from moetool.cluster.parallel.requests import RankRequest, Requests
from moetool.models.files.content_hash import differing_file
from moetool.placement.request_ranks import RankAssignment
from moetool.runtime.request import State, Unavailable

_LOG = logging.getLogger(__name__)
_KEPT = 100
"""Number of batch records kept."""
_TICK_S, _LEAST_TICK_S = 0.25, 0.002


class BatchLoop:
    """The queue, the running batch, and its ranks.

    All changes are events in one queue (`post`), which `run` takes one by one. Everything but `post`, `admit` and
    reading attributes belongs to the thread of `run`. `ranks` and `placing` are set before `run`; both post events.

    Args:
        options: how batches are gathered.
        content: SHA-256 of each file of the model; without it, ranks are not checked.

    Attributes:
        state: state of the engine; `reason` is the cause of a failure.
        max_context, max_requests: limits of a request and of a batch; known once a rank has registered.
        requests, ranks, placing: waiting and running requests, live ranks, and placements.
        records: the last hundred batches since `use`.
        batch: number of the newest batch, a run of steps (`Lockstep`).
        began: start time of the running batch.
        forwards, failures, moved_bytes, moved_during_exchange: counters since the start.
    """

    def __init__(
        self, spec: ModelSpec, cluster: Cluster, options: HeadOptions, content: Mapping[str, str] | None = None
    ) -> None:
        self.state: State = "starting"
        self.reason = ""
        self.max_context = self.max_requests = 0
        self.requests = Requests()
        self.ranks: Members
        self.placing: PlacementState
        self.records: list[BatchRecord] = []
        self.batch = -1
        self.began: float | None = None
        self.forwards = self.failures = self.moved_bytes = self.moved_during_exchange = 0
        self.gather_s, self.patience_s = options.gather_s, options.patience_s
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._spec, self._cluster, self._content = spec, cluster, content or {}
        self._lock = threading.Lock()
        self._next_id = 0
        self._over = False  # events are no longer taken
        self._seating = options.seating or RankAssignment(server_G=tuple(cluster.server_G))
        self._seats = 0  # seats per rank
        self.memory_bytes: dict[str, int] = {}
        self._batch_size = 0
        self._due: float | None = None  # when the next batch could have begun
        self._ending = False  # the ranks were told to end the running batch
        self._cohort = -1  # number of the newest group of requests that began together
        self._late: set[int] = set()  # requests that joined the running batch, which may have ended before they arrived
        self._decided_s = 0.0
        self._ended = 0.0  # end of the last batch
        self._done: dict[int, dict[str, Any]] = {}
        self._first_token = False

    # -- from any thread ---------------------------------------------------------------------------------------

    def post(self, kind: str, value: Any) -> None:
        """Queue an event."""
        self.events.put((kind, value))

    def admit(self, request: RankRequest) -> int:
        """Queue a request; return its number. Raises: Unavailable: the engine no longer serves."""
        with self._lock:
            if self._over:
                raise Unavailable(f"the server is {self.state}; try again later")
            request.id, self._next_id = self._next_id, self._next_id + 1
            self.post("submit", request)
        return request.id

    @property
    def problems(self) -> list[str]:
        """Return the cause of a failure, or the ranks without a machine."""
        if self.state == "failed":
            return [self.reason]
        return [f"GPU {gpu} has no machine; continuing without it" for gpu in self.ranks.without_machine]

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits, no decision is pending, and all events are handled."""
        if self.events.unfinished_tasks:  # first, since events change the others
            return False
        return self._at_rest

    @property
    def _at_rest(self) -> bool:
        waits = self.requests.pending or self.requests.running
        return self.began is None and not waits and self.placing.deciding is None

    # -- the head's own thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle events until `close` or until no rank is left; then refuse all waiting requests."""
        try:
            while True:
                waits = self.requests.pending and self.ranks.whole
                try:
                    kind, value = self.events.get(
                        timeout=min(_TICK_S, max(_LEAST_TICK_S, self.gather_s)) if waits else _TICK_S
                    )
                except queue.Empty:
                    self.step("tick", None)
                    continue
                if kind == "close":
                    self.reason = self.reason or "the engine was closed"
                    break
                self.step(kind, value)
                self.events.task_done()
        except MoetoolError as error:
            self.reason = first_line(error)
        except BaseException as error:
            self.reason = f"the head failed: {first_line(error)}"
            raise
        finally:
            if self.state != "draining":
                self.state = "failed"
            self.ranks.dismiss()
            with self._lock:
                self._over = True
            unheard = []
            while not self.events.empty():
                kind, value = self.events.get_nowait()
                if kind == "submit":
                    unheard.append(value)
                elif kind == "use":
                    value[3].set()
            self.requests.refuse_all(unheard, self.reason)

    def step(self, kind: str, value: Any) -> None:
        """Handle an event, end silent ranks, and begin what can begin."""
        self.handle(kind, value)
        self.ranks.end_silent()
        self.advance()

    def handle(self, kind: str, value: Any) -> None:
        """Handle an event without beginning anything."""
        match kind:
            case "submit":
                self.requests.admit(value)
            case "cancel":
                if (gpu := self.requests.cancel(value)) is not None:
                    self.ranks.send(gpu, {"kind": "cancel", "request": value})
            case "hello":
                self._greet(*value)
            case "gone":
                self._lose(*value)
            case "died":
                self.ranks.died(value)
            case "message":
                gpu, channel, message = value
                if self.ranks.knows(gpu, channel):
                    self._heard(gpu, message)
            case "decided":
                epoch, batch, decision = value
                # Without lookahead a decision is about a batch that has not begun, so it is never late.
                begun = self._cohort if self.placing.control.looks_ahead else -1
                self._migrate(self.placing.decided(epoch, batch, decision, begun))
            case "use":
                self._use(*value)

    def _greet(self, gpu: int, channel: RankChannel, hello: dict[str, Any]) -> None:
        if hello["revision"] != self._spec.revision:
            self.reason = f"GPU {gpu} has another checkpoint of {self._spec.name} than the plan was made for"
            self.state = "failed"
            raise MismatchError(self.reason)
        if self._content and (file := differing_file(self._content, hello["content"])):
            self.reason = f"GPU {gpu} has another {file} of {self._spec.name} than the head; copy the head's file there"
            self.state = "failed"
            raise MismatchError(self.reason)
        self.ranks.greet(gpu, channel, hello["migration"])
        self.max_context = hello["max_context"]
        self._seats = hello["seats"]
        self.memory_bytes = hello["memory_bytes"]
        self.max_requests = self._seats * len(self._seating.ranks(range(len(self._cluster.gpus))))

    def _lose(self, gpu: int | None, channel: RankChannel) -> None:
        if gpu is not None and self.ranks.knows(gpu, channel) and self.ranks.lose(gpu):
            self.failures += 1
            self._form()

    def _form(self) -> None:
        """Make all live ranks form the next generation; running requests restart later."""
        self.requests.begin_again()
        self.began = None
        self._late.clear()
        self._done.clear()
        waits = bool(self.requests.pending)
        self.ranks.call(self.placing.order(self.ranks.next_members(waits)), waits=waits)

    def _heard(self, gpu: int, message: dict[str, Any]) -> None:
        generation = message.get("generation", self.ranks.generation)
        match message["kind"]:
            case "alive" | "holds" | "formed" as kind:
                if self.ranks.heard(gpu, kind, generation) and self.state == "starting":
                    self.state = "ready"
            case "leaving":
                self.ranks.leave(gpu)
            case "broken" if generation == self.ranks.generation:
                _LOG.warning("GPU %d: %s", gpu, message.get("reason"))
                self._form()
            case "tokens" if generation == self.ranks.generation:
                for output in message["outputs"]:
                    self._first_token = True
                    self.requests.answer(output)
            # Reports of an earlier generation do not concern the running batch.
            case "done" if generation == self.ranks.generation and message["batch"] == self.batch:
                self._done[gpu] = message
                if len(self._done) == len(self.ranks.members):
                    self._finish()

    def advance(self) -> None:
        """Begin what can begin now: a generation, a decision or a batch."""
        if self.state == "ready" and self.ranks.gone:
            raise MoetoolError("all ranks have ended, and none of them can be restarted")
        is_complete = len(self.ranks.ranks) == len(self._cluster.gpus)
        if not self.ranks.members and (is_complete if self.state == "starting" else self.ranks.there):
            self._form()
        if self.state == "starting" or not self.ranks.whole or self.began is not None:
            # A queue that fills the next batch is decided at once; a shorter one gets time to fill.
            known = self._first_token or len(self.requests.pending) >= self.max_requests
            if known and self.placing.control.looks_ahead and self.ranks.whole:
                self._decide()
            if self.ranks.whole and not self.placing.control.looks_ahead:
                self._join()
            elif self.ranks.whole and known:
                self._end_for_joins()
            return
        if self._members_change and not self.requests.running:
            self._form()
        elif self.requests.running or (self.requests.pending and self._is_due()):
            if not self.placing.control.looks_ahead:
                self._decide()
            now, asked = time.monotonic(), self.placing.deciding
            self._due = self._due or now
            is_decided = asked is None or now - max(asked, self._ended) > self.patience_s
            if is_decided or self.requests.running:  # running requests wait for no decision
                self._begin(now - self._due, joins=is_decided or not self.placing.control.looks_ahead)

    @property
    def _members_change(self) -> bool:
        """Whether a rank has returned or is leaving, so that a generation is due once no request runs."""
        return self.ranks.next_members(bool(self.requests.pending)) != self.ranks.members

    def _join(self) -> None:
        """Add waiting requests to the running batch while seats are free."""
        if self.began is None or not self.requests.pending or self._members_change:
            return
        chosen = self._choose(keeps_running=True)
        for gpu, requests in self.requests.begin(chosen).items():
            self.ranks.send(gpu, {"kind": "requests", "requests": requests})
        self._late |= {request.id for request in chosen}
        self._batch_size += len(chosen)

    def _end_for_joins(self) -> None:
        """End the running batch if waiting requests have seats and no decision about them is due."""
        if self._ending or not self.requests.pending or self.began is None:
            return
        if self._members_change:
            return  # a rank rejoins or leaves when the running requests have ended
        asked = self.placing.deciding
        if asked is not None and time.monotonic() - asked <= self.patience_s:
            return
        if self._is_due():
            self._ending = True
            self.ranks.tell({"kind": "end", "batch": self.batch})

    def _is_due(self) -> bool:
        """Whether waiting requests fill the free seats, or one has waited long enough for others."""
        pending, seats = self.requests.pending, self._seats * len(self._seating.ranks(self.ranks.members))
        free = seats - len(self.requests.running)
        return free > 0 and (len(pending) >= free or time.monotonic() - pending[0].began >= self.gather_s)

    def _choose(self, keeps_running: bool) -> list[RankRequest]:
        """Choose the requests for the next batch, each with its GPU."""
        return self.requests.choose(self._seating, self.ranks.members, self._seats, keeps_running=keeps_running)

    def _decide(self) -> None:
        """Start one decision about the next batch, if all ranks are present."""
        whole = len(self.ranks.members) == len(self._cluster.gpus)
        coming = (self._cohort if self.placing.control.looks_ahead else self.batch) + 1
        waits = self.requests.pending or (self.requests.running and not self.placing.control.looks_ahead)
        if not whole or not waits or not self.placing.control.decides:
            return
        if self.placing.asked_for(coming) or self.placing.deciding is not None:
            return
        waiting = [
            Waiting(
                prompt=[*request.prompt, *request.made],
                new_tokens=request.params.max_tokens - len(request.made),
                gpu=request.gpu,
            )
            for request in self._choose(keeps_running=False)
        ]
        began = self.began
        self.placing.ask(coming, waiting, None if began is None else time.monotonic() - began)

    def _migrate(self, stages: list[dict[str, Any]]) -> None:
        if stages:
            self.ranks.tell({"kind": "migrate", "stages": stages})

    def _begin(self, decided_s: float, joins: bool) -> None:
        """Begin the next batch.

        Args:
            decided_s: seconds that it waited for a decision.
            joins: whether waiting requests join.
        """
        self._migrate(self.placing.stages())
        chosen = self._choose(keeps_running=True) if joins and not self._members_change else []
        self.batch += 1
        self._cohort += bool(chosen)
        self.began, self._first_token, self._ending = time.monotonic(), False, False
        shares = self.requests.begin(chosen)
        for gpu in self.ranks.members:
            self.ranks.send(
                gpu,
                {
                    "kind": "batch",
                    "batch": self.batch,
                    "version": self.placing.version,
                    "requests": shares.get(gpu, []),
                },
            )
        self._batch_size, self._decided_s, self._due = len(self.requests.running), decided_s, None
        _LOG.debug(
            "batch %d begins: %d of %d requests join, placement %d",
            *(self.batch, len(chosen), self._batch_size, self.placing.version),
        )

    def _finish(self) -> None:
        """Record the end of a batch on all ranks."""
        assert self.began is not None
        now = time.monotonic()
        record = record_of(
            self.batch, self._batch_size, now - self.began, self._done, self._cluster, decided_s=self._decided_s
        )
        moved_s = sum(done["moved"]["seconds"] for done in self._done.values())
        self.records = [*self.records, record][-_KEPT:]  # each has the uses of every expert
        self.forwards += record.steps
        self.moved_bytes += record.moved_bytes
        self.moved_during_exchange += record.moved_during_exchange
        self.placing.note(record, moved_s, len(self.ranks.members))
        held = self._late.union(*(done["left"] for done in self._done.values()))
        self.began, self._ended, self._done, self._late = None, now, {}, set()
        _LOG.debug("batch %d ended after %.3f s, %d B of experts moved", self.batch, record.seconds, record.moved_bytes)
        self.requests.refuse_lost(
            held, "the request was lost by its rank"
        )  # the rank has reported the requests that it still has

    def _use(self, control: BatchReplacement, placed_GLE: np.ndarray, migrate: str, over: threading.Event) -> None:
        if not self._at_rest:
            self.events.put(("use", (control, placed_GLE, migrate, over)))
            time.sleep(0.01)
            return
        self.placing.use(control, placed_GLE, migrate)
        self.records = []
        self._form()
        threading.Thread(target=self._when_formed, args=(over,), daemon=True).start()

    def _when_formed(self, over: threading.Event) -> None:
        while not self.ranks.whole and self.state == "ready":
            time.sleep(0.005)
        over.set()
