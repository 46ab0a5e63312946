"""Time per token by `replay --profile` and by `serve`, paired in one run.

    python -m pytest tests/bench/test_timeline.py -m '' -s

The profile is measured first. Then every configuration serves the same prompts in every round, and logs its gate
stream; the timeline replays those logs, with the decisions that the servers took. The ratio of the configuration with
every expert in memory is what the timeline leaves out: Python, the batcher and the sampler.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from moetool.base.tables import print_table
from moetool.measuring.profile import ProfileOptions, profile
from moetool.prompts import gather as prompt_sets
from moetool.runtime.request import Output, SamplingParams
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, replay
from tests.engines import engine

ROUNDS = 5
NEW_TOKENS = 24
CONFIGURATIONS = [("lru", 256), ("lru", 128), ("lru", 64), ("lru", 32), ("moe_infinity", 64), ("on_demand", 4)]


def _steps(made: Any, prompt: list[int]) -> list[float]:
    """Seconds of each step of one request; the first has the prompt."""

    def sink(output: Output) -> None:
        assert output.error is None, output.error

    made.submit(prompt, SamplingParams(max_tokens=NEW_TOKENS), sink)
    seconds = []
    while not made.idle:
        began = time.perf_counter()
        made.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def test_predicted_and_measured(reference: Path, tokenizer: Any, tmp_path: Path) -> None:
    costs = profile("reference", ProfileOptions(dtype="float32", seconds=30, threads=1))
    ids = [tokenizer(prompt.text)["input_ids"] for prompt in prompt_sets.load(["all"], max_prompts=1)]
    engines = [
        engine(reference, tokenizer, name, slots, log=tmp_path / str(i))
        for i, (name, slots) in enumerate(CONFIGURATIONS)
    ]
    first: list[list[float]] = [[] for _ in engines]
    later: list[list[float]] = [[] for _ in engines]
    for _ in range(ROUNDS):
        for i, made in enumerate(engines):
            for prompt in ids:
                seconds = _steps(made, prompt)
                first[i].append(seconds[0])
                later[i] += seconds[1:NEW_TOKENS]
    table = []
    for i, (name, slots) in enumerate(CONFIGURATIONS):
        stats, stall = engines[i].store.stats, engines[i].store.stats.stall_seconds
        engines[i].close()
        trace = Trace(tmp_path / str(i))
        (row,) = replay(trace, [name], [slots * trace.spec.slot_bytes], ReplaySetup(profile=costs))
        assert row.digest == trace.manifest["provenance"]["decisions"]
        assert row.timing is not None and row.timing.tpot_p50_s is not None and row.timing.ttft_p50_s is not None
        total = row.timing.total
        assert total.read_bytes <= row.loaded_bytes
        pairs = [
            (row.timing.ttft_p50_s, statistics.median(first[i])),
            (row.timing.tpot_p50_s, statistics.median(later[i])),
            (row.timing.tpot_mean_s or 0.0, statistics.fmean(later[i])),
            (total.stall_s, stall),
            (float(total.late), float(stats.late)),
        ]
        shown = [
            *(f"{1e3 * told:.2f} / {1e3 * took:.2f}  {told / took:.2f}" for told, took in pairs[:3]),
            f"{total.stall_s:.2f} / {stall:.2f}",
            f"{total.late} / {stats.late}",
        ]
        table.append([f"{name} {slots}", *shown])
    print_table(
        f"replayed / served, and their ratio: batch 1, {len(ids)} prompts x {NEW_TOKENS} tokens, {ROUNDS} rounds, one "
        f"thread, load {costs.load_average:.1f}, torch {torch.__version__}",
        ["policy and slots", "TTFT p50 ms", "TPOT p50 ms", "TPOT mean ms", "stall s", "late"],
        table,
    )
