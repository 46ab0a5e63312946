"""Cache plans: a decision for a model and a device, with its inputs and reason. A plan is one JSON file."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from moetool.base import config, plugins
from moetool.base import validation as check
from moetool.base.artefact import Artefact
from moetool.base.errors import MismatchError, UsageError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorReference:
    """A predictor that a plan depends on: its name, digest and path."""

    name: str
    sha256: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan(Artefact):
    """Cache plan of a model's experts on one device.

    Attributes:
        options: values of the policy's `Options`.
        slots: expert slots of the pool.
        layer_slots: guaranteed slots of each layer (`moetool.caching.residency.Residency`); empty: one pool for all
            layers.
        prefetch_distance: layers ahead of a prefetch (0: no prefetching).
        device_memory_bytes: device memory for the whole model.
        dense_bytes: its part for dense weights.
        kv_bytes: its part for keys and values.
        kv_tokens: tokens of that KV cache (0: unknown).
        dtype: data type of everything but the experts.
        slot_bytes: size of an expert in a slot (0: its stored size).
        predictor_bytes: its part for the policy's predictor, if any.
        budget_bytes: the rest, for experts, in stored bytes.
        predictor: the policy's predictor, if any.
        trace_sha256: digest of the trace behind the choice.
        profile_sha256: digest of the profile (`CostProfile.sha256`), if the choice was by time.
        requests_used: requests of the trace for the choice.
        requests_held_out: the other requests, behind `evidence`.
        uses_LE: tokens of `requests_used` that chose each expert, layer by layer; empty: unknown.
        evidence: rows of a replay (`moetool.tuning.replay.ReplayRow.to_json`) of every candidate and of the bound.
        frontier: memory against latency: the best policy in one pool for several budgets, this one included. It is
            chosen on `requests_used`, with seconds and bytes per decode token there and on `requests_held_out`
            (`moetool.tuning.frontier.Point.to_json`).
        target_tpot_s: target time per output token, if the memory was chosen for one.
    """

    KIND: ClassVar[str] = "cache_plan"
    COMMAND: ClassVar[str] = "moetool plan cache"
    EXAMPLE: ClassVar[str] = "--trace DIR --device-memory 64MB"
    INDENT: ClassVar[int | None] = 1
    FORMER: ClassVar[tuple[str, ...]] = ("pinned", "limits")

    policy: str
    options: dict[str, Any]
    slots: int
    layer_slots: tuple[int, ...] = ()
    prefetch_distance: int
    device_memory_bytes: int
    dense_bytes: int
    kv_bytes: int
    kv_tokens: int
    dtype: str
    slot_bytes: int = 0
    predictor_bytes: int
    budget_bytes: int
    predictor: PredictorReference | None
    trace_sha256: str
    profile_sha256: str | None = None
    requests_used: tuple[int, ...]
    requests_held_out: tuple[int, ...]
    evidence: tuple[dict[str, Any], ...]
    frontier: tuple[dict[str, Any], ...] = ()
    uses_LE: tuple[tuple[int, ...], ...] = ()
    target_tpot_s: float | None = None
    reason: str

    def validate(self) -> None:
        """Refuse an invalid plan.

        Raises:
            MismatchError: its model is invalid; slots and memory contradict each other or the model;
                its policy or an option is unknown; or a number is negative or not finite.
        """
        self.spec.validate()
        spec, slots = self.spec, self.slots
        try:
            options = config.parse(plugins.load("policy", self.policy).Options, self.options, f"policy {self.policy}")
        except UsageError as error:
            raise MismatchError(first_line(error)) from None
        check.require_plain("options", self.options)
        check.require_whole("options.distance", getattr(options, "distance", 0), 0)
        check.require_whole("slots", slots, 1, spec.total_experts)
        if self.layer_slots:
            check.require_whole("layer_slots: layers", len(self.layer_slots), spec.num_layers, spec.num_layers)
            for layer, (own, size) in enumerate(zip(self.layer_slots, spec.num_experts_L, strict=True)):
                check.require_whole(f"layer_slots.{layer}", own, 1, size)
            check.require_whole("layer_slots: in all", sum(self.layer_slots), 1, slots)
        check.require_whole("prefetch_distance", self.prefetch_distance, 0, check.MAX_LAYERS)
        for name in ("device_memory_bytes", "dense_bytes", "kv_bytes", "kv_tokens", "predictor_bytes", "budget_bytes"):
            check.require_whole(name, getattr(self, name), 0)
        least = slots * min(spec.expert_bytes_L)
        check.require(
            least <= self.budget_bytes, "budget_bytes", f"{self.budget_bytes:,}", f"{least:,} or more for {slots} slots"
        )
        parts = self.dense_bytes + self.kv_bytes + self.budget_bytes
        check.require(
            parts <= self.device_memory_bytes,
            "device_memory_bytes",
            f"{self.device_memory_bytes:,}",
            f"at least the {parts:,} of its parts",
        )
        check.require_distinct("requests_used, requests_held_out", (*self.requests_used, *self.requests_held_out))
        if self.uses_LE:
            check.require_whole("uses_LE: layers", len(self.uses_LE), spec.num_layers, spec.num_layers)
            for layer, (uses_E, size) in enumerate(zip(self.uses_LE, spec.num_experts_L, strict=True)):
                check.require_whole(f"uses_LE.{layer}: experts", len(uses_E), size, size)
                for uses in uses_E:
                    check.require_whole(f"uses_LE.{layer}", uses, 0)
        check.require_plain("evidence", self.evidence)
        check.require_plain("frontier", self.frontier)
        if self.target_tpot_s is not None:
            check.require_positive("target_tpot_s", self.target_tpot_s)

    def save(self, path: Path) -> None:
        """Write the plan, whole or not at all, with the predictor's path relative to the plan's folder."""
        saved = self
        if self.predictor is not None:
            located = os.path.relpath(self.predictor.path, path.parent.resolve())
            saved = replace(self, predictor=replace(self.predictor, path=located))
        Artefact.save(saved, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan; the predictor's path becomes absolute."""
        plan = super(CachePlan, cls).load(path)
        if plan.predictor is None:
            return plan
        located = str((Path(path).parent.resolve() / plan.predictor.path).resolve())
        return replace(plan, predictor=replace(plan.predictor, path=located))
