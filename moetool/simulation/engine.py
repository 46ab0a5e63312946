"""The event loop: requests go layer by layer through GPUs and links that are first-come-first-served queues.

What happens to a request at a MoE layer:

    READY   its tokens are together on its own GPU, whose queue they join for the dense part of the layer
    SEND    the dense part is done: tokens leave for the GPUs that hold their experts, each message in its link's queue;
            what the own GPU holds joins that GPU's queue
    WORK    a message has arrived and joins the queue of its GPU
    BACK    its experts are computed, and the result joins the queue of the link back

When the last result is back, the next layer is READY. Every queue is joined at the time of an event, and events are
handled in the order of time, so each queue is served exactly in the order of arrival; a queue need then be no more
than the time at which it is next free.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush, heappushpop
from typing import Protocol

from moetool.simulation.costs import Computing, Network
from moetool.simulation.routing import Routing
from moetool.simulation.workload import Request
from moetool.types import Cluster, ModelSpec

ARRIVE, READY, SEND, WORK, BACK, ROUND, TICK, WINDOW, CALL = range(9)
ADMISSIONS = ("seats", "rounds")


class Watcher(Protocol):
    """Who places experts while the simulation runs."""

    def on_tick(self, engine: "Engine") -> None:
        """The time to place anew has come."""

    def on_round(self, engine: "Engine", begun: Sequence[Request], begin: Callable[[float], None]) -> None:
        """These requests are about to begin together: call `begin` with the time when they may."""

    def on_finished(self, request: Request) -> None:
        """A request is through."""


class Engine:
    """One run.

    Args:
        seats: requests that a GPU has under way at a time; the others wait for it.
        admission: `seats`: a waiting request begins when its GPU has a free seat. `rounds`: requests begin together,
            on every GPU as many as it has seats, when all of the last round are through: static batches.
        tick_s: how often the watcher is asked to place anew (0: never).
        window_s: how often `windows` gets a row.

    Attributes:
        now_s: the time of the last event.
        routing: where experts are.
        free_G: when each GPU is next free.
        busy_G: seconds that it computed.
        free_Q: when each link is next free.
        sent_Q: bytes that it carried, experts on the move among them.
        calls: expert calls so far: a token that uses an expert is one.
        local_calls: those that a GPU of the request's own server computed.
        windows: (seconds, calls, local calls) so far.
        finished: requests that are through.

    Source: Prism § IV-C, whose simulator interleaves communication and computation events. What it leaves out:
        requests that are under way together on a GPU take turns layer by layer and are not computed as one batch;
        messages have no framing or loss; a token that uses two experts of a GPU is sent twice (DIRECTOR, Eq. 3).
    """

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        network: Network,
        computing: Computing,
        routing: Routing,
        requests: Sequence[Request],
        watcher: Watcher | None = None,
        *,
        bytes_per_token: int,
        seats: int = 1,
        admission: str = "seats",
        tick_s: float = 0.0,
        window_s: float = 60.0,
    ) -> None:
        num_gpus = len(cluster.gpus)
        self.spec, self.cluster, self.network, self.computing = spec, cluster, network, computing
        self.routing, self.requests, self.watcher = routing, requests, watcher
        self.bytes_per_token = bytes_per_token
        self.now_s = 0.0
        self.free_G, self.busy_G = [0.0] * num_gpus, [0.0] * num_gpus
        self.free_Q, self.sent_Q = [0.0] * len(network.names), [0] * len(network.names)
        self.calls = self.local_calls = 0
        self.windows: list[tuple[float, int, int]] = []
        self.finished: list[Request] = []
        self.waiting_G: list[deque[Request]] = [deque() for _ in range(num_gpus)]
        self.running: dict[int, Request] = {}
        self._under_way_G = [0] * num_gpus
        self._seats, self._rounds = seats, admission == "rounds"
        self._round_called = False
        self._tick_s, self._window_s = tick_s, window_s
        self._heap: list[tuple[float, int, int, object, int, float, int]] = []
        self._number = 0

    def at(
        self, time_s: float, kind: int, what: object = None, gpu: int = 0, cost_s: float = 0.0, size: int = 0
    ) -> None:
        """Put an event off until its time; events of one time happen in the order in which they were put off."""
        self._number += 1
        heappush(self._heap, (time_s, self._number, kind, what, gpu, cost_s, size))

    def run(self) -> None:
        """Run until every request is through."""
        for request in self.requests:
            self.at(request.arrived_s, ARRIVE, request)
        if self._tick_s > 0:
            self.at(self._tick_s, TICK)
        self.at(self._window_s, WINDOW)
        self._loop()

    def _loop(self) -> None:
        # The names are local because a run has tens of millions of events.
        heap, near = self._heap, self.routing.near
        free_G, busy_G, free_Q, sent_Q = self.free_G, self.busy_G, self.free_Q, self.sent_Q
        queue_GG, byte_s, latency_s = self.network.queue_GG, self.network.byte_s, self.network.latency_s
        expert_s, dense_s = self.computing.expert, self.computing.dense
        slow_G = [1.0 / gpu.speed for gpu in self.cluster.gpus]
        server_G, num_layers = self.cluster.server_G, self.spec.num_layers
        per_token, load_of = self.bytes_per_token, free_G.__getitem__
        work, came_back, ready, send = WORK, BACK, READY, SEND
        number = self._number
        calls = local = 0
        request: Request
        # Where one event follows from another, its push and the next pop are one step of the heap.
        event = heappop(heap) if heap else None
        while event is not None:
            now, _, kind, what, g, cost, size = event
            if kind == work:
                free = free_G[g]
                free = (now if now > free else free) + cost
                free_G[g] = free
                busy_G[g] += cost
                number += 1
                event = heappushpop(heap, (free, number, came_back, what, g, 0.0, size))
                continue
            elif kind == came_back:
                request = what  # type: ignore[assignment]
                queue = queue_GG[g][request.gpu]
                free = free_Q[queue]
                free = (now if now > free else free) + size * byte_s[queue]
                free_Q[queue] = free
                sent_Q[queue] += size
                back = free + latency_s[queue]
                if back > request.back_s:
                    request.back_s = back
                request.pending -= 1
                if not request.pending:
                    number += 1
                    event = heappushpop(heap, (request.back_s, number, ready, request, request.gpu, 0.0, 0))
                    continue
            elif kind == ready:
                request = what  # type: ignore[assignment]
                step = request.step
                if step == num_layers:
                    request.first_s = now
                steps = request.route.steps
                if step == len(steps):
                    self.now_s, self._number = now, number
                    self._finish(request)
                    number = self._number
                    event = heappop(heap) if heap else None
                    continue
                took = dense_s[request.route.prompt_tokens if step < num_layers else 1] * slow_G[g]
                free = free_G[g]
                free = (now if now > free else free) + took
                free_G[g] = free
                busy_G[g] += took
                number += 1
                event = heappushpop(heap, (free, number, send, request, g, 0.0, 0))
                continue
            elif kind == send:
                request = what  # type: ignore[assignment]
                step = request.step
                request.step = step + 1
                targets = near[g][step % num_layers]
                parts: dict[int, list[float]] = {}
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
                home, queue_G = server_G[g], queue_GG[g]
                if g in parts:
                    took, tokens = parts.pop(g)  # type: ignore[assignment]
                    took *= slow_G[g]
                    free = free_G[g]
                    free = (now if now > free else free) + took
                    free_G[g] = request.back_s = free
                    busy_G[g] += took
                    calls += tokens
                    local += tokens
                request.pending = len(parts)
                for target, (took, count) in parts.items():
                    tokens = int(count)
                    calls += tokens
                    if server_G[target] == home:
                        local += tokens
                    queue = queue_G[target]
                    size = tokens * per_token
                    free = free_Q[queue]
                    free = (now if now > free else free) + size * byte_s[queue]
                    free_Q[queue] = free
                    sent_Q[queue] += size
                    number += 1
                    heappush(
                        heap, (free + latency_s[queue], number, work, request, target, took * slow_G[target], size)
                    )
                if not parts:
                    number += 1
                    event = heappushpop(heap, (request.back_s, number, ready, request, g, 0.0, 0))
                    continue
            else:
                self.now_s, self.calls, self.local_calls = now, calls, local
                self._number = number
                self._seldom(kind, what)
                number = self._number
            event = heappop(heap) if heap else None
        self.calls, self.local_calls = calls, local

    def _seldom(self, kind: int, what: object) -> None:
        """The events that are few."""
        if kind == ARRIVE:
            assert isinstance(what, Request)
            self.waiting_G[what.gpu].append(what)
            if self._rounds:
                self._call_round()
            else:
                self._admit(what.gpu)
        elif kind == ROUND:
            self._begin_round()
        elif kind == CALL:
            what(self, self.now_s)  # type: ignore[operator]
        elif len(self.finished) < len(self.requests):
            if kind == TICK:
                if self.watcher is not None:
                    self.watcher.on_tick(self)
                self.at(self.now_s + self._tick_s, TICK)
            else:
                self.windows.append((self.now_s, self.calls, self.local_calls))
                self.at(self.now_s + self._window_s, WINDOW)

    def _admit(self, gpu: int) -> None:
        while self.waiting_G[gpu] and self._under_way_G[gpu] < self._seats:
            self._begin(self.waiting_G[gpu].popleft(), self.now_s)

    def _begin(self, request: Request, at_s: float) -> None:
        request.started_s = at_s
        self._under_way_G[request.gpu] += 1
        self.running[request.number] = request
        self.at(at_s, READY, request, request.gpu)

    def _call_round(self) -> None:
        # After whatever else happens now, so that requests that arrive together begin together.
        if not self._round_called and not self.running:
            self._round_called = True
            self.at(self.now_s, ROUND)

    def _begin_round(self) -> None:
        self._round_called = False
        begun = [queue.popleft() for queue in self.waiting_G for _ in range(min(self._seats, len(queue)))]
        if not begun:
            return
        self.running.update({request.number: request for request in begun})

        def begin(at_s: float) -> None:
            for request in begun:
                self._begin(request, at_s)

        if self.watcher is None:
            begin(self.now_s)
        else:
            self.watcher.on_round(self, begun, begin)

    def _finish(self, request: Request) -> None:
        request.finished_s = self.now_s
        self._under_way_G[request.gpu] -= 1
        del self.running[request.number]
        self.finished.append(request)
        if self.watcher is not None:
            self.watcher.on_finished(request)
        if not self._rounds:
            self._admit(request.gpu)
        elif not self.running and any(self.waiting_G):
            self._call_round()
