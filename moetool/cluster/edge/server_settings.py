"""Settings of each server of a cluster, from a placement plan."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from moetool.base.errors import CapacityError, UsageError
from moetool.caching.policy import MIN_SLOTS
from moetool.cluster.certificates import Identity
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge.worker import WorkerSettings
from moetool.models.checkpoint import Checkpoint
from moetool.placement.plan import PlacementPlan
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.serve_options import ServeOptions
from moetool.serving.server_options import ServerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses of the servers for users.

    Attributes:
        host: host of all servers.
        port: port of the first server; the next server has the next port (0: any free ones).
        api_key: key that users must send; None: none.
        toward: see `WorkerSettings`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = field(default=None, repr=False)
    toward: str = ""


def worker_settings(
    checkpoint: Checkpoint,
    plan: PlacementPlan,
    *,
    identify: Callable[[str], Identity],
    endpoints: Endpoints,
    options: ServeOptions,
    limits: ServerOptions,
    cluster: ClusterOptions,
) -> list[WorkerSettings]:
    """Settings of each server of the plan's cluster.

    A server on GPUs uses as many as the plan gives it. If all are on one machine, each has its own.

    Args:
        identify: returns a process's key and certificate by name.

    Raises:
        MismatchError: the plan belongs to another model.
        UsageError: an option is not supported in a cluster.
        CapacityError: the plan gives a server more experts than its memory holds.
    """
    spec = checkpoint.spec
    plan.check(spec)
    if options.state:
        raise UsageError("state is for policies that learn, but servers of a cluster follow the plan")
    if options.keep_prefixes:
        raise UsageError("keep_prefixes is true, but servers of a cluster would share one file; leave it out")
    for option, port in (
        ("--port", endpoints.port),
        ("--set cluster.peer_port", cluster.peer_port),
        ("--set cluster.control_port", cluster.control_port),
    ):
        if port and port + len(plan.cluster.servers) > 2**16:
            raise UsageError(f"port {port} leaves none for the last server; choose a lower one with {option}")
    slots_G, server_G = plan.cluster.slots_G(spec.slot_bytes), plan.cluster.server_G
    settings: list[WorkerSettings] = []
    taken = 0  # GPUs of earlier servers on this machine
    servers, first = range(len(plan.cluster.servers)), options.first_device
    for n, server in enumerate(plan.cluster.servers):
        own = [slots for g, slots in enumerate(slots_G) if server_G[g] == n]
        on_gpus = options.device != "cpu"
        devices = max(options.devices, len(server.gpus)) if on_gpus else options.devices
        # Each GPU of a server has equally many slots.
        capacity = min(spec.total_experts, devices * min(own) if on_gpus and devices > 1 else sum(own))
        held = held_by(plan, n)
        if len(held) > capacity:
            raise CapacityError(
                f"the plan gives server {server.name} {len(held)} experts, but its memory holds {capacity} of "
                f"{spec.slot_bytes:,} bytes; make a new plan: moetool plan placement"
            )
        links = {o: plan.cluster.link(n, o) for o in servers if o != n}
        settings.append(
            WorkerSettings(
                server=n,
                model=checkpoint.name,
                revision=spec.revision,
                content=checkpoint.content,
                held=held,
                capacity=capacity,
                host=endpoints.host,
                port=endpoints.port + n if endpoints.port else 0,
                toward=endpoints.toward,
                peer_port=cluster.peer_port + n if cluster.peer_port else 0,
                identity=identify(f"server-{n}"),
                distance=tuple(plan.cluster.round_trip_s(n, m, 4 * spec.hidden_size) for m in servers),
                links=links if cluster.emulate_links else {},
                options=replace(options, devices=devices, first_device=taken if first is None else first),
                cluster=cluster,
                limits=limits,
                api_key=endpoints.api_key,
            )
        )
        taken += 0 if endpoints.toward else devices
    return settings


def held_by(plan: PlacementPlan, server: int) -> tuple[tuple[int, int], ...]:
    """(layer, expert) of all GPUs of a server, each once."""
    gpus = [g for g, n in enumerate(plan.cluster.server_G) if n == server]
    held = {(layer, e) for layer, experts_G in enumerate(plan.experts_LG) for g in gpus for e in experts_G[g]}
    return tuple(sorted(held))


def beyond_reserved(checkpoint: Checkpoint, plan: PlacementPlan, options: ServeOptions) -> dict[str, Any]:
    """Servers whose first GPU reserves too little for dense weights and KV cache, by name: (needed, reserved) bytes."""
    budget = divide_with_slots(checkpoint, options, MIN_SLOTS)
    needs = budget.dense_bytes + budget.kv_bytes
    return {
        server.name: (needs, server.gpus[0].reserved_bytes)
        for server in plan.cluster.servers
        if server.gpus[0].reserved_bytes < needs
    }
