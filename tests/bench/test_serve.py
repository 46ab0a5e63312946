"""Time per token of serving the embedded model by policy and pool, beside the bounds that bytes and arithmetic set.

    make bench

`moetool bench serve`, once for each predictor with the policies that take it. The predictors are those of
`test_predictors.py`, made of one trace, so that all lines serve the same prompts, which none has seen. The first run
has the policies that take none.
"""

import os
from pathlib import Path
from typing import Any

from moetool.bench.bench_result import show
from moetool.bench.serve import bench_serve
from moetool.bench.serving_results import PLAIN, RESIDENT
from moetool.bench.serving_setup import ServingBenchOptions, Subject
from tests.bench.test_predictors import embedded

RUNS = {
    "popularity": ("lru", "lfu", "on_demand", "static_split", "moe_infinity", "mixtral_offloading"),
    "affinity": ("duoserve",),
    "gate_ahead": ("duoserve",),
    "expert_mlp": ("duoserve",),
    "promoe": ("duoserve", "promoe"),
    "expert_map": ("finemoe",),
    "next_use": ("foresight",),
}
"""By predictor, the policies that are served with it."""
OPTIONS: dict[str, dict[str, Any]] = {"duoserve": {"slots_per_layer": 16}}


def test_time_per_token(tmp_path: Path) -> None:
    kept = os.environ.get("MOETOOL_BENCH_WORK")
    _, _, predictors = embedded((Path(kept) if kept else tmp_path) / "reference", tuple(RUNS))
    served = set()
    for path in predictors:
        policies = RUNS[path.name]
        made = bench_serve(
            Subject(model="reference", data=("all",), predictor=path),
            policies=policies,
            budgets=["12.5%", "50%"],
            options=ServingBenchOptions(requests=3, rounds=3, new_tokens=24, threads=1, offload=path == predictors[0]),
            policy_options={policy: OPTIONS[policy] for policy in policies if policy in OPTIONS},
        )
        print(f"\npredictions of {path.name}")
        show(made)
        names = [row["policy"] for row in made.rows]
        assert names[0] == RESIDENT and PLAIN in names and set(policies) <= set(names)
        assert all(row["tpot_mean_s"] > 0 and len(row["rounds"]) == made.options["rounds"] for row in made.rows)
        served.add(tuple(made.facts["prompt_tokens"]))
    assert len(served) == 1  # the same prompts each time
