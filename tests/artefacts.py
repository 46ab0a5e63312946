"""A valid example of each JSON artefact, for tests that corrupt it. Each call makes a new one."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from moetool.caching.plan import CachePlan
from moetool.placement.decide import plan_migration
from moetool.placement.demand import Demand
from tests.clusters import make_cluster, make_plan
from tests.profiles import compute, line, make_profile
from tests.synthetic import make_spec

Json = Any
SPEC = make_spec()


def _plain(values: Json) -> Json:
    return json.loads(json.dumps(values, allow_nan=False))


def CACHE_PLAN() -> Json:
    """A cache plan: LRU with ten slots."""
    plan = CachePlan(
        spec=SPEC,
        policy="lru",
        options={},
        slots=10,
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


def BENCH_RESULTS() -> dict[str, Json]:
    """Results files of benches, with one row each, by bench."""
    serving = {
        **{"new_tokens": 4, "rounds": 1, "io_threads": 2},
        **{"model": "m", "experts_bytes": 10**9, "disk_bytes_s": {"4": 1e9}, "threads": 2},
        **{"dtype": "bfloat16", "direct": True, "prompt_tokens": [5, 7]},
    }
    decode = {"x_resident": 2.0, "sum_s": 0.1, "larger_s": 0.08, "x_bound": 1.1, "reads_ahead": True}
    cached = {"policy": "lru", "share": 0.25, "hit_rate": 0.5}
    found = {
        "serve": (
            serving,
            {**cached, "budget_bytes": 10**8, "slots": 4, "ttft_s": 0.2, "decode": decode, "rounds": []},
        ),
        "policies": ({"shares": [0.25]}, {**cached, "trace": "a", "loaded": 0.5, "hosted": 0.1}),
        "rivals": (
            {"threads": 2, "model": "m", "bound_tokens_s": 9.5, "token_bytes": 10**6, "memory_bytes_s": 1e9},
            {"engine": "moetool", "memory_bytes": None, "decode_tokens_s": 5.5, "prefill_tokens_s": 9.5},
        ),
        "gpu": (
            {"device": "CPU", "host_bytes_s": 1e9},
            {**cached, "shape": "s", "routers": True, "decode_s": 0.1, "decode_p95_s": 0.2},
        ),
    }
    machine = {"gpu": None, "cpu": "a CPU", "cores": 2, "torch": "2.9"}
    return {
        bench: {
            **{"schema_version": 1, "bench": bench, "options": values, "facts": values, "rows": [row], "notes": ["n"]},
            **{"command": f"moetool bench {bench}", "machine": machine, "load": [0.5, 1.5]},
        }
        for bench, (values, row) in found.items()
    }
