"""Plans: what was decided about a model, for whom, from what and why. A plan is one JSON file."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moetool import artefact, durable
from moetool.residency import PrefetchLimits
from moetool.types import ModelSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorReference:
    """A predictor that a plan depends on: its name, its content and where it lay."""

    name: str
    sha256: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """How the experts of a model are cached on one device.

    Attributes:
        spec: the model it is for.
        policy: name of the cache policy.
        options: values of the policy's `Options`.
        slots: expert slots of the pool.
        pinned: (layer, expert) of experts that never leave the device.
        prefetch_distance: how many layers ahead the policy prefetches (0: nothing).
        limits: of prefetching; None: none.
        device_memory_bytes: what the whole model may use.
        dense_bytes: what its weights outside the routed experts take of that.
        kv_bytes: what is kept of it for keys and values.
        kv_tokens: the tokens that those are for (0: not said).
        dtype: data type of everything but the experts.
        predictor_bytes: what the predictor takes of it, where the policy has one.
        budget_bytes: what is left for experts.
        predictor: what the policy predicts with, if it does.
        trace_sha256: the trace that the choice was made from.
        profile_sha256: the profile (`CostProfile.sha256`) that the choice was timed by, if it was.
        requests_used: the requests of it that the choice was made on.
        requests_held_out: the other requests, on which `evidence` was gathered.
        evidence: rows of a replay (`moetool.replay.Row.to_json`) of every candidate and of the bound.
        frontier: memory against latency: for several budgets, this one among them, the best policy, chosen on
            `requests_used`, with its seconds and bytes per decode token there and on `requests_held_out`
            (`moetool.planning.frontier.Point.to_json`). None of them is tuned.
        target_tpot_s: the time per output token that the memory was chosen for, if it was.
        reason: why this policy, in one sentence.
    """

    spec: ModelSpec
    policy: str
    options: dict[str, Any]
    slots: int
    pinned: tuple[tuple[int, int], ...] = ()
    prefetch_distance: int
    limits: PrefetchLimits | None = None
    device_memory_bytes: int
    dense_bytes: int
    kv_bytes: int
    kv_tokens: int
    dtype: str
    predictor_bytes: int
    budget_bytes: int
    predictor: PredictorReference | None
    trace_sha256: str
    profile_sha256: str | None = None
    requests_used: tuple[int, ...]
    requests_held_out: tuple[int, ...]
    evidence: tuple[dict[str, Any], ...]
    frontier: tuple[dict[str, Any], ...] = ()
    target_tpot_s: float | None = None
    reason: str

    def check(self, spec: ModelSpec) -> None:
        """Raises: MismatchError if the plan is of another model than `spec`."""
        spec.require_same(self.spec, "the model", "the plan")

    def save(self, path: Path) -> None:
        """Write the plan as a whole or not at all; the predictor's path is written relative to the plan's folder."""
        values = self.to_json()
        if self.predictor is not None:
            values["predictor"]["path"] = os.path.relpath(self.predictor.path, path.parent.resolve())
        durable.write_text(path, json.dumps(values, indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {**artefact.head("cache_plan", SCHEMA_VERSION), **asdict(self), "spec": self.spec.to_json()}

    @classmethod
    def load(cls, path: Path) -> "CachePlan":
        """Read a plan; the predictor's path becomes absolute.

        Raises:
            UsageError: there is no such file.
            MismatchError: it is not a cache plan of this schema version, or it is damaged.
        """
        plan = artefact.load(
            cls,
            path,
            what="plan",
            kind="cache_plan",
            version=SCHEMA_VERSION,
            command="moetool plan cache",
            example="--trace DIR --device-memory 64MB",
        )
        if plan.predictor is not None:
            located = str((path.parent.resolve() / plan.predictor.path).resolve())
            return replace(plan, predictor=replace(plan.predictor, path=located))
        return plan
