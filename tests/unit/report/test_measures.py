"""The measures of a report against hand computation, brute force, and replay."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moetool.base import durable
from moetool.base.types import ModelSpec, Phase
from moetool.report.measures import coverage, divergence, gini, popularity, spread
from moetool.report.reuse import read_reuse, stack_distances
from moetool.report.sample import (
    ReportOptions,
    SampledRoutes,
    choose,
    choose_replayed,
    entropy,
    read_router_entropy,
    read_routes,
)
from moetool.report.transitions import affinity, lift
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter
from moetool.tuning.replay import replay
from tests.published_routes import DEEPSEEK, needs_routes
from tests.synthetic import make_spec

Request = tuple[str, Sequence[Sequence[int]]]  # its task, and of each token the experts of all layers


def write(path: Path, spec: ModelSpec, requests: Sequence[Request], logits: np.ndarray | None = None) -> Trace:
    """A trace of requests with a prompt of one token and then new ones; `logits` [T, F] are of all tokens in order."""
    with durable.staged_directory(path) as folder:
        writer = TraceWriter(folder, spec, ["topk"] if logits is None else ["topk", "logits"])
        row = 0
        for request, (task, tokens) in enumerate(requests):
            num = len(tokens)
            step_T = np.arange(num, dtype=np.int32)
            writer.add_request(
                request, dataset="d", task=task, prompt_id=str(request), prompt_tokens=1, new_tokens=num - 1
            )
            writer.append(
                TokenBatch(
                    request_T=np.full(num, request, np.int32),
                    forward_T=row + step_T,
                    phase_T=np.where(step_T > 0, Phase.DECODE, Phase.PREFILL).astype(np.uint8),
                    iteration_T=step_T,
                    position_T=step_T,
                    token_id_T=step_T,
                    experts_TS=np.array(tokens, np.uint16),
                    weights_TS=np.ones((num, sum(spec.top_k_L)), np.float16),
                    logits_TF=None if logits is None else logits[row : row + num].astype(np.float16),
                )
            )
            row += num
        writer.finish(composition={"kind": "sequential"}, provenance={})
    return Trace(path)


def read(path: Path, spec: ModelSpec, requests: Sequence[Request]) -> SampledRoutes:
    return read_routes(write(path, spec, requests), ReportOptions())


def test_entropy_is_in_bits() -> None:
    assert entropy(np.array([[1, 1, 1, 1], [2, 2, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]])).tolist() == [2, 1, 0, 0]
    assert entropy(np.array([3, 1])) == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)


def test_gini_of_known_loads() -> None:
    assert gini(np.array([5.0, 5, 5, 5])) == 0
    assert gini(np.array([0.0, 0, 0, 4])) == 0.75
    # Mean absolute difference over twice the mean: 4 / 9 of the pairs of (1, 2, 6) differ by 1, 4 or 5, twice each.
    assert gini(np.array([6.0, 1, 2])) == pytest.approx((1 + 4 + 5) * 2 / 9 / (2 * 3))


def test_divergence_is_zero_for_equal_and_one_for_disjoint_use() -> None:
    a_LE = np.array([[4.0, 0, 0], [1, 1, 0], [3, 1, 0]])
    b_LE = np.array([[0.0, 1, 1], [8, 8, 0], [1, 3, 0]])
    mixed = 1 - entropy(np.array([3.0, 1]))  # both are (3/4, 1/4) one way round or the other; their mean is even
    assert divergence(a_LE, b_LE).tolist() == pytest.approx([1, 0, mixed])


def test_stack_distances_equal_brute_force() -> None:
    assert stack_distances(np.array([0, 1, 2, 0, 0, 1]), range(6)).tolist() == [-1, -1, -1, 2, 0, 2]
    rng = np.random.default_rng(1)
    for num_keys, size in ((5, 1), (9, 3), (40, 7)):
        events = [rng.permutation(num_keys)[: rng.integers(1, size + 1)].tolist() for _ in range(60)]
        used: list[int] = []  # before the event at hand
        expected = []
        for event in events:
            for key in event:
                last = len(used) - 1 - used[::-1].index(key) if key in used else None
                expected.append(-1 if last is None else len(set(used[last + 1 :])))
            used += event
        starts = np.cumsum([0, *map(len, events[:-1])])
        assert stack_distances(np.array(used), starts).tolist() == expected


def test_reuse_distances_give_lru_hit_rates(tmp_path: Path) -> None:
    spec, rng = make_spec(layers=3, experts=8, top_k=1), np.random.default_rng(2)
    requests = [("t", rng.integers(0, 8, (40, 3)) ** 2 // 8) for _ in range(4)]
    trace = write(tmp_path / "t", spec, [(task, tokens.tolist()) for task, tokens in requests])
    reuse = read_reuse(trace, frozenset(range(4)), sequential=True)
    slots = [2, 3, 5, 9, 15, 24]
    rows = replay(trace, ["lru"], [1000 * n for n in slots])
    assert [reuse.share_within(n) for n in slots] == [row.counts.hit_rate for row in rows]
    assert rows[0].counts.hit_rate < 0.01 < rows[2].counts.hit_rate
    assert reuse.slots_for(1.0) == reuse.distances[-1] + 1
    assert reuse.prompt_share == 1 / 8 and reuse.prompt_tokens == 1


def test_reuse_distances_within_a_layer(tmp_path: Path) -> None:
    # Layer 0 takes turns with two experts, layer 1 keeps to one: one other expert of its layer between, and none.
    spec = make_spec(layers=2, experts=4, top_k=1)
    trace = write(tmp_path / "t", spec, [("t", [[i % 2, 3] for i in range(8)])])
    reuse = read_reuse(trace, frozenset([0]), sequential=True)
    assert reuse.layer_median_L.tolist() == reuse.layer_high_L.tolist() == [1, 0]
    assert sorted(set(reuse.distances.tolist())) == [1, 2]


def test_coverage_is_lower_for_tasks_with_other_experts(tmp_path: Path) -> None:
    spec = make_spec(layers=2, experts=4, top_k=1)
    a, b = [[0, 0], [1, 1]] * 4, [[2, 2], [3, 3]] * 4
    routes = read(tmp_path / "t", spec, [("a", a), ("b", b), ("a", a), ("b", b)])
    found = popularity(routes)
    assert found.tokens_QLE.tolist() == [[[8, 8, 0, 0]] * 2, [[0, 0, 8, 8]] * 2]
    assert found.tasks_apart_L.tolist() == [1, 1]
    assert found.halves_apart_L.tolist() == [0, 0]
    assert found.uneven_L.tolist() == [1, 1] and found.uneven_QL.tolist() == [[2, 2]] * 2
    assert found.gini_QL.tolist() == [[0.5, 0.5]] * 2
    covered = coverage(routes, found)
    assert (covered.own[4], covered.own[8]) == (0.5, 1)  # a quarter and a half of the experts
    assert (covered.other[8], covered.other[12], covered.other[16]) == (0, 0.5, 1)
    assert covered.mixed[16] == 1


def test_a_single_request_is_scored_on_its_later_half(tmp_path: Path) -> None:
    spec = make_spec(layers=1, experts=4, top_k=1)
    routes = read(tmp_path / "t", spec, [("a", [[0], [0], [1], [1], [1]])])
    assert routes.half_T().tolist() == [0, 0, 0, 1, 1]
    assert coverage(routes, popularity(routes)).own[4] == 0  # by the first half it is expert 0
    assert np.isnan(popularity(routes).tasks_apart_L).all()
    assert coverage(routes, popularity(routes)).other == ()


def test_entropy_grows_with_summed_iterations(tmp_path: Path) -> None:
    spec = make_spec(layers=2, experts=8, top_k=2)
    prompt, steps = [[0, 1, 0, 1]], [[0, 1, 0, 1], [2, 3, 0, 1], [4, 5, 0, 1], [6, 7, 0, 1]]
    routes = read(tmp_path / "t", spec, [("a", prompt + steps), ("a", prompt + steps)])
    found = spread(routes, popularity(routes))
    assert found.token_L.tolist() == [1, 1]
    assert found.request_QL.tolist() == [[3, 1]]  # the prompt is left out: its token is none of the steps
    assert found.steps == (1, 2, 3, 4)
    assert found.growth_QN[0].tolist() == pytest.approx([1, (2 + 1) / 2, (math.log2(6) + 1) / 2, 2])


def test_affinity_predicts_dependent_layers(tmp_path: Path) -> None:
    spec, rng = make_spec(layers=3, experts=8, top_k=1), np.random.default_rng(3)
    first = rng.integers(0, 8, 200)
    tokens = np.stack([first, 7 - first, rng.integers(0, 8, 200)], axis=1)
    routes = read(tmp_path / "t", spec, [("a", tokens[:100].tolist()), ("a", tokens[100:].tolist())])
    found = affinity(routes)
    assert found.match_M[0] == 1
    assert found.match_M[1] < 0.35 and found.popular_M[0] < 0.35
    assert found.chance_M.tolist() == [1 / 8, 1 / 8]
    follows = np.delete(np.arange(200), [0, 100])
    assert found.repeat_L[0] == pytest.approx((first[follows] == first[follows - 1]).mean())
    lift_EE = lift(routes, 0)
    for expert in range(8):
        uses = (first == expert).sum()
        expected = np.where(np.arange(8) == 7 - expert, 200 / uses, 0) if uses >= 20 else np.full(8, np.nan)
        np.testing.assert_allclose(lift_EE[expert], expected)


def test_router_entropy_is_higher_over_a_request(tmp_path: Path) -> None:
    spec = make_spec(layers=1, experts=4, top_k=1)
    sure = np.full((4, 4), -100.0)
    sure[np.arange(4), [3, 0, 1, 0]] = 0.0
    logits = np.concatenate([sure, np.zeros((2, 4))])  # one request sure of each token, one of none
    requests = [("a", [[3], [0], [1], [0]]), ("b", [[0], [0]])]
    trace = write(tmp_path / "t", spec, requests, logits)
    found = read_router_entropy(trace, read_routes(trace, ReportOptions()), ReportOptions())
    assert found is not None and found.num_requests == 2
    assert found.token_QL.ravel().tolist() == pytest.approx([0, 2])
    # Of the new tokens' (0, 1, 0): two in three for one expert.
    assert found.request_QL.ravel().tolist() == pytest.approx([float(entropy(np.array([2.0, 1]))), 2])


def test_samples_cover_every_task_within_the_limit(tmp_path: Path) -> None:
    tasks, costs = ["a"] * 30 + ["b"] * 3, [10] * 33
    assert choose(tasks, costs, 330, seed=0) == list(range(33))
    chosen = choose(tasks, costs, 65, seed=0)
    assert len(chosen) == 6
    assert [tasks[place] for place in chosen] == ["a"] * 3 + ["b"] * 3
    assert chosen == choose(tasks, costs, 65, seed=0) != choose(tasks, costs, 65, seed=1)
    assert len(choose(tasks, costs, 1, seed=0)) == 1  # one at least

    spec = make_spec(layers=2, experts=4, top_k=1)
    trace = write(tmp_path / "t", spec, [(task, [[0, 1], [1, 2]]) for task in ("a", "b", "a", "b")])
    routes = read_routes(trace, ReportOptions(choices=8))
    assert len(routes.requests) == 2 and routes.tasks == ("a", "b")
    assert choose_replayed(routes, ReportOptions(uses=4)) < set(routes.requests)


@needs_routes
def test_affinity_on_published_routes(tmp_path: Path) -> None:
    # Every other sequence of intent and law counted, the rest scored: 0.57 by affinity, 0.19 by popularity,
    # on a split of the same kind; which sequences it takes moves either by as much as 0.02.
    files = [DEEPSEEK / f"{task}.parquet" for task in ("intent", "law")]
    import_trace(files, "topk_parquet", tmp_path / "t")
    found = affinity(read_routes(Trace(tmp_path / "t"), ReportOptions()))
    assert found.match_M.mean() == pytest.approx(0.57, abs=0.02)
    assert found.popular_M.mean() == pytest.approx(0.19, abs=0.02)
