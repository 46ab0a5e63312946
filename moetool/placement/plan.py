"""Placement plans of a cluster and migrations between them. A plan is one JSON file."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from moetool.base import validation as check
from moetool.base.artefact import Artefact
from moetool.base.errors import CapacityError, MismatchError
from moetool.base.types import Cluster, ModelSpec
from moetool.placement.demand import STARTS

Place = tuple[int, int]
"""MoE layer and expert."""
_MOVES = ("copy", "drop", "stage", "unstage")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReference:
    """A trace that a plan was made from.

    Attributes:
        requests: number of used requests.
    """

    server: str
    path: str
    sha256: str
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan(Artefact):
    """The experts that each GPU of a cluster holds.

    Attributes:
        options: all values of the planner's `Options`, defaults included.
        experts_LG: experts by MoE layer and GPU, ascending. An expert may be on several GPUs.
        starts: choice of the GPU of its server where a request's tokens start.
        costs: unit and curves of T_comp and T_comm.
        objective: name of the objective of `value` and `lower_bound`.
        value: the objective on the requests that the plan was made from.
        lower_bound: lower bound of the objective, None if unknown. For T_comp + T_comm: of any placement in this
            memory. For remote calls: the least in these slots (`moetool.placement.scoring.PlacementScore`).
        traces: traces that the plan was made from.
        profile_sha256: sha256 of the profile that the plan was made from, if any.
        planning_s: seconds of planning.
        split: share of each trace's requests to plan on (`moetool.placement.demand.planned_share`).
    """

    KIND: ClassVar[str] = "placement_plan"
    COMMAND: ClassVar[str] = "moetool plan placement"

    cluster: Cluster
    planner: str
    options: dict[str, Any]
    seed: int
    experts_LG: tuple[tuple[tuple[int, ...], ...], ...]
    starts: str
    costs: str
    objective: str
    value: float
    lower_bound: float | None
    traces: tuple[TraceReference, ...]
    profile_sha256: str | None
    planning_s: float
    split: float = 1.0

    @property
    def placed_GLE(self) -> np.ndarray:
        """Return the placement as an array of bool."""
        placed_GLE = np.zeros((len(self.cluster.gpus), self.spec.num_layers, self.spec.num_experts), bool)
        for layer, gpus in enumerate(self.experts_LG):
            for g, experts in enumerate(gpus):
                placed_GLE[g, layer, list(experts)] = True
        return placed_GLE

    def check(self, spec: ModelSpec) -> None:
        """Raise MismatchError if the plan is of another model than `spec`; else as `validate`."""
        spec.require_same(self.spec, "the model", "the plan")
        self.validate()

    def require_cluster(self, cluster: Cluster, whose: str) -> None:
        """Raises: MismatchError: the plan, called `whose`, is for another cluster."""
        if self.cluster != cluster:
            raise MismatchError(f"{whose} is for another cluster; plan for this one with: moetool plan placement")

    def validate(self) -> None:
        """Refuse an invalid plan.

        Raises:
            MismatchError: its model or cluster is invalid, the numbers of layers or GPUs are inconsistent, or an expert
                is unplaced, does not exist, or is twice on a GPU.
            CapacityError: a GPU holds more bytes than it has.
        """
        self.spec.validate()
        self.cluster.validate()
        self._validate_experts()
        check.require_one_of("starts", self.starts, STARTS)
        check.require_number("value", self.value)
        if self.lower_bound is not None:
            check.require_number("lower_bound", self.lower_bound)
        check.require_number("planning_s", self.planning_s)
        check.require_positive("split", self.split)
        check.require_number("split", self.split, 0, 1)
        check.require_plain("options", self.options)
        for i, trace in enumerate(self.traces):
            check.require_whole(f"traces.{i}.requests", trace.requests, 0)

    def _validate_experts(self) -> None:
        spec, num_gpus = self.spec, len(self.cluster.gpus)
        shape = len(self.experts_LG), max(map(len, self.experts_LG), default=0)
        same = shape[0] == spec.num_layers and all(len(gpus) == num_gpus for gpus in self.experts_LG)
        expected = f"{spec.num_layers} layers of {num_gpus} GPUs"
        check.require(same, "experts_LG", f"{shape[0]} layers of up to {shape[1]} GPUs", expected)
        held_G = [0] * num_gpus
        for layer, gpus in enumerate(self.experts_LG):
            num_experts = spec.num_experts_L[layer]
            for g, experts in enumerate(gpus):
                held_G[g] += len(experts) * spec.expert_bytes_L[layer]
                rising = all(a < b for a, b in pairwise(experts))
                check.require(
                    rising and (not experts or (experts[0] >= 0 and experts[-1] < num_experts)),
                    f"experts_LG.{layer}.{g}",
                    list(experts),
                    f"different ones of 0 to {num_experts - 1}, ascending",
                )
            placed = {expert for experts in gpus for expert in experts}
            if len(placed) < num_experts:
                missing = next(expert for expert in range(num_experts) if expert not in placed)
                check.require(False, f"experts_LG.{layer}", f"expert {missing} unplaced", "one for every expert")
        for g, (held, gpu) in enumerate(zip(held_G, self.cluster.gpus, strict=True)):
            if held > gpu.expert_bytes:
                raise CapacityError(
                    f"experts_LG: found {held:,} bytes of experts on GPU {g}, expected at most {gpu.expert_bytes:,}"
                )


def experts_of(placed_GLE: np.ndarray) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return `PlacementPlan.experts_LG` from an array of bool."""
    num_gpus, num_layers, _ = placed_GLE.shape
    return tuple(
        tuple(tuple(np.flatnonzero(placed_GLE[g, layer]).tolist()) for g in range(num_gpus))
        for layer in range(num_layers)
    )


def bare_plan(spec: ModelSpec, cluster: Cluster, placed_GLE: np.ndarray, planner: str, seed: int = 0) -> PlacementPlan:
    """Return a plan of a current or proposed placement, without provenance."""
    return PlacementPlan(
        spec=spec,
        cluster=cluster,
        planner=planner,
        options={},
        seed=seed,
        experts_LG=experts_of(placed_GLE),
        starts="round_robin",
        costs="",
        objective="",
        value=0.0,
        lower_bound=None,
        traces=(),
        profile_sha256=None,
        planning_s=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One step of a migration.

    Attributes:
        kind: `copy` (to `gpu`), `drop` (from `gpu`), `stage` (from `gpu` to the memory of its host, which computes it
            meanwhile) or `unstage` (drop it there).
        layer: MoE layer, 0..L-1.
        gpu: GPU that it is copied to, dropped from or staged from.
        source: GPU that it is copied from; -1 for host memory (staged), or without a copy.
        seconds: time over the slowest part of the path: the link, if any, or host memory to GPU.
    """

    kind: str
    layer: int
    expert: int
    gpu: int
    source: int = -1
    bytes: int = 0
    seconds: float = 0.0

    @property
    def place(self) -> Place:
        """Return the layer and the expert."""
        return self.layer, self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan(Artefact):
    """Ordered moves from one placement to another, and whether they pay.

    Attributes:
        moves: in order; after each, every expert has a place and every GPU fits.
        bytes: sum of moved bytes.
        seconds: time of all moves in sequence.
        eq3_s: T_mig of Prism's Eq. 3, additions only.
        calls_before: remote expert calls over the horizon under the old placement.
        calls_after: the same under the new placement.
        call_s: seconds of a remote call.
        saved_s: seconds saved over the horizon, (calls_before - calls_after) * call_s.
        horizon_tokens: expected life of the new placement, in tokens of the cluster.
        worth_it: whether it pays. With costs in seconds: whether T_comp + T_comm fall by more than `parallel_s`. Else
            Eq. 4: whether saved_s is more than both eq3_s and `seconds`.
        parallel_s: time of the moves with all GPUs at once.
        step_before_s: T_comp + T_comm over the horizon under the old placement; None with unit costs.
        step_after_s: the same under the new placement.
        windows: compute phases that the moves take if they run only in those (None: not computed).
        window_s: length of a compute phase.
    """

    KIND: ClassVar[str] = "migration_plan"
    WHAT: ClassVar[str] = "migration plan"
    COMMAND: ClassVar[str] = "moetool plan migrate"

    cluster: Cluster
    moves: tuple[Move, ...]
    bytes: int
    seconds: float
    eq3_s: float
    calls_before: float
    calls_after: float
    call_s: float
    saved_s: float
    horizon_tokens: float
    worth_it: bool
    windows: int | None = None
    window_s: float | None = None
    parallel_s: float = 0.0
    step_before_s: float | None = None
    step_after_s: float | None = None

    @property
    def pays_after_tokens(self) -> float | None:
        """Return the tokens after which the saved T_comp + T_comm exceed the moves; None if never, or unknown."""
        if self.step_saved_s is None or self.step_saved_s <= 0:
            return None
        return self.parallel_s / self.step_saved_s * self.horizon_tokens

    @property
    def step_saved_s(self) -> float | None:
        """Return the T_comp + T_comm saved over the horizon; None with unit costs."""
        if self.step_before_s is None or self.step_after_s is None:
            return None
        return self.step_before_s - self.step_after_s

    @property
    def printed_s(self) -> float:
        """Return T_mig of Prism's Eq. 3 as printed: a dropped expert costs as much as an added one."""
        sizes, gpus = self.spec.expert_bytes_L, self.cluster.gpus
        changes = [move for move in self.moves if move.kind in ("copy", "drop")]
        return sum(sizes[move.layer] / gpus[move.gpu].host_to_device_bytes_s for move in changes)

    def validate(self) -> None:
        """Raise MismatchError if a move's expert or GPU does not exist, or the sums are wrong."""
        self.spec.validate()
        self.cluster.validate()
        num_gpus = len(self.cluster.gpus)
        for i, move in enumerate(self.moves):
            at = f"moves.{i}"
            check.require_one_of(f"{at}.kind", move.kind, _MOVES)
            check.require_whole(f"{at}.layer", move.layer, 0, self.spec.num_layers - 1)
            check.require_whole(f"{at}.expert", move.expert, 0, self.spec.num_experts_L[move.layer] - 1)
            check.require_whole(f"{at}.gpu", move.gpu, 0, num_gpus - 1)
            check.require_whole(f"{at}.source", move.source, -1, num_gpus - 1 if move.kind == "copy" else -1)
            check.require(move.source != move.gpu, f"{at}.source", move.source, "another GPU than the one it goes to")
            size = self.spec.expert_bytes_L[move.layer] if move.kind in ("copy", "stage") else 0
            check.require(move.bytes == size, f"{at}.bytes", f"{move.bytes:,}", f"{size:,}")
            check.require_number(f"{at}.seconds", move.seconds)
        total, seconds = sum(move.bytes for move in self.moves), sum(move.seconds for move in self.moves)
        check.require(self.bytes == total, "bytes", f"{self.bytes:,}", f"{total:,}, the sum of its moves")
        near = math.isclose(self.seconds, seconds, rel_tol=1e-6, abs_tol=1e-9)
        check.require(near, "seconds", self.seconds, f"{seconds:g}, the sum of its moves")
        for name in ("eq3_s", "calls_before", "calls_after", "call_s", "parallel_s"):
            check.require_number(name, getattr(self, name))
        for name in ("step_before_s", "step_after_s"):
            if getattr(self, name) is not None:
                check.require_number(name, getattr(self, name))
        check.require_number("saved_s", self.saved_s, -math.inf)
        check.require_positive("horizon_tokens", self.horizon_tokens)
        if self.windows is not None:
            check.require_whole("windows", self.windows, 0)
        if self.window_s is not None:
            check.require_positive("window_s", self.window_s)
