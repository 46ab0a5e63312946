"""Inputs of planners, and their common rules: coverage, memory, determinism.

A planner is a module of `moetool.placement` (or any other, by dotted name) with a frozen dataclass `Options` and

    place(problem: Problem, options: Options) -> np.ndarray     # placed_GLE, bool

which returns the experts of each layer on each GPU. It uses arrays only: no I/O, no clock, and randomness only from
`problem.seed`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from moetool.base import config, plugins
from moetool.base.errors import CapacityError, MismatchError, UsageError, unknown_name
from moetool.base.types import Cluster, Gpu, ModelSpec
from moetool.placement.demand import Demand
from moetool.placement.latency import Latency

MOST_COUNT = 2**31 - 1
"""The largest count in a planner's options, which solvers hold in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A placement problem.

    Attributes:
        demand: tokens to place for.
        latency: costs of computing and sending.
        seed: seed of every random choice.
        start_GLE: current placement, from which a planner may start; None without one.
        equal_slots: slots of each layer on every GPU, where an engine has as many of each; 0: as memory allows.
        routing: choice of the copy for a token (`moetool.placement.latency.flows`).
        on_progress: called with the work done and the total, by planners that may take long.
        slots_G: experts of the model's largest size that fit on each GPU.
    """

    demand: Demand
    latency: Latency
    seed: int = 0
    start_GLE: np.ndarray | None = None
    equal_slots: int = 0
    routing: str = "nearest"
    on_progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        require_room(self.spec, self.cluster)

    @property
    def spec(self) -> ModelSpec:
        return self.demand.spec

    @property
    def cluster(self) -> Cluster:
        """Return the machines."""
        return self.demand.cluster

    @property
    def slots_G(self) -> np.ndarray:
        """Return the slots of each GPU, at most the model's experts."""
        return np.minimum(self.cluster.slots_G(self.spec.slot_bytes), self.spec.total_experts)

    @property
    def exists_LE(self) -> np.ndarray:
        """Return whether each expert exists: false beyond a layer's experts."""
        return np.arange(self.spec.num_experts) < np.array(self.spec.num_experts_L)[:, None]


def require_room(spec: ModelSpec, cluster: Cluster) -> None:
    """Raise CapacityError with the shortfall if the cluster cannot hold every expert once."""
    slots = sum(min(slots, spec.total_experts) for slots in cluster.slots_G(spec.slot_bytes))
    if slots < spec.total_experts:
        short = spec.total_experts - slots
        raise CapacityError(
            f"the cluster has room for {slots:,} experts of {spec.slot_bytes:,} bytes, but {spec.name} has "
            f"{spec.total_experts:,}: {short:,} slots short ({short * spec.slot_bytes:,} bytes); give its GPUs more "
            f"memory or reserve less of it"
        )


def with_reserved(cluster: Cluster, num_bytes: int) -> Cluster:
    """Return the cluster with `num_bytes` more of each GPU reserved."""

    def leave(gpu: Gpu) -> Gpu:
        return replace(gpu, reserved_bytes=min(gpu.memory_bytes, gpu.reserved_bytes + num_bytes))

    servers = tuple(replace(server, gpus=tuple(map(leave, server.gpus))) for server in cluster.servers)
    return replace(cluster, servers=servers)


def find(name: str, *, option: str = "planner", others: Iterable[str] = ()) -> ModuleType:
    """Return the module of a planner.

    Args:
        option: the user's option, for messages.
        others: additional values of that option.

    Raises:
        UsageError: there is no such planner, or the module is not one; the error lists the option's values.
    """
    planners = plugins.names("planner")
    if "." not in name and name not in planners:
        raise unknown_name(option, name, {*planners, *others})
    module = plugins.load("planner", name)
    if not is_dataclass(getattr(module, "Options", None)) or not callable(getattr(module, "place", None)):
        raise UsageError(f"{name} is not a planner, expected a module with a dataclass Options and a function place")
    return module


def quick_options(name: str) -> dict[str, Any]:
    """Return a planner's options for re-placement while serving: its module's `QUICK`, if any."""
    return dict(getattr(find(name), "QUICK", {}))


def place(name: str, problem: Problem, options: Any = None) -> np.ndarray:
    """Run a planner by name and check its result.

    Args:
        options: values by name, or the planner's `Options`.

    Raises:
        UsageError: there is no such planner, or an option is unknown or invalid.
        CapacityError: the experts do not fit in this memory.
    """
    planner = find(name)
    if options is None or isinstance(options, dict):
        options = config.parse(planner.Options, options or {}, f"planner {name}")
    placed_GLE: np.ndarray = planner.place(problem, options)
    check_placed(problem, placed_GLE, name)
    return placed_GLE


def check_placed(problem: Problem, placed_GLE: np.ndarray, name: str) -> None:
    """Raise AssertionError if a planner breaks its contract."""
    assert placed_GLE.shape == problem.demand.tokens_GLE.shape and placed_GLE.dtype == bool, name
    assert not placed_GLE[:, ~problem.exists_LE].any(), f"{name} placed experts outside the model"
    assert (placed_GLE.any(axis=0) == problem.exists_LE).all(), f"{name} left experts unplaced"
    assert (placed_GLE.sum(axis=(1, 2)) <= problem.slots_G).all(), f"{name} overfilled a GPU"


def layer_slots(problem: Problem, c_max: int = 0, option: str = "c_max") -> np.ndarray:
    """Return slots [G, L] of each GPU for each layer, with every layer covered.

    The layers' totals are apportioned by largest remainder. Then each GPU gives every layer the floor of its share, and
    its remaining slots to the layers farthest below their totals.

    Args:
        c_max: maximum experts of a layer on a GPU (0: as memory allows).
        option: the planner's name of this option, for messages.

    Raises:
        UsageError: `c_max` is out of range.
        CapacityError: a layer is not covered, under `c_max` or because a GPU can hold an expert only once.
    """
    experts_L, slots_G = np.array(problem.spec.num_experts_L), problem.slots_G
    if not 0 <= c_max <= MOST_COUNT:
        raise UsageError(f"{option} is {c_max}, expected 0 to {MOST_COUNT:,}")
    most_L = np.minimum(experts_L, c_max) if c_max else experts_L
    total_L = apportion(int(slots_G.sum()), experts_L)
    given_GL = np.zeros((len(slots_G), len(experts_L)), np.int64)
    for g, slots in enumerate(slots_G.tolist()):
        given_GL[g] = np.minimum(slots * experts_L // experts_L.sum(), most_L)
    for g, slots in enumerate(slots_G.tolist()):
        for _ in range(slots - int(given_GL[g].sum())):
            open_L = given_GL[g] < most_L
            if not open_L.any():
                break
            layer = int(np.where(open_L, total_L - given_GL.sum(axis=0), np.iinfo(np.int64).min).argmax())
            given_GL[g, layer] += 1
    short_L = experts_L - given_GL.sum(axis=0)
    if (short_L > 0).any():
        layer = int(short_L.argmax())
        limit = f" with {option} {c_max}; raise {option}, or" if c_max else ";"
        raise CapacityError(
            f"MoE layer {layer} gets {given_GL[:, layer].sum()} slots for {experts_L[layer]} experts{limit} spread the "
            f"memory more evenly over the GPUs"
        )
    return given_GL


def apportion(total: int, weight_X: np.ndarray) -> np.ndarray:
    """Apportion `total` by the weights with the largest remainder; ties go to the lower number."""
    sum_ = weight_X.sum()
    quota_X = total * weight_X / sum_ if sum_ > 0 else np.full(len(weight_X), total / len(weight_X))
    given_X = np.floor(quota_X + 1e-9).astype(np.int64)
    order_X = np.argsort(-(quota_X - given_X), kind="stable")
    given_X[order_X[: total - int(given_X.sum())]] += 1
    return given_X


def filled(problem: Problem, placed_GLE: np.ndarray, slots: int, planner: str) -> np.ndarray:
    """Fill each free slot with the expert that the GPU lacks and that has the most load per copy.

    Raises:
        MismatchError: the planner put more experts of a layer on a GPU than it has slots for it.
    """
    held_GL = placed_GLE.sum(axis=2)
    if (held_GL > slots).any():
        g, layer = np.argwhere(held_GL > slots)[0].tolist()
        raise MismatchError(
            f"{planner} puts {held_GL[g, layer]} experts of MoE layer {layer} on GPU {g}, but the engine has {slots} "
            f"slots of each layer there; plan with eplb, director, prism_exact or uniform, which place layer by layer"
        )
    filled_GLE, count_LE, tokens_LE = placed_GLE.copy(), placed_GLE.sum(axis=0), problem.demand.tokens_LE
    for g, layer in np.argwhere(held_GL < slots).tolist():
        for _ in range(slots - int(held_GL[g, layer])):
            per_copy_E = tokens_LE[layer] / count_LE[layer]
            expert = int(np.where(filled_GLE[g, layer], -1.0, per_copy_E).argmax())
            filled_GLE[g, layer, expert] = True
            count_LE[layer, expert] += 1
    return filled_GLE
