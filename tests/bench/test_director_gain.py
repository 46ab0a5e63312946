"""DIRECTOR's latency of a batch below offline placement, by tasks of a batch and new tokens, printed.

python -m pytest tests/bench/test_director_gain.py -m '' -s
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import Sizes
from moetool.bench.paper.experiments import expert_parallel
from moetool.bench.paper.experiments.expert_parallel import ModeRun, Options
from moetool.bench.paper.workbench import Workbench
from moetool.simulation.simulation_results import interval
from tests.published_routes import by_task, needs_routes

RUNS = {"offline": ModeRun(mode="director-offline"), "director": ModeRun(mode="director-proactive")}
BASE = Options(data=(), machine="h200-node", model="deepseek-v2-lite", runs=RUNS)


@needs_routes
def test_gain_over_offline_placement(tmp_path: Path) -> None:
    given = {task: trace.path for task, trace in by_task(tmp_path / "routes").items()}
    bench = Workbench(sizes=Sizes(seeds=5), machine=AssumedMachine(), work=tmp_path, given=given)
    for new_tokens in (8, 64):
        for composition in ("mixed", "one task"):
            cell = replace(BASE, new_tokens=new_tokens, compositions=(composition,))
            print(f"{composition}, up to {new_tokens} new tokens, below offline:", end="", flush=True)
            for measure in ("latency", "prefill"):
                found = expert_parallel.run(bench, replace(cell, measure=measure)).values
                mean, half = interval((1 - np.array(found["director"]) / found["offline"]).tolist())
                print(f" {measure} {100 * mean:.1f} ± {100 * half or 0:.1f} %", end="", flush=True)
                assert mean > 0 or composition == "mixed"
            print(flush=True)
