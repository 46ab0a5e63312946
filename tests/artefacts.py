"""A valid example of each JSON artefact, for tests that corrupt it. Each call makes a new one."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from moetool.cache_plan import CachePlan
from moetool.placement._decide import plan_migration
from moetool.placement._demand import Demand
from tests.clusters import make_cluster, make_plan
from tests.profiles import compute, line, make_profile
from tests.synthetic import make_spec

Json = Any
SPEC = make_spec()


def _plain(values: Json) -> Json:
    return json.loads(json.dumps(values, allow_nan=False))


def CACHE_PLAN() -> Json:
    """A cache plan: LRU with ten slots and two pinned experts."""
    plan = CachePlan(
        spec=SPEC,
        policy="lru",
        options={},
        slots=10,
        pinned=((0, 1), (2, 7)),
        prefetch_distance=0,
        device_memory_bytes=13_500,
        dense_bytes=3_000,
        kv_bytes=500,
        kv_tokens=64,
        dtype="bfloat16",
        predictor_bytes=0,
        budget_bytes=10_000,
        predictor=None,
        trace_sha256="0" * 64,
        requests_used=(1, 2),
        requests_held_out=(4, 5),
        evidence=({"policy": "lru", "hit_rate": 0.5},),
        reason="made up",
    )
    return _plain(plan.to_json())


def _placed(first: int) -> np.ndarray:
    placed_GLE = np.zeros((2, SPEC.num_layers, SPEC.num_experts), bool)
    placed_GLE[0, :, :first] = placed_GLE[1, :, first:] = True
    return placed_GLE


def PLACEMENT_PLAN() -> Json:
    """A placement on two servers of one GPU each."""
    return _plain(make_plan(SPEC, make_cluster([[14], [14]]), _placed(4)).to_json())


def MIGRATION_PLAN() -> Json:
    """A migration plan that moves one expert from the second GPU to the first."""
    cluster = make_cluster([[14], [14]])
    old, new = make_plan(SPEC, cluster, _placed(4)), make_plan(SPEC, cluster, _placed(4))
    experts = [[list(gpu) for gpu in layer] for layer in new.experts_LG]
    experts[0] = [[0, 1, 2, 3, 4], [5, 6, 7]]
    new = replace(new, experts_LG=tuple(tuple(tuple(gpu) for gpu in layer) for layer in experts))
    demand = Demand(spec=SPEC, cluster=cluster, tokens_GLE=np.ones((2, SPEC.num_layers, SPEC.num_experts)))
    return _plain(plan_migration(old, new, demand, horizon_tokens=1000, window_s=0.01).to_json())


def PROFILE() -> Json:
    """A cost profile with lines and a measured link."""
    return _plain(make_profile(SPEC, compute(expert=line(5))).to_json())
