"""The policy finemoe and the predictor expert_map: what is prefetched when, what goes, what is kept for later."""

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.policies.finemoe import Options, Policy
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.prediction.expert_maps import MapSearch, MapStore
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP
from moetool.training.map_store import plan_maps
from moetool.training.predictor import load_predictor
from moetool.training.training import train
from moetool.tuning.replay import ReplaySetup, replay
from tests import synthetic, synthetic_routes
from tests.refusals import refused
from tests.synthetic import run_forwards

SPEC = synthetic.make_spec(layers=4, experts=4, top_k=1)
MAP_LE = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.0, 0.1, 0.8, 0.1], [0.3, 0.3, 0.2, 0.2]], np.float32)


def _store(*maps: np.ndarray, embeddings: Sequence[Sequence[float]] = ()) -> MapStore:
    store = MapStore(4, 4, 16, SPEC.hidden_size, 2)
    last = -1
    for i, map_LE in enumerate(maps):
        search = MapSearch(store, np.array(embeddings[i] if embeddings else [1, 0, 0, 0], np.float32))
        for chance_E in map_LE:
            search.observe(chance_E)
        (last,) = store.add([search], [last])
    return store


def _policy(store: MapStore | None, num_slots: int = 8, **options: Any) -> Policy:
    given = None if store is None else SimpleNamespace(spec=SPEC, needs=frozenset(), maps=store)
    made = build_policy("finemoe", SPEC, options, num_slots, predictor=given)
    assert isinstance(made, Policy)
    return made


def _forward(maps: Sequence[np.ndarray], embeddings: Sequence[Sequence[float]]) -> tuple[ForwardInfo, list[GateEvent]]:
    """One decode forward of a request for each map."""
    count = len(maps)
    info = ForwardInfo(
        forward_id=0,
        request_T=tuple(range(count)),
        phase_T=(Phase.DECODE,) * count,
        position_T=(0,) * count,
        embedding_TD=np.array(embeddings, np.float32),
    )
    return info, [
        GateEvent(
            forward=info,
            layer=layer,
            experts_TK=tuple((int(map_LE[layer].argmax()),) for map_LE in maps),
            scores_TE=np.stack([map_LE[layer] for map_LE in maps]),
        )
        for layer in range(4)
    ]


def test_prefetches_come_by_probability_over_distance() -> None:
    policy = _policy(_store(MAP_LE), distance=3)
    info, _ = _forward([MAP_LE], [[1, 0, 0, 0]])
    # Layer 0: expert 0 at 0.7 / 1; layer 1: 1 at 0.6 / 2; layer 2: 2 at 0.8 / 3. The embedding is the same: δ = 0.
    assert policy.begin_forward(info) == [0, 5, 10]


def test_a_worse_match_prefetches_more() -> None:
    policy = _policy(_store(MAP_LE), distance=1)
    info, _ = _forward([MAP_LE], [[0.28, 0.96, 0, 0]])  # δ = 1 - 0.28 = 0.72 > 0.7: two experts
    assert policy.begin_forward(info) == [0, 1]
    assert _policy(_store(MAP_LE), distance=1, mass=False).begin_forward(info) == [0]


def test_requests_of_a_forward_add_up() -> None:
    other_LE = np.roll(MAP_LE, 1, axis=1)
    store = _store(MAP_LE, other_LE, embeddings=[[1, 0, 0, 0], [0, 1, 0, 0]])
    policy = _policy(store, distance=1)
    info, _ = _forward([MAP_LE, MAP_LE, other_LE], [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]])
    assert policy.begin_forward(info) == [0, 1]  # 0.7 + 0.7 + 0.1 of expert 0, 0.1 + 0.1 + 0.7 of expert 1


@pytest.mark.parametrize("lag", [0, 1])
def test_a_search_is_used_a_fixed_number_of_events_later(lag: int) -> None:
    policy = _policy(_store(MAP_LE), distance=2, lag=lag, meaning=False)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])
    asked = [policy.begin_forward(info)]
    for event in events:
        policy.gate(event, [], [])
        asked.append(policy.after_first_expert(event))
    # The gate of layer 0 speaks for layer 2, that of layer 1 for layer 3, where expert 0 comes before its equal 1.
    expected = [[], [10], [10, 12], [12], []] if lag == 0 else [[], [], [10], [12], []]
    assert asked == expected


def test_searches_run_beside_the_model_and_are_waited_for_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy(_store(MAP_LE), distance=2, lag=1, meaning=False)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])
    real, threads, may_go = MapSearch.by_trajectory, set(), threading.Event()

    def by_trajectory(search: MapSearch) -> Any:
        threads.add(threading.current_thread().name)
        assert may_go.wait(20)
        return real(search)

    monkeypatch.setattr(MapSearch, "by_trajectory", by_trajectory)
    policy.begin_forward(info)
    policy.gate(events[0], [], [])
    assert policy.after_first_expert(events[0]) == []  # nothing waits for the search yet
    timer = threading.Timer(0.05, may_go.set)
    timer.start()
    policy.gate(events[1], [], [])
    assert may_go.is_set() and policy.after_first_expert(events[1]) == [10]
    for event in events[2:]:
        policy.gate(event, [], [])
    policy.end_forward(info)
    assert policy.store.size == 2 and len(threads) == 1 and threads != {threading.current_thread().name}


def test_what_is_least_likely_and_least_used_goes_and_what_is_in_flight_stays() -> None:
    policy = _policy(_store(MAP_LE), distance=2)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])
    policy.begin_forward(info)
    for key in (4, 5, 6, 8):  # layer 1: 0, 1, 2 at 0.1, 0.6, 0.2; layer 2: expert 0 at the floor
        policy.admit(key, prefetched=key == 8)
    assert policy.evict([]) == 4
    assert policy.evict([4]) == 6
    assert policy.evict([4, 5, 6]) == 8  # nothing else is left
    policy, learned = _policy(_store(MAP_LE), distance=2), policy.state()
    learned["uses_X"][4] = 3  # 0.1 * (3 + 1) is more than 0.2 * (0 + 1)
    policy.restore(learned)
    policy.begin_forward(info)
    for key in (4, 5, 6, 8):
        policy.admit(key, prefetched=key == 8)
    assert policy.evict([]) == 6
    for event in events[:3]:
        policy.gate(event, [], [])
    assert policy.evict([]) == 8  # its layer has passed


def test_the_store_is_updated_on_the_thread_of_the_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy(_store(MAP_LE), distance=2)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])
    may_go, threads, real = threading.Event(), [], MapStore.add

    def add(store: MapStore, *given: Any) -> list[int]:
        threads.append(threading.current_thread())
        assert may_go.wait(20)
        return real(store, *given)

    monkeypatch.setattr(MapStore, "add", add)
    policy.begin_forward(info)
    for event in events:
        policy.gate(event, [], [])
    policy.end_forward(info)  # does not wait
    may_go.set()
    policy.begin_forward(info)
    assert policy.store.size == 2 and len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_failed_update_of_the_store_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = _policy(_store(MAP_LE), distance=2)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])

    def add(store: MapStore, *given: Any) -> list[int]:
        raise MemoryError("no room")

    monkeypatch.setattr(MapStore, "add", add)
    policy.begin_forward(info)
    for event in events:
        policy.gate(event, [], [])
    policy.end_forward(info)
    with pytest.raises(MemoryError):
        policy.begin_forward(info)
    assert policy.begin_forward(info) and policy.store.size == 1


@pytest.mark.parametrize("spare", [False, True])
def test_a_prefetch_spares_what_is_worth_more_only_if_asked(spare: bool) -> None:
    policy = _policy(_store(MAP_LE), distance=2, evict_lower_only=spare)
    policy.begin_forward(_forward([MAP_LE], [[1, 0, 0, 0]])[0])
    policy.admit(6, prefetched=False)  # 0.2
    assert policy.evict_for_prefetch(10, []) == 6  # 0.8 is worth more
    assert policy.evict_for_prefetch(7, []) == (None if spare else 6)  # 0.1 is not


def test_layers_that_passed_count_as_the_next_iteration_has_them() -> None:
    after_LE = np.roll(MAP_LE, 2, axis=1)
    policy = _policy(_store(MAP_LE, after_LE, embeddings=[[1, 0, 0, 0], [0, 1, 0, 0]]), distance=2, lag=0)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])
    policy.begin_forward(info)
    np.testing.assert_array_equal(policy.chance_LE, MAP_LE)
    policy.gate(events[0], [], [])
    policy.gate(events[1], [], [])
    np.testing.assert_array_equal(policy.chance_LE[:2], after_LE[:2])
    np.testing.assert_array_equal(policy.chance_LE[2:], MAP_LE[2:])


def test_it_learns_from_an_empty_store_and_prefetches_what_comes_again() -> None:
    spec = synthetic.make_spec(layers=6, experts=16, top_k=2)
    rng = np.random.default_rng(0)
    kinds = [synthetic.random_experts(spec, 1, rng) for _ in range(5)]  # five kinds of token that come again
    stream = []
    for forward in range(100):
        info, events = synthetic.make_forward(spec, kinds[forward % 5], forward_id=forward % 5)
        stream.append((info, events))
    hits = {}
    for name in ("finemoe", "lru"):
        residency = Residency(build_policy(name, spec, {}, 16))
        for i, (info, events) in enumerate(stream):
            if i == 50:
                before = residency.counts
            run_forwards(residency, [(info, events)])
        late = residency.counts
        hits[name] = (late.kept + late.prefetched - before.kept - before.prefetched) / (late.needed - before.needed)
    assert hits["finemoe"] == 1.0
    assert hits["lru"] < 0.5


def test_what_it_learned_outlives_it() -> None:
    spec = synthetic.make_spec(layers=3, experts=8, top_k=2)
    stream = list(synthetic.random_stream(spec, num_requests=3, prompt_tokens=4, new_tokens=6, seed=0))
    options = {"capacity": 12}
    first = build_policy("finemoe", spec, options, 10)
    residency = Residency(first)
    run_forwards(residency, stream[:-1])
    again = build_policy("finemoe", spec, options, 10)
    again.restore({name: array.copy() for name, array in first.state().items()})
    info, events = stream[-1]
    asked = [[policy.begin_forward(info)] for policy in (first, again)]
    for event in events:
        for policy, answers in zip((first, again), asked, strict=True):
            policy.gate(event, [], [])
            answers.append(policy.after_first_expert(event))
    assert asked[0] == asked[1]
    assert any(asked[0])
    with refused(ValueError, "room for 5"):
        build_policy("finemoe", spec, {"capacity": 5}, 10).restore(first.state())
    with pytest.raises(ValueError, match="expected"):
        build_policy("finemoe", spec, options, 10).restore({"maps_LCE": first.state()["maps_LCE"]})
    with refused(ValueError, "shapes"):
        build_policy("finemoe", SPEC, options, 10).restore(first.state())


def test_a_forward_that_broke_off_leaves_no_map() -> None:
    policy = _policy(None)
    info, events = _forward([MAP_LE], [[1, 0, 0, 0]])
    policy.begin_forward(info)
    policy.gate(events[0], [], [])
    policy.end_forward(info)
    assert policy.store.size == 0


@pytest.mark.parametrize(("name", "value"), [("distance", 0), ("lag", -1), ("floor", 0.0)])
def test_options_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"finemoe.*{name}"):
        Options(**{name: value})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_routes.write_trace(tmp_path_factory.mktemp("maps") / "trace", num_requests=30, keep=KEEP)


def test_a_planned_store_serves_replay_and_stays_as_it_was(trace: Path, tmp_path: Path) -> None:
    made = plan_maps(trace, tmp_path / "maps", options={"capacity": 50})
    assert (made.maps, made.capacity, made.source) == (50, 50, "logits")
    assert made.selected >= made.top_k
    predictor: Any = load_predictor(tmp_path / "maps")
    before = predictor.maps.maps_LCE.copy()
    source = Trace(trace)
    tests = frozenset(predictor.card["requests"]["test"])
    budget = 12 * source.spec.slot_bytes
    warm, again = (
        replay(source, ["finemoe"], [budget], ReplaySetup(predictor=predictor, requests=tests)) for _ in range(2)
    )
    (cold,) = replay(source, ["finemoe"], [budget], ReplaySetup(requests=tests))
    assert warm == again
    assert warm[0].counts.missed < cold.counts.missed
    np.testing.assert_array_equal(predictor.maps.maps_LCE, before)


def test_a_loaded_store_stays_in_its_file(trace: Path, tmp_path: Path) -> None:
    train("expert_map", trace, tmp_path / "maps")
    predictor: Any = load_predictor(tmp_path / "maps")
    address = predictor.maps.maps_LCE.__array_interface__["data"][0]
    file = str(tmp_path / "maps" / "predictor.safetensors")
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if file in line]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_the_printed_correlation_is_that_of_all_pairs(trace: Path, tmp_path: Path) -> None:
    made = plan_maps(trace, tmp_path / "maps")
    predictor: Any = load_predictor(tmp_path / "maps")
    maps_LCE = predictor.maps.maps_LCE
    source = Trace(trace)
    tests = frozenset(predictor.card["requests"]["test"])
    like, hits = [], []
    columns = ["logits", "embeddings"]
    for info, events in source.forwards(sequential=True, columns=columns, requests=tests):
        if info.prefill:
            continue
        query = np.concatenate([event.scores_TE[0] for event in events if event.scores_TE is not None])
        for row in range(maps_LCE.shape[1]):
            old = maps_LCE[:, row].ravel()
            like.append(query @ old / np.linalg.norm(query) / np.linalg.norm(old))
            top_LK = np.argsort(-maps_LCE[:, row], axis=1, kind="stable")[:, :2]
            hits.append(np.mean([len({*event.needed} & {*top_LK[event.layer].tolist()}) / 2 for event in events]))
    assert made.path.pearson == pytest.approx(np.corrcoef(like, hits)[0, 1], abs=1e-4)
    assert made.path.pearson > 0.5  # the routes can be learned
    assert sum(pairs for *_, pairs in made.path.bins) == len(like)


def test_maps_of_the_chosen_experts_do_for_predicting_and_not_for_finemoe(trace: Path, tmp_path: Path) -> None:
    routes = synthetic_routes.write_trace(tmp_path / "routes")
    with refused(MismatchError, "source=topk"):
        plan_maps(routes, tmp_path / "maps")
    made = plan_maps(routes, tmp_path / "maps", options={"source": "topk"})
    assert made.meaning is None and made.path.pearson is not None
    predictor = load_predictor(tmp_path / "maps")
    assert predictor.needs == {"experts", "weights"}
    with refused(MismatchError, "chosen", "experts"):
        build_policy("finemoe", predictor.spec, {}, 8, predictor=predictor)
