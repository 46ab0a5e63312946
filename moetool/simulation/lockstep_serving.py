"""Requests served by ranks in lockstep: batches, chunks of prompts, and new placements between batches."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from moetool.base.types import Cluster
from moetool.placement.plan import Move
from moetool.placement.replacement_record import ReplacementRecord
from moetool.placement.request_ranks import RankAssignment
from moetool.simulation.lockstep import LockstepRanks, RankMachines, StepSeconds
from moetool.simulation.placement_control import PlacementDecisions
from moetool.simulation.rank_seconds import RankWork
from moetool.simulation.workload import SimulatedRequest

BATCH_STEPS = 128
"""Steps after which a batch ends if requests join it, as `serve --mode ep` ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """Batches of ranks.

    Attributes:
        seats: requests that run at once on each rank.
        static: requests begin together when the last batch has ended; otherwise they join before any step.
        chunk_tokens: tokens of a rank in a step; decoded tokens come first, and longer prompts take several steps (0:
            no limit).
        window_s: seconds between rows of `LockstepServing.windows`.
        on_finished: called with the number of finished requests after each.
    """

    seats: int = 1
    static: bool = False
    chunk_tokens: int = 0
    window_s: float = 60.0
    on_finished: Callable[[int], None] = lambda count: None


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A running request: tokens of its prompt that are done, and its forwards after the prompt's."""

    request: SimulatedRequest
    prompt: int = 0
    new: int = 0


@dataclass(slots=True, kw_only=True)
class _Migration:
    """Moves on the way.

    Attributes:
        placed_GLE: placement after them.
        left_s: seconds of transfers until the last expert has arrived.
        links_s: those of them, the first ones, that take links of the exchange.
        at_s: earliest time of the next transfer; in the end, the time of the last one's end.
        at_batch: the placement changes with the next batch; otherwise before any step.
    """

    placed_GLE: np.ndarray
    record: ReplacementRecord
    left_s: float
    links_s: float
    at_s: float
    at_batch: bool

    def advance(self, seconds: float, until_s: float) -> None:
        """Transfer for some seconds, at the latest until a time; nothing moves before `at_s`."""
        if self.left_s and until_s > self.at_s:
            self.at_s = min(until_s, self.at_s + self.left_s) if seconds >= self.left_s else until_s
            self.left_s, self.links_s = max(0.0, self.left_s - seconds), max(0.0, self.links_s - seconds)


@dataclass(slots=True, kw_only=True)
class BatchSeconds:
    """A batch: its requests, steps, and seconds; `prompts` counts those of the steps with prompt tokens."""

    began_s: float
    requests: int = 0
    steps: int = 0
    seconds: float = 0.0
    prompts: float = 0.0


class LockstepServing:
    """One run of ranks in lockstep. Requests come to one endpoint and go to the rank with the most free seats.

    Placement (`PlacementDecisions.sees`): `past` places after a batch by its requests, and experts move during the next
    one. `queue` places for the next batch once waiting requests fill its seats, at the latest when it begins, and
    experts move during the running batch; if they could not, but can for the one after it, that one counts. The
    placement changes once all experts have arrived, into a double buffer;
    for `queue` not before the next batch. While experts move there is no further decision.

    Moves (`SimulationOptions.migrate`): `overlap`: only while ranks compute (DIRECTOR, Figure 6c); `pipelined`: always,
    and over the links of the exchange both take twice as long (6b); `stop`: between batches, which wait (6a); `free`:
    at once. Copies from another server, and all with `copies=links`, take these links, before copies from hosts. A GPU
    sends and receives one copy after the other.

    Attributes:
        ranks: the machine.
        batches: seconds of each batch.
        moved_GG: bytes of experts from GPU to GPU; those from a host count at the receiver.
        windows: cumulative (seconds, calls, local calls).

    Source: DIRECTOR § IV, § V-B. `serve --mode ep` decides for waiting requests while a batch of joining requests runs;
    here a batch that requests join decides at its end.
    """

    def __init__(
        self,
        machines: RankMachines,
        requests: Sequence[SimulatedRequest],
        decisions: PlacementDecisions,
        options: ServingOptions | None = None,
    ) -> None:
        self.machines, self.requests, self.decisions = machines, requests, decisions
        self.options = options or ServingOptions()
        self.ranks = LockstepRanks(machines, decisions.in_force.placed_GLE)
        self.now_s = 0.0
        self.finished: list[SimulatedRequest] = []
        self.batches: list[BatchSeconds] = []
        self.windows: list[tuple[float, int, int]] = []
        num_ranks = len(machines.cluster.gpus)
        self.moved_GG = np.zeros((num_ranks, num_ranks))
        self._coming = deque(sorted(requests, key=lambda request: request.arrived_s))
        self._waiting: deque[SimulatedRequest] = deque()
        self._running_G: list[list[_Running]] = [[] for _ in range(num_ranks)]
        self._seating = RankAssignment(server_G=tuple(machines.cluster.server_G))
        self._migration: _Migration | None = None
        self._served_GLE = np.zeros(decisions.in_force.placed_GLE.shape)  # of the running batch
        self._tokens = 0
        self._decided: ReplacementRecord | None = None  # for the next batch
        self._ready_s = 0.0  # end of the last planning

    def run(self) -> None:
        """Run until every request has finished."""
        while self._coming or self._waiting or self._busy:
            if not self._busy and not self._waiting:
                self._wait(self._coming[0].arrived_s)
            self._arrive()
            batch = self.batches[-1] if self.batches else None
            ended = batch is None or not self._busy or (not self.options.static and batch.steps >= BATCH_STEPS)
            if ended:
                self._begin_batch()
            elif not self.options.static:
                self._join()
            if self._plans_ahead:
                self._decide_ahead()
            self._step()
        if self._migration is not None:
            self._migration.record.done_s = self._migration.at_s + self._migration.left_s

    def _wait(self, until_s: float) -> None:
        """Pass time without requests; experts that are allowed to move do."""
        moving, migrate = self._migration, self.decisions.options.migrate
        if moving is not None and migrate != "stop" and until_s > moving.at_s:
            moving.advance(until_s - max(self.now_s, moving.at_s), until_s)
        self.now_s = max(self.now_s, until_s)

    @property
    def _busy(self) -> bool:
        return any(self._running_G)

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrived_s <= self.now_s:
            self._waiting.append(self._coming.popleft())

    def _next(self, whole: bool = False) -> list[tuple[SimulatedRequest, int]]:
        """Return the waiting requests that have a seat, and their ranks.

        Args:
            whole: for a whole batch: seats of running requests count as free, if batches are static.
        """
        members, seats = range(len(self._running_G)), self.options.seats
        whole = whole and self.options.static
        taken = {} if whole else {g: len(running) for g, running in enumerate(self._running_G)}
        first = list(islice(self._waiting, seats * len(members) - sum(taken.values())))
        dealt = self._seating.deal([request.number for request in first], members, seats, taken)
        return list(zip(first, dealt, strict=True))

    def _join(self) -> None:
        for request, gpu in self._next():
            self._waiting.popleft()
            request.gpu, request.started_s = gpu, self.now_s
            self._running_G[gpu].append(_Running(request=request))
            self.batches[-1].requests += 1

    def _begin_batch(self) -> None:
        """Place for the last batch or the coming one, and begin it."""
        asked_s, how = self.now_s, self.decisions.options
        record, self._decided = self._decided, None
        self._land(begins=True)
        if self.decisions.sees == "past" and self.batches:
            record = self._consider(self._served_GLE, self._tokens)
        elif self.decisions.sees == "queue":
            late = self._plans_ahead and how.migrate in ("overlap", "pipelined") and self._fills(2)
            if record is None and not late and (self.batches or how.planning != "beside"):
                record = self._consider_queue()
            if record is not None:
                self.now_s = max(self.now_s, self._ready_s)
        if self._migration is not None and how.migrate == "stop":
            record = self._migration.record
            self.now_s = max(self.now_s, self._migration.at_s) + self._migration.left_s
            self._migration.advance(self._migration.left_s, self.now_s)
        self._land(begins=True)
        if record is not None:
            record.waited_s = self.now_s - asked_s
            if record.waited_s and record not in self.decisions.records:
                self.decisions.records.append(record)
        self._served_GLE[:] = 0.0
        self._tokens = 0
        self.batches.append(BatchSeconds(began_s=self.now_s))
        self._join()

    @property
    def _plans_ahead(self) -> bool:
        """Return whether a batch is placed for during the one before it."""
        return self.options.static and self.decisions.sees == "queue" and self.decisions.options.planning != "wait"

    def _decide_ahead(self) -> None:
        """Place for the next batch during this one, once waiting requests fill its seats or no more arrive."""
        if self._migration is None and self._decided is None and self._waiting and self._fills(1):
            self._decided = self._consider_queue()

    def _fills(self, batches: int) -> bool:
        """Return whether the waiting requests fill so many batches, the last one if no more arrive."""
        seats = self.options.seats * len(self._running_G)
        return len(self._waiting) >= batches * seats or (
            not self._coming and len(self._waiting) > (batches - 1) * seats
        )

    def _consider_queue(self) -> ReplacementRecord | None:
        """Place for the requests of the next batch."""
        chosen = self._next(whole=True)
        for request, gpu in chosen:
            request.gpu = gpu
        requests = [request for request, _ in chosen]
        if not self.options.static:
            requests += [one.request for running in self._running_G for one in running]
        tokens = sum(request.route.prompt_tokens + request.route.new_tokens for request in requests)
        return self._consider(self.decisions.expected(requests), tokens)

    def _consider(self, tokens_GLE: np.ndarray, tokens: int) -> ReplacementRecord | None:
        """Decide, and begin to move once the plan is ready."""
        considered = None if self._migration is not None else self.decisions.consider(self.now_s, tokens_GLE, tokens)
        if considered is None:
            return None
        decision, record = considered
        self._ready_s = self.now_s + record.plan_s
        if record.plan_s and self.decisions.sees == "queue" and self.batches:
            self._ready_s += self.decisions.options.predict_share * self.batches[-1].seconds
        if decision.made:
            options = self.decisions.options
            copies = [move for move in decision.moves if move.kind == "copy" and options.migrate != "free"]
            for move in copies:
                self.moved_GG[move.source if move.source >= 0 else move.gpu, move.gpu] += move.bytes
            left_s, links_s = transfer_seconds(copies, self.machines.cluster, options.copies == "host")
            self._migration = _Migration(
                placed_GLE=decision.placed_GLE,
                record=record,
                left_s=left_s,
                links_s=links_s,
                at_s=self._ready_s,
                at_batch=self.decisions.sees == "queue" and self._busy and self.options.static,
            )
        return record

    def _land(self, begins: bool) -> None:
        """Switch to a placement whose experts have arrived."""
        moving = self._migration
        if moving is None or moving.left_s > 0 or moving.at_s > self.now_s or (moving.at_batch and not begins):
            return
        self.ranks.place(moving.placed_GLE)
        moving.record.done_s = moving.at_s
        self._migration = None

    def _move(self, step: StepSeconds) -> float:
        """Move experts beside a step; return the step's seconds."""
        seconds, moving = step.computing + step.exchange, self._migration
        migrate = self.decisions.options.migrate
        if moving is None or migrate in ("stop", "free"):
            return seconds
        share = min(1.0, max(0.0, self.now_s + seconds - moving.at_s) / seconds) if seconds else 0.0
        if migrate == "overlap":
            moving.advance(share * step.computing, self.now_s + seconds)
            return seconds
        shared_s = min(share * step.exchange, max(0.0, moving.links_s - share * step.computing))
        moving.advance(share * seconds, self.now_s + seconds + shared_s)
        return seconds + shared_s

    def _step(self) -> None:
        """Run one step of all ranks."""
        self._land(begins=False)
        parts: list[np.ndarray] = []
        gpus: list[int] = []
        work_G: list[RankWork] = []
        ends: list[tuple[_Running, int]] = []  # tokens of its prompt; 0: a decoded token
        for g, running in enumerate(self._running_G):
            left = self.options.chunk_tokens or 1 << 60
            context = past = prompts = new = outputs = 0
            for one in sorted(running, key=lambda one: one.prompt < one.request.route.prompt_tokens):
                route = one.request.route
                rest = route.prompt_tokens - one.prompt
                tokens = min(left, rest or 1)
                if not tokens:
                    break
                left -= tokens
                if rest:
                    parts.append(route.prompt_TS[one.prompt : one.prompt + tokens])
                    past += one.prompt * tokens
                    prompts += tokens
                    outputs += tokens == rest
                else:
                    parts.append(route.reply_TS[one.new : one.new + 1])
                    context += route.prompt_tokens + one.new + 1
                    new += 1
                    outputs += 1
                gpus.append(g)
                ends.append((one, tokens if rest else 0))
            work_G.append(
                RankWork(
                    prompt_tokens=prompts,
                    prompt_context=past / prompts if prompts else 0.0,
                    new_tokens=new,
                    context=context / new if new else 0.0,
                    outputs=outputs,
                )
            )
        step = self.ranks.step(np.repeat(gpus, [len(part) for part in parts]), np.concatenate(parts), work_G)
        seconds = self._move(step)
        batch = self.batches[-1]
        batch.steps += 1
        batch.seconds += seconds
        batch.prompts += seconds if any(work.prompt_tokens for work in work_G) else 0.0
        self.now_s += seconds
        self._end_step(ends)

    def _end_step(self, ends: Sequence[tuple[_Running, int]]) -> None:
        while self.now_s > (len(self.windows) + 1) * self.options.window_s:
            at_s = (len(self.windows) + 1) * self.options.window_s
            self.windows.append((at_s, self.ranks.calls, self.ranks.local_calls))
        for one, tokens in ends:
            request = one.request
            if tokens:
                one.prompt += tokens
                if one.prompt < request.route.prompt_tokens:
                    continue
                request.first_s = self.now_s
            else:
                one.new += 1
            if one.new == request.route.new_tokens:
                request.finished_s = self.now_s
                self._running_G[request.gpu].remove(one)
                self._tokens += request.route.prompt_tokens + request.route.new_tokens
                if self.decisions.sees == "past":
                    self._served_GLE[request.gpu] += request.route.calls_LE
                self.finished.append(request)
                self.options.on_finished(len(self.finished))


def transfer_seconds(copies: Sequence[Move], cluster: Cluster, host: bool) -> tuple[float, float]:
    """Return the seconds until all copies have arrived, and the part over links of the exchange, which comes first.

    A GPU sends and receives one copy after the other.

    Args:
        host: copies within a server come from host memory.
    """
    sent_G, received_G, loaded_G = np.zeros((3, len(cluster.gpus)))
    for move in copies:
        a, b = cluster.server_G[move.source], cluster.server_G[move.gpu]
        if move.source < 0:
            loaded_G[move.gpu] += move.seconds
        elif a == b and host:
            loaded_G[move.gpu] += move.bytes / cluster.gpus[move.gpu].host_to_device_bytes_s
        else:
            rate, latency = cluster.link(a, b)
            sent_G[move.source] += latency + move.bytes / rate
            received_G[move.gpu] += latency + move.bytes / rate
    links_s = float(max(sent_G.max(), received_G.max()))
    return max(links_s, float((received_G + loaded_G).max())), links_s
