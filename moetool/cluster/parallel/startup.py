"""Start the head of `moetool serve --mode ep` from a placement plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import config
from moetool.base.config import Span
from moetool.base.errors import UsageError, unknown_name
from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.parallel.batch_placement import PLACEMENTS, BatchReplacement, RoutingPredictor
from moetool.cluster.parallel.members import Launcher
from moetool.cluster.parallel.rank_costs import Costs
from moetool.cluster.parallel.rank_head import RankedModel, RankHead
from moetool.cluster.parallel.rank_options import HeadOptions, RankOptions
from moetool.cluster.transport import own_address
from moetool.costing.costs import CostProfile
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import device_kind, parse_dtype, served_dtype
from moetool.placement import planner
from moetool.placement.demand import STARTS, Demand
from moetool.placement.latency import unit_latency
from moetool.placement.plan import PlacementPlan
from moetool.placement.planner import Problem
from moetool.placement.request_ranks import RankAssignment
from moetool.training.predictor import load_predictor

_MEASURED_TOKENS = 32
"""Prompt tokens for measuring a predictor's cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Options of `--set` for expert parallelism, besides `RankOptions`.

    Attributes:
        placement: `vanilla`: uniform, ignoring the plan; `offline`: the plan, unchanged; `reactive`: the plan, then
            placements for the last batch; `proactive`: the plan, then placements for the waiting batch.
        predictors: folders of trained predictors for `proactive`, the cheapest first, such as a cascade and an
            awq_replica.
        planner: planner of new placements.
        always: apply a new placement even if it is not expected to pay.
        starts: the rank on which a request's tokens start (`RankAssignment`; default: the plan's).
        gather_s: seconds that an incomplete batch waits for more requests.
        patience_s: seconds that a batch waits for its pending decision; later decisions are dropped.
    """

    placement: str = "offline"
    predictors: tuple[str, ...] = ()
    planner: str = "director"
    planner_options: dict[str, Any] = field(default_factory=dict)
    always: bool = False
    starts: str = ""
    gather_s: float = 0.01
    patience_s: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise unknown_name("--set placement", self.placement, PLACEMENTS)
        if self.starts and self.starts not in STARTS:
            raise unknown_name("--set starts", self.starts, STARTS)
        config.require_within(self, gather_s=Span(0), patience_s=Span(0))


def read_settings(values: Mapping[str, Any]) -> tuple[ParallelOptions, RankOptions]:
    """Split `--set` into options of the head and of the ranks. Raises: UsageError for any other."""
    left = dict(values)
    ranks = {f.name: left.pop(f.name) for f in fields(RankOptions) if f.name in left}
    known = {f.name for f in fields(ParallelOptions)}
    if stray := next((name for name in left if name not in known), None):
        raise unknown_name("--set", stray, [*known, *(f.name for f in fields(RankOptions))])
    return config.parse(ParallelOptions, left, "--set"), config.parse(RankOptions, ranks, "--set")


def with_buffer(cluster: Cluster, spec: ModelSpec) -> Cluster:
    """Return the cluster without the memory of the double buffer, for placements made while serving.

    Experts arrive in it before others are dropped: half of the slots beyond one copy of each expert, at least one a
    GPU.

    Raises:
        CapacityError: the remaining room does not hold every expert once.
    """
    slots_G = np.minimum(cluster.slots_G(spec.slot_bytes), spec.total_experts)
    redundant_slots = int(slots_G.sum()) - spec.total_experts
    buffer = max(1, redundant_slots // (2 * len(slots_G)))
    smaller = planner.with_reserved(cluster, buffer * spec.slot_bytes)
    planner.require_room(spec, smaller)
    return smaller


def uniform(spec: ModelSpec, cluster: Cluster) -> np.ndarray:
    """Return the placement of DIRECTOR's vanilla baseline."""
    tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
    tokens_GLE[:] = np.arange(spec.num_experts) < np.array(spec.num_experts_L)[:, None]
    demand = Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)
    return planner.place("uniform", Problem(demand=demand, latency=unit_latency(cluster)))


def open_predictors(folders: Sequence[str], spec: ModelSpec) -> list[RoutingPredictor]:
    """Load predictors of a prompt's routing and measure their cost.

    Raises:
        UsageError: there is none, or it cannot predict before a request runs.
        MismatchError: it is for another model.
    """
    opened = []
    for folder in folders:
        found = load_predictor(Path(folder))
        spec.require_same(found.spec, "the model", "the predictor")
        if not found.predicts_prompts:
            raise UsageError(
                f"{found.name} cannot predict pending requests; use cascade, single_transformer or awq_replica"
            )
        opened.append(RoutingPredictor(found.name, found.workload))
        opened[-1].measure(range(_MEASURED_TOKENS))
    return opened


def open_head(
    model: str,
    plan: PlacementPlan,
    launcher: Launcher,
    options: ParallelOptions,
    ranks: RankOptions,
    *,
    profile: CostProfile | None = None,
    toward: str = "",
    narrate: Callable[[str], object] = lambda line: None,
) -> RankHead:
    """Build a head; it is not started.

    Args:
        profile: costs until they are measured.
        toward: HOST:PORT of the Ray head that other machines have joined; empty if all ranks are on this machine.
        narrate: called with a line about each lost or returning rank.

    Raises:
        UsageError: an unknown planner, or a predictor that needs the running request.
        MismatchError: plan, profile, predictors and model do not belong together.
        CapacityError: the cluster has no room for a double buffer.
    """
    checkpoint = Checkpoint.open(model)
    spec = checkpoint.spec
    plan.check(spec)
    planner.find(options.planner)
    cluster = plan.cluster
    moves = options.placement in ("reactive", "proactive")
    room = with_buffer(cluster, spec) if moves else cluster
    dtype = ranks.dtype or served_dtype(checkpoint, device_kind(ranks.device))[0]
    control = BatchReplacement(
        options.placement,
        spec,
        room,
        planner_name=options.planner,
        options=options.planner_options,
        predictors=open_predictors(options.predictors, spec) if options.placement == "proactive" else (),
        always=options.always,
        seed=options.seed,
    )
    return RankHead(
        RankedModel(
            name=model,
            spec=spec,
            tokenizer=checkpoint.tokenizer,
            vocab_size=int(checkpoint.config.vocab_size),
            content=checkpoint.content,
        ),
        cluster,
        uniform(spec, cluster) if options.placement == "vanilla" else plan.placed_GLE,
        control,
        launcher,
        rank_options=replace(ranks, dtype=dtype),
        costs=Costs(
            spec,
            cluster,
            profile=profile,
            device=ranks.device,
            dtype=dtype,
            row_bytes=float(spec.hidden_size * parse_dtype(dtype).itemsize),
        ),
        options=HeadOptions(
            seating=RankAssignment(
                server_G=tuple(cluster.server_G), starts=options.starts or plan.starts, seed=options.seed
            ),
            host=own_address(toward) if toward else "127.0.0.1",
            gather_s=options.gather_s,
            patience_s=options.patience_s,
            names=rank_names(cluster),
            narrate=narrate,
        ),
    )


def rank_names(cluster: Cluster) -> tuple[str, ...]:
    """Return a name for each GPU: its server's, with its index if the server has several."""
    return tuple(
        f"{server.name}/{place}" if len(server.gpus) > 1 else server.name
        for server in cluster.servers
        for place in range(len(server.gpus))
    )
