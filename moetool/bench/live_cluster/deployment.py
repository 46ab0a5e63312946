"""Servers of a cluster bench: edge clusters, and single servers."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moetool.base.errors import MoetoolError
from moetool.bench.live_cluster.sites import Site
from moetool.caching.policy import MIN_SLOTS
from moetool.cluster.certificates import Authority
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge.edge_head import EdgeHead, Processes
from moetool.cluster.edge.replacement import pooled, steps_to
from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions
from moetool.cluster.edge.server_settings import held_by, worker_settings
from moetool.cluster.edge.worker import Worker
from moetool.cluster.transport import own_address
from moetool.models.checkpoint import Checkpoint
from moetool.placement.plan import PlacementPlan
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.serve_options import ServeOptions
from moetool.serving.server import HttpServer, bind
from moetool.serving.server_options import ServerOptions


class SingleServer:
    """A single server: experts that fit in memory under policy lru, the rest on disk.

    Args:
        toward: see `moetool.cluster.edge.worker.WorkerSettings`.

    Effects: see `moetool.cluster.edge.worker.Worker`.
    """

    def __init__(self, model: str, slots: int, options: ServeOptions, toward: str = "") -> None:
        checkpoint = Checkpoint.open(model)
        budget = divide_with_slots(checkpoint, options, max(MIN_SLOTS, slots))
        sock = bind(own_address(toward) if toward else "127.0.0.1", 0)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            self._engine = build_engine(checkpoint, options=options, policy="lru", device_memory_bytes=budget)
            undo.pop_all()
        self._engine.start()
        self._server = HttpServer(self._engine, sock)
        self._server.start()

    def url(self) -> str:
        """Wait until it serves. Raises: MoetoolError: it does not start."""
        if not self._server.serves(within_s=60.0):
            raise MoetoolError("a single server does not start")
        return self._server.url

    def close(self) -> None:
        self._server.stop(within_s=10.0)
        self._engine.close()


class EdgeTestbed:
    """Edge servers that stay up while placements change, each placement with its own scheduler.

    Args:
        head: started head of the servers.
        start: a placement from which every other can be reached.
    """

    def __init__(self, head: EdgeHead, start: PlacementPlan, turn: "_Turn") -> None:
        self.head, self._start, self._turn = head, start, turn

    @property
    def urls(self) -> list[str]:
        return [info.url for info in self.head.infos() if info is not None]

    def arrange(self, plan: PlacementPlan) -> None:
        """Migrate to a plan's placement without making a server or an expert unavailable.

        Raises:
            MoetoolError: no migration path exists.
        """
        for target in (plan, self._start, plan):
            wanted = {n: frozenset(held_by(target, n)) for n in range(len(self.head.names))}
            held = dict(enumerate(self.head.held()))
            if held == wanted:
                if target is plan:
                    return
                continue
            slots = {n: info.slots for n, info in enumerate(self.head.infos()) if info is not None}
            for step in steps_to(plan.spec, pooled(plan.spec, plan.cluster, slots), held, wanted):
                if step.kind == "copy":
                    self.head.adopt(step.gpu, *step.place, -1)
                else:
                    self.head.drop(step.gpu, *step.place)
        if dict(enumerate(self.head.held())) != wanted:
            raise MoetoolError("the servers lack memory to migrate between placements; give them more")

    @contextmanager
    def watched(self, plan: PlacementPlan, options: SchedulerOptions) -> Iterator[Scheduler]:
        """Run a scheduler during the block; at its end it has processed all reports and stops."""
        scheduler = Scheduler(plan.spec, plan.cluster, options)
        self.head.stats()  # drop earlier counts
        self._turn.take(scheduler)
        try:
            yield scheduler
        finally:
            self._turn.take(None)
            while scheduler.migrating:
                scheduler.on_tick(self.head)
            scheduler.report(self.head)


class _Turn:
    """The scheduler slot of the head, which passes each tick to the current scheduler."""

    tick_s = 0.02

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scheduler: Scheduler | None = None

    def take(self, scheduler: Scheduler | None) -> None:
        """Make this the current scheduler, once the running tick is over."""
        with self._lock:
            self._scheduler = scheduler

    def on_tick(self, head: EdgeHead) -> None:
        """Pass a tick of the head on."""
        with self._lock:
            if self._scheduler is not None:
                self._scheduler.on_tick(head)


@contextmanager
def open_stand(model: str, start: PlacementPlan, serve: ServeOptions, site: Site) -> Iterator[EdgeTestbed]:
    """Start the servers of a plan's cluster with its placement and emulated links.

    Effects: starts and ends processes.
    """
    options = ClusterOptions(
        emulate_links=not site.has_links, ping_s=5.0, hang_s=120.0, call_timeout_s=60.0, hedge_s=0.0, last_resort=False
    )
    settings = worker_settings(
        Checkpoint.open(model),
        start,
        identify=Authority.new().issue,
        endpoints=site.endpoints,
        options=serve,
        limits=ServerOptions(),
        cluster=options,
    )
    names = [server.name for server in start.cluster.servers]
    turn = _Turn()
    site.link(start.cluster)
    processes = site.start(Worker, [{"settings": one} for one in settings], names)
    head = EdgeHead(processes, settings, names, start.spec.num_experts_L, options=options, scheduler=turn)
    try:
        head.start()
        yield EdgeTestbed(head, start, turn)
    finally:
        head.close()


@contextmanager
def open_alone(
    model: str, slots: Sequence[int], serve: ServeOptions, site: Site, names: Sequence[str]
) -> Iterator[Processes]:
    """Start single servers with these numbers of slots."""
    toward = site.endpoints.toward
    arguments = [{"model": model, "slots": count, "options": serve, "toward": toward} for count in slots]
    processes = site.start(SingleServer, arguments, names)
    try:
        yield processes
    finally:
        processes.close()
