"""Advice: its numbers equal replays and counts on requests that were not used for choosing."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from moetool.base.errors import UsageError
from moetool.caching.residency import StepKind
from moetool.report.advice_page import answers, memory_table, page
from moetool.trace.expert_counts import ExpertCounts, open_workload
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.tuning.advice import POOLS, AdviceOptions, advise, sample
from moetool.tuning.advice_counts import covered, halve
from moetool.tuning.affinity_lookahead import AffinityCounts, Lookahead, look_ahead
from moetool.tuning.replay import ReplaySetup, decisions, replay
from tests import synthetic_routes


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("advice") / "t"
    synthetic_routes.write_trace(path, synthetic_routes.make_spec(4, 16, 2), num_requests=12)
    return Trace(path)


def test_halves_are_disjoint_and_cover_every_task(trace: Trace) -> None:
    counts, used, held_out = halve(trace)
    every = trace.requests.to_pylist()
    assert not used & held_out and used | held_out == {row["request"] for row in every}
    for task in {row["task"] for row in every}:
        mine = [row["request"] for row in every if row["task"] == task]
        assert [request in used for request in mine] == [place % 2 == 0 for place in range(len(mine))]
    assert counts.tokens_QHLE.sum() == trace.num_tokens * sum(trace.spec.top_k_L)


def test_memory_lines_are_replays_of_held_out_requests(trace: Trace) -> None:
    options = AdviceOptions(shares=(0.25, 0.5))
    found = advise(trace, options)
    counts, used, held_out = halve(trace)
    chosen_on, scored_on = sample(trace, used, options.tokens), sample(trace, held_out, options.tokens)
    for line in found.lines:
        rows = replay(trace, [*options.policies, "belady"], [line.budget_bytes], ReplaySetup(requests=scored_on))
        own = ReplaySetup(requests=scored_on, pool="layer")
        by_layer = replay(trace, options.policies, [line.budget_bytes], own)
        expected = {row.policy: row.counts.hit_rate for row in rows}
        assert line.rows == expected | {f"{row.policy} by layer": row.counts.hit_rate for row in by_layer}
        assert line.pool in POOLS
        name = line.policy if line.pool == "one" else f"{line.policy} by layer"
        assert line.policy in options.policies and line.hit_rate == line.rows[name]
        assert line.bound == line.rows["belady"] >= line.hit_rate
        before = replay(trace, [line.policy], [line.budget_bytes], ReplaySetup(requests=chosen_on, pool=line.pool))
        assert line.hit_rate_chosen == before[0].counts.hit_rate
        assert line.pinned == covered(trace.spec, counts.chosen_LE, counts.scored_LE, (line.share,))[0]
    assert found.held_out and json.dumps(found.to_json())


def test_lookahead_counts_misses_by_hand(trace: Trace) -> None:
    _, used, held_out = halve(trace)
    affinity, spec, budget = AffinityCounts(trace, used), trace.spec, trace.spec.slot_bytes * 10
    requests = frozenset(sorted(held_out)[:2])
    found = look_ahead(trace, affinity, budget, requests, sequential=True)
    assert found is not None
    loads: dict[tuple[int, int], set[int]] = {}
    for forward, layer, step in decisions(trace, "lru", budget, ReplaySetup(requests=requests, sequential=True)):
        if step.kind is StepKind.LOAD:
            loads.setdefault((forward, layer), set()).add(step.key % spec.num_experts)
    tokens = missed = predicted = 0
    for info, events in trace.forwards(sequential=True, requests=requests):
        if info.prefill:
            continue
        tokens += 1
        for event in events:
            misses = loads.get((info.forward_id, event.layer), set())
            missed += len(misses)
            if event.layer:
                predicted += len(misses & affinity.predict(event.layer - 1, events[event.layer - 1].experts_TK[0]))
    assert (found.tokens, found.missed, found.predicted) == (tokens, missed, predicted)
    assert 0 < found.predicted <= found.missed and found.wasted > 0


def test_affinity_counts_the_chosen_requests_only(trace: Trace) -> None:
    _, used, _ = halve(trace)
    affinity = AffinityCounts(trace, used)
    rows = np.concatenate([b.experts_TS[np.isin(b.request_T, sorted(used))] for b in trace.batches()]).reshape(-1, 4, 2)
    scores = np.zeros(16)
    for expert in (3, 5):
        after = rows[(rows[:, 1] == expert).any(axis=1), 2].ravel()
        scores += np.bincount(after, minlength=16) / max(len(after), 1)
    assert affinity.predict(1, (3, 5)) == set(np.argsort(-scores, kind="stable")[:2].tolist())


def test_prefetching_hides_at_most_the_compute_time() -> None:
    perfect = Lookahead(tokens=10, missed=100, predicted=100, wasted=0)
    assert perfect.seconds(10**6, 1e9, 0.005) == pytest.approx((0.015, 0.010))  # loads take 10 ms a token
    assert perfect.seconds(10**6, 1e9, 0.020) == pytest.approx((0.030, 0.020))
    useless = Lookahead(tokens=10, missed=100, predicted=0, wasted=100)
    demand, prefetch = useless.seconds(10**6, 1e9, 0.005)
    assert prefetch > demand


def test_advice_from_counts_names_its_gaps(trace: Trace, tmp_path: Path) -> None:
    export_trace(trace.path, "sglang_stat", tmp_path / "x.pt")
    import_trace([tmp_path / "x.pt"], "sglang_stat", tmp_path / "c", settings={"model": str(trace.path)})
    counts = open_workload(tmp_path / "c")
    assert isinstance(counts, ExpertCounts)
    found = advise(counts)
    assert all(line.policy is None and line.bound is None and not line.prefetch for line in found.lines)
    assert any("the best policy" in sentence for sentence in found.unknown)
    asked = [one.question for one in answers(found)]
    assert "Which cache policy?" not in asked and "Is pinning the most used experts enough?" in asked
    assert [row[1] for row in memory_table(found).rows] == ["-"] * len(found.lines)
    # one pass: nothing can be held out
    export_trace(tmp_path / "c", "coli_usage", tmp_path / "u")
    import_trace([tmp_path / "u"], "coli_usage", tmp_path / "d", settings={"model": str(trace.path)})
    alone = advise(open_workload(tmp_path / "d"))
    assert not alone.held_out and "Nothing is held out" in alone.unknown[0] and math.isnan(alone.stability.own)


def test_options_are_checked() -> None:
    for wrong in ({"shares": ()}, {"shares": (1.5,)}, {"bandwidths": {"x": 0.0}}, {"compute_s": 0.0}, {"tokens": 0}):
        with pytest.raises(UsageError):
            AdviceOptions(**wrong)  # type: ignore[arg-type]


def test_the_page_holds_every_answer(trace: Trace) -> None:
    found = advise(trace)
    text = page(found, "here")
    assert text == page(advise(trace), "here")
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    for one in answers(found):
        assert one.question.replace("'", "&#39;") in text
    assert len(found.placements) == 2 and found.placements[1].planned >= found.placements[1].even


def test_a_single_request_is_split_by_tokens(trace: Trace, tmp_path: Path) -> None:
    from moetool.trace.edit import head

    alone = head(trace, tmp_path / "one", requests=1)
    counts, used, held_out = halve(alone)
    rows = np.concatenate([batch.experts_TS for batch in alone.batches()]).reshape(alone.num_tokens, 4, 2)
    middle = -(-len(rows) // 2)
    for half, part in enumerate((rows[:middle], rows[middle:])):
        expected = [np.bincount(part[:, i].ravel(), minlength=16) for i in range(4)]
        assert (counts.tokens_QHLE[0, half] == expected).all()
    assert len(used) == 1 and not held_out
    found = advise(alone)
    assert found.held_out and not found.replay_held_out and any("There is one request" in one for one in found.unknown)
    evidence = {one.question: one.evidence for one in answers(found)}
    assert "the same as chosen on" in evidence["Which cache policy?"]
    assert "later half" in evidence["Is pinning the most used experts enough?"]
