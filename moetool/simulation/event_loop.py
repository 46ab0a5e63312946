"""The event loop: requests go layer by layer through GPUs and links that are first-come-first-served queues.

Events of a request at a MoE layer:

    READY   its tokens are complete on its own GPU and join its queue for the dense part of the layer
    SEND    the dense part is done: tokens leave for the GPUs that hold their experts, each message in its link's queue;
            tokens for experts on the own GPU join its queue
    WORK    a message has arrived and joins the queue of its GPU
    BACK    its experts are computed, and the result joins the queue of the link back

When the last result is back, the next layer is READY. Queues are first-come-first-served, so a queue is represented by
the time at which it is next free. Every queue is joined at the time of an event, and events run in the order of time,
with one exception: at WORK, a result that leaves later joins the link back at once if no other message can join that
link before it. This has four conditions. All messages at the server's GPUs are on their way back, and no later message
can finish earlier. None of the server's own requests is in the dense part of a layer. No expert moves.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heappushpop
from math import inf
from typing import Any, Protocol

from moetool.base.types import Cluster, ModelSpec
from moetool.simulation.replica_choice import Routing
from moetool.simulation.simulated_costs import GpuSeconds, Network
from moetool.simulation.workload import SimulatedRequest

ARRIVE, TICK, WINDOW, CALL, READY, SEND, WORK, BACK = range(8)


class Watcher(Protocol):
    """Re-placement during the simulation."""

    def on_tick(self, engine: "EventLoop") -> None:
        """Handle a tick: the time for a re-placement decision."""

    def on_finished(self, request: SimulatedRequest) -> None:
        """Handle the end of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachines:
    """The machines: a model, the GPUs that compute it, and the links between them."""

    spec: ModelSpec
    cluster: Cluster
    network: Network
    computing: GpuSeconds
    bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Admission of requests and periodic events.

    Attributes:
        seats: concurrent requests per GPU; others wait.
        tick_s: seconds between re-placement decisions of the watcher (0: never).
        window_s: seconds between rows of `EventLoop.windows`.
        on_finished: called with the number of finished requests after each.
    """

    seats: int = 1
    tick_s: float = 0.0
    window_s: float = 60.0
    on_finished: Callable[[int], None] = lambda count: None


class EventLoop:
    """One run.

    Attributes:
        now_s: time of the last event.
        routing: current expert locations.
        free_G: time at which each GPU is next free.
        busy_G: compute seconds of each GPU.
        link_Q: for each link the time at which it is next free, its seconds per byte, and its latency.
        moved_Q: bytes of migration on each link.
        tokens_GG: tokens from each GPU to each, once for each expert, local ones included.
        moving: running migrations.
        windows: cumulative (seconds, calls, local calls).

    Source: Prism § IV-C, whose simulator interleaves communication and computation events. Not modelled: concurrent
    requests of a GPU take turns layer by layer instead of forming one batch; messages have no framing or loss; a token
    that uses two experts of a GPU is sent twice (DIRECTOR, Eq. 3).
    """

    def __init__(
        self,
        machines: SimulatedMachines,
        routing: Routing,
        requests: Sequence[SimulatedRequest],
        watcher: Watcher | None = None,
        options: LoopOptions | None = None,
    ) -> None:
        options = options or LoopOptions()
        self.spec, self.cluster = machines.spec, machines.cluster
        self.network, self.computing = machines.network, machines.computing
        self.bytes_per_token = machines.bytes_per_token
        self.routing, self.requests, self.watcher = routing, requests, watcher
        network, cluster = machines.network, machines.cluster
        num_gpus = len(cluster.gpus)
        self.now_s = self._since_s = 0.0
        self.free_G, self.busy_G = [0.0] * num_gpus, [0.0] * num_gpus
        costs: dict[tuple[float, float], tuple[float, float]] = {}  # one object for equal links, for the CPU cache
        self.link_Q = [
            [0.0, *costs.setdefault(each, each)] for each in zip(network.byte_s, network.latency_s, strict=True)
        ]
        self.moved_Q = [0] * len(network.names)
        self.tokens_GG = [[0] * num_gpus for _ in range(num_gpus)]
        self.moving = 0
        self.windows: list[tuple[float, int, int]] = []
        self.finished: list[SimulatedRequest] = []
        self.waiting_G: list[deque[SimulatedRequest]] = [deque() for _ in range(num_gpus)]
        self.running: dict[int, SimulatedRequest] = {}
        self._mates_G = [[h for h, m in enumerate(cluster.server_G) if m == n] for n in cluster.server_G]
        self._under_way_G = [0] * num_gpus
        self._seats = options.seats
        self._on_finished = options.on_finished
        self._tick_s, self._window_s = options.tick_s, options.window_s
        self._next_tick_s = options.tick_s if options.tick_s > 0 else inf
        # (time; time of the event that it follows from, time of the one before that, number; kind, what, GPU, seconds,
        # bytes): events of one time keep their scheduling order, even where a result joined its link early.
        self._heap: list[tuple[float, float, float, int, int, object, int, float, int]] = []
        self._number = len(requests)
        self._coming = iter(sorted(requests, key=lambda request: request.arrived_s))

    def at(self, time_s: float, kind: int, what: object = None) -> None:
        """Schedule an event; events of one time run in the order in which they were scheduled."""
        self._number += 1
        heappush(self._heap, (time_s, self.now_s, self._since_s, self._number, kind, what, 0, 0.0, 0))

    def run(self) -> None:
        """Run until every request has finished."""
        self._expect_next()
        if self._tick_s > 0:
            self.at(self._tick_s, TICK)
        self.at(self._window_s, WINDOW)
        self._loop()

    @property
    def sent_Q(self) -> list[int]:
        """Return the bytes on each link: tokens, their results, and migration."""
        sent_Q = list(self.moved_Q)
        for g, row in enumerate(self.tokens_GG):
            for h, tokens in enumerate(row):
                if tokens and g != h:
                    sent_Q[self.network.queue_GG[g][h]] += tokens * self.bytes_per_token
                    sent_Q[self.network.queue_GG[h][g]] += tokens * self.bytes_per_token
        return sent_Q

    @property
    def calls(self) -> int:
        """Return the number of expert calls: one per token and expert."""
        return sum(map(sum, self.tokens_GG))

    @property
    def local_calls(self) -> int:
        """Return the number of expert calls computed by a GPU of the request's own server."""
        return sum(sum(self.tokens_GG[g][h] for h in self._mates_G[g]) for g in range(len(self.tokens_GG)))

    def _expect_next(self) -> None:
        """Push the next arrival, the only one in the heap, before other events of its time."""
        request = next(self._coming, None)
        if request is not None:
            heappush(self._heap, (request.arrived_s, -1.0, -1.0, 0, ARRIVE, request, 0, 0.0, 0))

    def ahead_G(self) -> list[float]:
        """Return seconds after a message's arrival until no later message can have left each GPU's server.

        Messages of a GPU that is the only sender on a link leave in the order of their computation.
        """
        least = min(*self.computing.dense[1:], *self.computing.expert[1:])
        fastest = max(gpu.speed for gpu in self.cluster.gpus)
        return [inf if len(gpus) == 1 else least / fastest for gpus in self._mates_G]

    def _loop(self) -> None:
        # Local names, since a run has tens of millions of events.
        heap, near, tokens_GG = self._heap, self.routing.near, self.tokens_GG
        free_G, busy_G, ahead_G = self.free_G, self.busy_G, self.ahead_G()
        link_GG = [[self.link_Q[queue] for queue in row] for row in self.network.queue_GG]
        expert_s, dense_s = self.computing.expert, self.computing.dense
        slow_G = [1.0 / gpu.speed for gpu in self.cluster.gpus]
        server_G, num_layers = self.cluster.server_G, self.spec.num_layers
        per_token, load_of = self.bytes_per_token, free_G.__getitem__
        work, came_back, ready, send = WORK, BACK, READY, SEND
        leaving_N = [0] * len(self.cluster.servers)  # results that will join links of the server at later events
        calm_s = -inf if self.moving else self._next_tick_s  # no expert moves before this time
        number = self._number
        request: SimulatedRequest
        # An event's successor is pushed and the next popped in one heap operation.
        event = heappop(heap) if heap else None
        while event is not None:
            now, since, _, own, kind, what, g, cost, size = event
            if kind >= work:  # a result leaves, now or after its compute
                request = what  # type: ignore[assignment]
                if kind == work:
                    free = free_G[g]
                    free = (now if now > free else free) + cost
                    free_G[g] = free
                    busy_G[g] += cost
                    if leaving_N[server_G[g]] or free > now + ahead_G[g] or free >= calm_s:
                        leaving_N[server_G[g]] += 1
                        event = heappushpop(heap, (free, now, since, own, came_back, what, g, 0.0, size))
                        continue
                    left = (free, now, own)
                else:
                    leaving_N[server_G[g]] -= 1
                    free = now
                    left = (now, since, own)
                if left > request.left:
                    request.left = left
                link = link_GG[g][request.gpu]
                at_s = link[0]
                link[0] = at_s = (free if free > at_s else at_s) + size * link[1]
                at_s += link[2]
                if at_s > request.back_s:
                    request.back_s = at_s
                request.pending -= 1
                if not request.pending:
                    event = heappushpop(heap, (request.back_s, *request.left, ready, request, request.gpu, 0.0, 0))
                    continue
            elif kind == ready:
                request = what  # type: ignore[assignment]
                step = request.step
                if step == num_layers:
                    request.first_s = now
                steps = request.route.steps
                if step == len(steps):
                    self.now_s, self._since_s, self._number = now, since, number
                    self._finish(request)
                    number = self._number
                    event = heappop(heap) if heap else None
                    continue
                took = dense_s[request.route.prompt_tokens if step < num_layers else 1] * slow_G[g]
                free = free_G[g]
                free = (now if now > free else free) + took
                free_G[g] = free
                busy_G[g] += took
                leaving_N[server_G[g]] += 1
                number += 1
                event = heappushpop(heap, (free, now, since, number, send, request, g, 0.0, 0))
                continue
            elif kind == send:
                request = what  # type: ignore[assignment]
                step = request.step
                request.step = step + 1
                leaving_N[server_G[g]] -= 1
                targets = near[g][step % num_layers]
                parts: dict[int, list[Any]] = {}
                for expert, tokens in request.route.steps[step]:
                    target = targets[expert]
                    if target.__class__ is tuple:
                        target = min(target, key=load_of)
                    if target in parts:
                        part = parts[target]
                        part[0] += expert_s[tokens]
                        part[1] += tokens
                    else:
                        parts[target] = [expert_s[tokens], tokens]  # type: ignore[index]
                request.back_s = now
                link_G, tokens_G = link_GG[g], tokens_GG[g]
                if g in parts:
                    took, tokens = parts.pop(g)
                    took *= slow_G[g]
                    free = free_G[g]
                    free = (now if now > free else free) + took
                    free_G[g] = request.back_s = free
                    busy_G[g] += took
                    tokens_G[g] += tokens
                request.pending = len(parts)
                request.left = -1.0, 0.0, 0
                for target, (took, tokens) in parts.items():
                    tokens_G[target] += tokens
                    size = tokens * per_token
                    link = link_G[target]
                    free = link[0]
                    link[0] = free = (now if now > free else free) + size * link[1]
                    number += 1
                    heappush(
                        heap, (free + link[2], now, since, number, work, request, target, took * slow_G[target], size)
                    )
                if not parts:
                    number += 1
                    event = heappushpop(heap, (request.back_s, now, since, number, ready, request, g, 0.0, 0))
                    continue
            else:
                self.now_s, self._since_s, self._number = now, since, number
                self._seldom(kind, what)
                number = self._number
                calm_s = -inf if self.moving else self._next_tick_s
            event = heappop(heap) if heap else None

    def _seldom(self, kind: int, what: object) -> None:
        """Handle rare events."""
        if kind == ARRIVE:
            assert isinstance(what, SimulatedRequest)
            self._expect_next()
            self.waiting_G[what.gpu].append(what)
            self._admit(what.gpu)
        elif kind == CALL:
            what(self, self.now_s)  # type: ignore[operator]
        elif len(self.finished) < len(self.requests):
            if kind == TICK:
                self._next_tick_s = self.now_s + self._tick_s
                if self.watcher is not None:
                    self.watcher.on_tick(self)
                self.at(self._next_tick_s, TICK)
            else:
                self.windows.append((self.now_s, self.calls, self.local_calls))
                self.at(self.now_s + self._window_s, WINDOW)

    def _admit(self, gpu: int) -> None:
        while self.waiting_G[gpu] and self._under_way_G[gpu] < self._seats:
            request = self.waiting_G[gpu].popleft()
            request.started_s = self.now_s
            self._under_way_G[gpu] += 1
            self.running[request.number] = request
            self._number += 1
            heappush(self._heap, (self.now_s, self.now_s, self._since_s, self._number, READY, request, gpu, 0.0, 0))

    def _finish(self, request: SimulatedRequest) -> None:
        request.finished_s = self.now_s
        self._under_way_G[request.gpu] -= 1
        del self.running[request.number]
        self.finished.append(request)
        self._on_finished(len(self.finished))
        if self.watcher is not None:
            self.watcher.on_finished(request)
        self._admit(request.gpu)
