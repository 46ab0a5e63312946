"""Where experts live in a cluster, and how to get from one such plan to another. A plan is one JSON file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool import artefact, durable
from moetool.errors import CapacityError, MismatchError
from moetool.types import Cluster, ModelSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReference:
    """A trace that a plan was made from.

    Attributes:
        server: whose requests these are.
        requests: how many of the trace's requests were used.
    """

    server: str
    path: str
    sha256: str
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The experts that each GPU of a cluster holds.

    Attributes:
        spec: the model.
        cluster: the machines.
        planner: name of the planner.
        options: every value of the planner's `Options`, also those left at their default.
        seed: of its random choices.
        experts_LG: for each MoE layer and GPU the experts on it, ascending. An expert may be on several GPUs.
        starts: on which GPU of its server a request's tokens start.
        costs: what T_comp and T_comm are counted in, and from which curves.
        objective: name of what `value` and `lower_bound` are of.
        value: the objective on the requests that the plan was made from.
        lower_bound: of T_comp + T_comm: no placement has less, the work shared perfectly and nothing sent. Of remote
            calls: no placement in these slots has less (`moetool.planning.scoring.Score`). None: not known.
        traces: what it was made from.
        profile_sha256: the profile that it was made from, if one was.
        planning_s: how long the planner took.
        split: share of each trace's requests that it was made from (`moetool.planning.demand.planned_share`).
    """

    spec: ModelSpec
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
        """The same as an array of bool."""
        placed_GLE = np.zeros((len(self.cluster.gpus), self.spec.num_layers, self.spec.num_experts), bool)
        for layer, gpus in enumerate(self.experts_LG):
            for g, experts in enumerate(gpus):
                placed_GLE[g, layer, list(experts)] = True
        return placed_GLE

    def check(self, spec: ModelSpec | None = None) -> None:
        """Refuse a plan of another model, or one that cannot be.

        Raises:
            MismatchError: it is not of `spec`, or of another number of layers or GPUs than it says; an expert has no
                place, does not exist, or is twice on a GPU; its spec is damaged.
            CapacityError: a GPU holds more bytes than it has.
        """
        if spec is not None:
            spec.require_same(self.spec, "the model", "the plan")
        for name in ("num_experts_L", "top_k_L", "has_logits_L", "expert_bytes_L"):
            if len(getattr(self.spec, name)) != self.spec.num_layers:
                raise MismatchError(
                    f"the plan's spec has {len(getattr(self.spec, name))} values in {name}, expected "
                    f"{self.spec.num_layers}, as many as MoE layers; make it again with: moetool plan placement"
                )
        num_gpus = len(self.cluster.gpus)
        if len(self.experts_LG) != self.spec.num_layers or any(len(gpus) != num_gpus for gpus in self.experts_LG):
            raise MismatchError(
                f"the plan does not have {self.spec.num_layers} layers of {num_gpus} GPUs; make it again with: "
                f"moetool plan placement"
            )
        held_G = [0] * num_gpus
        for layer, gpus in enumerate(self.experts_LG):
            for g, experts in enumerate(gpus):
                held_G[g] += len(experts) * self.spec.expert_bytes_L[layer]
                if list(experts) != sorted(set(experts)) or not set(experts) <= set(
                    range(self.spec.num_experts_L[layer])
                ):
                    raise MismatchError(
                        f"the plan gives GPU {g} the experts {list(experts)} of MoE layer {layer}, expected different "
                        f"ones of 0 to {self.spec.num_experts_L[layer] - 1}, ascending; make it again with: moetool "
                        f"plan placement"
                    )
            if missing := sorted(set(range(self.spec.num_experts_L[layer])) - {e for experts in gpus for e in experts}):
                raise MismatchError(
                    f"the plan has no place for expert {missing[0]} of MoE layer {layer}; make it again with: moetool "
                    f"plan placement"
                )
        for g, (held, gpu) in enumerate(zip(held_G, self.cluster.gpus, strict=True)):
            if held > gpu.expert_bytes:
                raise CapacityError(
                    f"the plan puts {held:,} bytes of experts on GPU {g}, which has {gpu.expert_bytes:,} for them; "
                    f"plan for this cluster with: moetool plan placement"
                )

    def save(self, path: Path) -> None:
        """Write the plan as a whole or not at all."""
        durable.write_text(path, json.dumps(self.to_json(), allow_nan=False) + "\n")

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {**artefact.head("placement_plan", SCHEMA_VERSION), **asdict(self), "spec": self.spec.to_json()}

    @classmethod
    def load(cls, path: Path) -> "PlacementPlan":
        """Read and check a plan.

        Raises:
            UsageError: there is no such file.
            MismatchError: it is not a placement plan of this schema version, or it is damaged.
            CapacityError: it does not fit its own cluster.
        """
        plan = artefact.load(
            cls, path, what="plan", kind="placement_plan", version=SCHEMA_VERSION, command="moetool plan placement"
        )
        plan.check()
        return plan


def experts_of(placed_GLE: np.ndarray) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """`PlacementPlan.experts_LG` from an array of bool."""
    num_gpus, num_layers, _ = placed_GLE.shape
    return tuple(
        tuple(tuple(np.flatnonzero(placed_GLE[g, layer]).tolist()) for g in range(num_gpus))
        for layer in range(num_layers)
    )


def bare_plan(spec: ModelSpec, cluster: Cluster, placed_GLE: np.ndarray, planner: str, seed: int = 0) -> PlacementPlan:
    """A placement that is in force or thought of, without what a plan's file says of its making."""
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
            meanwhile) or `unstage` (give that up).
        layer: MoE layer, 0..L-1.
        expert: which of its experts.
        gpu: where it is copied to, dropped or staged.
        source: the GPU that it is copied from; -1: host memory (staged), or nothing is copied.
        bytes: that move.
        seconds: over the slowest part of the way: the link, if any, or the way from host memory to the GPU.
    """

    kind: str
    layer: int
    expert: int
    gpu: int
    source: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """Ordered moves from one placement to another, and whether they pay.

    Attributes:
        spec: the model.
        cluster: the machines.
        moves: in order; after each, every expert has a place and every GPU fits.
        bytes: that move in all.
        seconds: of all moves, one after the other.
        eq3_s: T_mig of Prism's Eq. 3, additions only.
        calls_before: remote expert calls over the horizon under the old placement.
        calls_after: under the new one.
        call_s: seconds of a remote call.
        saved_s: what the new placement saves over the horizon, (calls_before - calls_after) * call_s.
        horizon_tokens: how long the new placement is expected to last, in tokens of the cluster.
        worth_it: Eq. 4: whether saved_s is more than both eq3_s and `seconds`.
        windows: compute phases that the moves take when they run only in those (None: not asked for).
        window_s: length of a compute phase.
    """

    spec: ModelSpec
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
    windows: int | None
    window_s: float | None

    def check(self, spec: ModelSpec) -> None:
        """Raises: MismatchError if the plan is of another model than `spec`."""
        spec.require_same(self.spec, "the model", "the migration plan")

    def save(self, path: Path) -> None:
        """Write the plan as a whole or not at all."""
        durable.write_text(path, json.dumps(self.to_json(), allow_nan=False) + "\n")

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {**artefact.head("migration_plan", SCHEMA_VERSION), **asdict(self), "spec": self.spec.to_json()}

    @classmethod
    def load(cls, path: Path) -> "MigrationPlan":
        """Read a plan; errors as of `PlacementPlan.load`."""
        return artefact.load(
            cls, path, what="plan", kind="migration_plan", version=SCHEMA_VERSION, command="moetool plan migrate"
        )
