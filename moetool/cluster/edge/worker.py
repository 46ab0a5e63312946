"""One edge server: an engine with its own OpenAI endpoint; other servers compute its missing experts."""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moetool.base.errors import MismatchError, MoetoolError
from moetool.base.types import ModelSpec
from moetool.caching.devices import Pool
from moetool.caching.policy import MIN_SLOTS
from moetool.cluster.certificates import Identity
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge.meter import Meter
from moetool.cluster.edge.peers import Peers
from moetool.cluster.edge.placed_experts import PlacedExperts
from moetool.cluster.edge.protocol import WorkerInfo, WorkerStats
from moetool.cluster.links import Bucket, Links
from moetool.cluster.listener import listen
from moetool.cluster.transport import Listener, own_address, url_for_others
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.content_hash import differing_file
from moetool.models.loading import LoadedModel
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.experts.device_stores import Store
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.request import EngineLike, Output, SamplingParams, Sink, TokenLogprob
from moetool.runtime.serve_options import ServeOptions
from moetool.serving.server import HttpServer, bind
from moetool.serving.server_options import ServerOptions

_LOG = logging.getLogger(__name__)

_READY_S = 60.0
USED_AT_START = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "accelerate",
    "scipy.optimize",
)
"""Modules that building a worker imports (`ForkServer`)."""
_MESSAGE_BYTES = 64 * 2**20  # least limit of a message, besides an expert


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Arguments of a worker, which travel to its machine.

    Attributes:
        server: its number in the plan's cluster.
        model: as for `build_engine`; every machine has its own copy of the checkpoint.
        revision: revision of the plan's checkpoint.
        content: sha256 of each of the head's files (`Checkpoint.content`).
        held: (layer, expert) held from the start.
        capacity: most experts held.
        host: address for its users; 0.0.0.0: every address of its machine.
        port: port for its users; 0: any free one.
        toward: address of the cluster's head, on the peers' network; empty: all are on this machine.
        peer_port: port for peers; 0: any free one.
        identity: identity of the server among its peers.
        distance: see `Peers`.
        links: by server (bytes/s, seconds), where links are emulated.
        options, cluster, limits: options of the engine, of pool and calls to others, and of the endpoint.
        api_key: key that users must send; None: none.
    """

    server: int
    model: str
    revision: str
    content: Mapping[str, str] = field(default_factory=dict)
    held: tuple[tuple[int, int], ...]
    capacity: int
    host: str = "127.0.0.1"
    port: int = 0
    toward: str = ""
    peer_port: int = 0
    identity: Identity
    distance: tuple[float, ...]
    links: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    options: ServeOptions = field(default_factory=ServeOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    limits: ServerOptions = field(default_factory=ServerOptions)
    api_key: str | None = field(default=None, repr=False)


class Worker:
    """A server of the cluster, called by its head. Methods may be called from any thread.

    Attributes:
        set_holders, change_holders, adopt, adopt_all, time_copies, drop, drop_all: those of its `PlacedExperts`.

    Effects: reads the model, listens for users and peers, and starts threads; it serves on return. `close` ends
    everything.

    Raises:
        MismatchError: the checkpoint differs from the plan's.
        MoetoolError: a port is in use, or the model cannot be read.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        checkpoint = Checkpoint.open(settings.model)
        _require_revision(checkpoint, settings)
        links = Links({server: Bucket(*link) for server, link in settings.links.items()})
        spec = checkpoint.spec
        limit_bytes = message_bytes(spec, settings.options.kv_tokens)
        self._meter = Meter(settings.server, spec, links)
        more: dict[str, Any] = {"links": links, "limit_bytes": limit_bytes, "poll_s": settings.cluster.poll_s}
        peers = Peers(settings.server, settings.identity, settings.distance, **more)
        with contextlib.ExitStack() as undo:
            users = bind(settings.host, settings.port)
            undo.callback(users.close)
            peer_host = own_address(settings.toward) if settings.toward else "127.0.0.1"
            for_peers = listen(peer_host, settings.peer_port)
            undo.callback(for_peers.close)
            slots = max(MIN_SLOTS * settings.options.devices, settings.cluster.slots or settings.capacity)
            budget = divide_with_slots(checkpoint, settings.options, slots)

            def open_runtime(loaded: LoadedModel, pool: Pool, store: Store) -> ExpertRuntime:
                held, capacity = settings.held, settings.capacity
                more: dict[str, Any] = {"peers": peers, "meter": self._meter, "options": settings.cluster}
                self._experts = PlacedExperts(loaded, pool, store, held=held, capacity=capacity, **more)
                return self._experts.runtime

            self._engine = build_engine(
                checkpoint,
                options=settings.options,
                policy="lru",
                device_memory_bytes=budget,
                open_runtime=open_runtime,
            )
            undo.callback(self._engine.close)
            experts = self._experts
            self.set_holders, self.change_holders = experts.set_holders, experts.change_holders
            self.adopt, self.adopt_all = experts.adopt, experts.adopt_all
            self.drop, self.drop_all, self.time_copies = experts.drop, experts.drop_all, experts.time_copies
            self._listener = Listener(
                for_peers, settings.identity, self._experts.handle, links=links, limit_bytes=limit_bytes
            )
            undo.callback(self._listener.close)
            self._engine.start()
            self._url = ""
            self._server = HttpServer(
                _Timed(self._engine, self._meter),
                users,
                on_ready=self._on_ready,
                options=settings.limits,
                api_key=settings.api_key,
            )
            self._server.start()
            undo.pop_all()

    def info(self) -> WorkerInfo:
        """Check that it serves. Raises: MoetoolError: it no longer can."""
        serves = self._server.draining or self._server.serves(_READY_S)
        if not serves or self._engine.state == "failed":
            raise MoetoolError(f"server {self._settings.server} does not serve (its engine: {self._engine.state})")
        return WorkerInfo(
            server=self._settings.server,
            url=self._url,
            peer=self._listener.address,
            held=self._experts.held,
            slots=self._experts.holding.capacity,
            version=self._experts.version,
            leaving=self._server.draining,
        )

    def stats(self) -> WorkerStats:
        """Counters since the last call."""
        metrics = self._engine.metrics()
        stats = self._meter.take(int(metrics["queue_running"] + metrics["queue_waiting"]))
        return replace(stats, memory_bytes=self._engine.memory_bytes())

    def drain(self) -> None:
        """Accept no more requests and finish running ones; still compute experts for others."""
        self._server.drain(self._settings.limits.drain_timeout_s + 10.0)

    def close(self) -> None:
        """End the server; running requests end with an error."""
        deadline = time.monotonic() + 10.0
        ended = False
        while not ended and time.monotonic() < deadline:
            ended = self._server.stop(within_s=0.5)
        self._listener.close()
        self._engine.close()

    def _on_ready(self, url: str) -> None:
        settings = self._settings
        self._url = url = url_for_others(url, settings.host, settings.toward)
        _LOG.info(
            "server %d serves on %s with %d of %d experts",
            *(settings.server, url, len(self._experts.held), self._experts.spec.total_experts),
        )


def message_bytes(spec: ModelSpec, tokens: int) -> int:
    """Size limit of messages between servers in bytes: an expert and all rows of one forward.

    A scored prompt is one forward, whatever its length.

    Args:
        tokens: most tokens of a forward.
    """
    rows_bytes = tokens * max(spec.top_k_L) * spec.hidden_size * 4  # float32, the widest type
    return spec.slot_bytes + max(rows_bytes, _MESSAGE_BYTES)


class _Timed:
    """An engine that times its requests and adds the cluster's counters to its statistics."""

    def __init__(self, engine: EngineLike, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # everything else is the engine's

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Like the engine's, with a sink that records the end."""
        began = time.monotonic()

        def timed(output: Output) -> None:
            if output.finish is not None and output.finish != "cancelled":
                self._meter.ended(time.monotonic() - began, failed=output.finish == "error")
            sink(output)

        return self._engine.submit(prompt, params, timed)

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """See the engine's."""
        return self._engine.prompt_logprobs(prompt, top)

    def stats(self) -> dict[str, Any]:
        """Like the engine's, with the local compute share."""
        return {**self._engine.stats(), "cluster": self._meter.to_json()}


def _require_revision(checkpoint: Checkpoint, settings: WorkerSettings) -> None:
    found = checkpoint.revision
    if found != settings.revision:
        raise MismatchError(
            f"{settings.model} on the machine of server {settings.server} is {found[:12]}, but the plan is for "
            f"{settings.revision[:12]}; copy the plan's model there, or make a new plan: moetool plan placement"
        )
    if settings.content and (file := differing_file(settings.content, checkpoint.content)):
        ours, theirs = (content.get(file, "none")[:12] for content in (checkpoint.content, settings.content))
        raise MismatchError(
            f"{settings.model} on the machine of server {settings.server} has another {file} than the head (sha256 "
            f"{ours}, expected {theirs}); copy the head's file there"
        )
