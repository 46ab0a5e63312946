"""Small synthetic clusters and loads."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.placement.demand import Demand
from moetool.placement.latency import Latency, unit_latency
from moetool.placement.plan import PlacementPlan, bare_plan
from moetool.placement.planner import Problem


def make_cluster(slots: Sequence[Sequence[int]], slot_bytes: int = 1000, **fields: object) -> Cluster:
    """A cluster whose GPUs each hold this many experts (`slots`, by server)."""
    return Cluster(
        servers=tuple(
            Server(name=f"s{n}", gpus=tuple(Gpu(memory_bytes=room * slot_bytes) for room in gpus))
            for n, gpus in enumerate(slots)
        ),
        **fields,  # type: ignore[arg-type]
    )


def make_problem(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    seed: int = 0,
    tokens_GLE: np.ndarray | None = None,
    latency: Latency | None = None,
) -> Problem:
    """A placement problem with random skewed loads without ties."""
    if tokens_GLE is None:
        rng = np.random.default_rng(seed)
        shape = (len(cluster.gpus), spec.num_layers, spec.num_experts)
        tokens_GLE = rng.random(shape) ** 4 * 100
        for layer, num_experts in enumerate(spec.num_experts_L):
            tokens_GLE[:, layer, num_experts:] = 0
    demand = Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)
    return Problem(demand=demand, latency=latency or unit_latency(cluster), seed=seed)


def make_plan(spec: ModelSpec, cluster: Cluster, placed_GLE: np.ndarray) -> PlacementPlan:
    """A placement plan that no planner has made."""
    plan = bare_plan(spec, cluster, placed_GLE, "uniform")
    return replace(plan, costs="none", objective="remote calls (Prism, Eq. 2)")
