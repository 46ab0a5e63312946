"""FineMoE on the embedded model, replayed: hit rates beside other policies, its parts one by one, and its likenesses.

Seven tenths of the prompts fill the store, the rest are replayed one after the other. Hit rates are shares of the
experts that events needed and that were resident, kept or prefetched; `loads` counts those of prefetches too.
"""

import time
from typing import Any

import pytest

from moetool.caching._policy import build_policy
from moetool.caching._residency import Counts, Residency
from moetool.capture.run import CaptureOptions, capture
from moetool.learning.predictor import load_predictor
from moetool.prompts import gather as prompt_sets
from moetool.tables import print_maps, print_table
from moetool.trace.reader import Trace
from moetool.tuning.map_store import plan_maps
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay

SHARES = (0.125, 0.25, 0.5)
CAPACITY = 1024
ABLATIONS: dict[str, dict[str, Any]] = {
    "maps: T": {"meaning": False, "mass": False},
    "maps: T+S": {"mass": False},
    "maps: T+S+δ": {},
    "maps: T+S+δ, evicts LFU": {"eviction": "lfu"},
    "maps: T+S+δ, evicts LRU": {"eviction": "lru"},
    **{f"distance {d}": {"distance": d} for d in (1, 2, 4, 6, 8)},
    **{f"lag {lag}": {"lag": lag} for lag in (0, 2)},
}
CAPACITIES = (64, 256, 4096)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    texts = list(prompt_sets.load(["all"], max_prompts=24))
    keep = ("topk", "logits", "embeddings")
    out = tmp_path_factory.mktemp("finemoe") / "trace"
    return Trace(capture("reference", texts, out, CaptureOptions(batch_size=8, keep=keep)).out)


@pytest.fixture(scope="module")
def maps(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("finemoe") / "maps"
    print()
    print_maps(plan_maps(trace.path, out, options={"capacity": CAPACITY}))
    return load_predictor(out)


def _served_before(trace: Trace, name: str, slots: int, before: frozenset[int], then: frozenset[int]) -> Counts:
    """Decode counts of a policy over `then`, after it has served `before`."""
    policy = build_policy(name, trace.spec, {}, slots)
    residency = Residency(policy)
    counts, running = Counts(), -1
    for requests in (before, then):
        residency.decode = counts = Counts()
        for info, events in trace.forwards(sequential=True, columns=policy.columns - {"experts"}, requests=requests):
            if info.request_T[0] != running:
                residency.end_request(running)
                running = info.request_T[0]
            residency.begin_forward(info)
            for event in events:
                residency.event(event)
            residency.end_forward(info)
    return counts


def _cells(rows: list[ReplayRow]) -> list[str]:
    return [f"{row.decode.hit_rate:.3f} / {row.counts.hit_rate:.3f} / {row.loads_per_decode_token:.1f}" for row in rows]


def test_finemoe(trace: Trace, maps: Any) -> None:
    spec = trace.spec
    trained = frozenset(maps.card["requests"]["train"])
    rest = frozenset([*maps.card["requests"]["validation"], *maps.card["requests"]["test"]])
    budgets = [int(share * spec.total_experts) * spec.slot_bytes for share in SHARES]

    def run(
        name: str, options: dict[str, Any] | None = None, predictor: Any = None, within: list[int] = budgets
    ) -> list[ReplayRow]:
        chosen = {name: options or {}}
        return replay(trace, [name], within, ReplaySetup(predictor=predictor, options=chosen, requests=rest))

    rows, seconds = [], {}
    for name in ("lru", "lfu", "moe_infinity", "finemoe", "belady"):
        began = time.perf_counter()
        made = run(name)
        seconds[name] = (time.perf_counter() - began) / len(budgets)
        rows.append([name, *_cells(made)])
    for name in ("lfu", "moe_infinity", "finemoe"):
        counts = [_served_before(trace, name, b // spec.slot_bytes, trained, rest) for b in budgets]
        tokens = made[0].decode_tokens
        rows.append([f"{name}, served before", *(f"{c.hit_rate:.3f} / - / {c.loads / tokens:.1f}" for c in counts)])
    rows.append(["finemoe, planned maps", *_cells(run("finemoe", predictor=maps))])
    columns = ["policy", *(f"{100 * share:g} % of the experts" for share in SHARES)]
    note = "decode hit rate / of prompts too / loads a decode token"
    print_table(f"{len(trained)} prompts before, {len(rest)} replayed: {note}", columns, rows)
    extra = 1000 * (seconds["finemoe"] - seconds["lru"]) / made[0].decode_tokens
    print(f"book-keeping of finemoe beyond lru's, prompts included: {extra:.2f} ms a decode token")

    quarter = budgets[1:2]
    rows = [[name, *_cells(run("finemoe", options, maps, quarter))] for name, options in ABLATIONS.items()]
    for capacity in CAPACITIES:
        rows.append([f"cold, capacity {capacity}", *_cells(run("finemoe", {"capacity": capacity}, None, quarter))])
    print_table(f"finemoe part by part, planned maps: {note}", ["part", columns[2]], rows)
    assert all(row[1:] for row in rows)
