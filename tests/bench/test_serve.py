"""Time per token of serving the embedded model by policy and pool, beside the bounds that bytes and arithmetic set.

    make bench

`moetool bench serve` with a predictor that has not seen the prompts.
"""

from pathlib import Path

from moetool.bench.results import PLAIN, RESIDENT, print_serve_bench
from moetool.bench.serve import bench_serve
from moetool.bench.stage import BenchOptions, Subject
from moetool.capture.run import CaptureOptions, capture
from moetool.learning.training import train
from moetool.prompts import gather as prompt_sets


def test_time_per_token(tmp_path: Path) -> None:
    texts = prompt_sets.load(["all"], max_prompts=12)
    trace = capture("reference", texts, tmp_path / "trace", CaptureOptions(batch_size=8, keep=("topk",))).out
    train("affinity", trace, tmp_path / "predictor")  # counting costs next to nothing, in training and in serving
    made = bench_serve(
        Subject(model="reference", data=("all",), predictor=tmp_path / "predictor"),
        policies=["lru", "lfu", "on_demand", "static_split", "moe_infinity", "duoserve"],
        budgets=["12.5%", "50%"],
        options=BenchOptions(requests=3, new_tokens=24, threads=1),
        command="make bench",
    )
    print_serve_bench(made)
    names = [line.policy for line in made.lines]
    assert names[0] == RESIDENT and PLAIN in names
    assert all(line.tpot_mean_s > 0 and len(line.rounds) == made.rounds for line in made.lines)
