"""Whole simulations: modes, what they see, Eq. 4, seeds, and grids."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.config import parse_settings
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Cluster
from moetool.placement import planner
from moetool.placement.demand import Batch, Demand
from moetool.placement.plan import bare_plan
from moetool.placement.planner import quick_options
from moetool.placement.recall import Recall
from moetool.simulation.event_loop import EventLoop
from moetool.simulation.placement_control import MODES
from moetool.simulation.simulate import ModeInputs, SimulationInputs, read_settings, read_world, simulate
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.sweep import parse_sweeps, resize, sweep
from moetool.simulation.workload import RequestSource
from moetool.trace.reader import Trace
from moetool.training.predictor import build
from tests.clusters import make_cluster
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace

SPEC = make_spec(3, 8, 2)
OPTIONS = SimulationOptions(seed=1, decode_tokens=3, replan_s=20.0, window_s=10.0)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("simulated")
    return {f"s{n}": Trace(write_trace(folder / f"s{n}", SPEC, num_requests=12, seed=n)) for n in range(2)}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return make_cluster([[15], [8, 8]], slot_bytes=1024, link_bytes_s=2000.0)


@pytest.fixture(scope="module")
def world(traces: dict[str, Trace], cluster: Cluster) -> SimulationInputs:
    return read_world(traces, cluster, OPTIONS)


def test_no_request_is_drawn_that_the_predictor_was_trained_on(traces: dict[str, Trace], cluster: Cluster) -> None:
    affinity = build("affinity", SPEC)

    def drawn(train: list[int]) -> int:
        requests = {"train": train, "test": sorted(set(range(12)) - set(train))}
        affinity.card = {"predictor": "affinity", "trace": {"sha256": traces["s0"].sha256}, "requests": requests}
        affinity.card |= {"seen_prompts": []}
        return len(read_world({"s0": traces["s0"]}, cluster, OPTIONS, affinity).sources[0].prompts)

    assert drawn([1, 3, 5, 7, 9, 11]) == 6  # the history
    assert drawn([0, 1, 3, 5, 7, 9, 11]) == 5  # and one of the six that are drawn
    with refused(UsageError, "no request", "predictor", "not trained"):
        drawn([0, 2, 4, 6, 8, 10])
    runs = {"options": OPTIONS, "inputs": ModeInputs(predictor=affinity)}
    with refused(UsageError, "not trained"):
        sweep({"s0": traces["s0"]}, cluster, {}, "director-proactive", "poisson:3s", 4, **runs)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_every_request_and_the_same_under_a_seed(world: SimulationInputs, mode: str) -> None:
    inputs = ModeInputs(options=quick_options(MODES[mode].planner))
    first, again = (simulate(world, mode, "poisson:3s", 8, OPTIONS, inputs=inputs) for _ in range(2))
    assert first.to_json() == again.to_json()
    assert len(first.served) == 8
    assert 0 < first.local <= 1
    assert first.mean_s > 0
    if MODES[mode].sees == "nothing":
        assert first.migrations == ()


def test_the_second_half_of_the_requests_may_come_from_other_data(world: SimulationInputs) -> None:
    """Prompts of 7 tokens, then of 5; numbers and arrivals stay those of one stream."""

    def cut(length: int) -> dict[int, RequestSource]:
        return {n: replace(one, prompts=[rows[:length] for rows in one.prompts]) for n, one in world.sources.items()}

    changing = replace(world, sources=cut(7), later=cut(5))
    found = simulate(changing, "prism", "poisson:3s", 9, OPTIONS)
    assert [one.prompt_tokens for one in found.served] == [7] * 4 + [5] * 5
    steady = simulate(world, "prism", "poisson:3s", 9, OPTIONS)
    assert [one.arrived_s for one in found.served] == [one.arrived_s for one in steady.served]


def test_larger_experts_cost_eq_4_as_much_more(traces: dict[str, Trace], cluster: Cluster) -> None:
    """Four times the bytes in four times the memory: the same moves, and Eq. 3 asks four times as many seconds."""
    larger = [
        replace(server, gpus=tuple(replace(gpu, memory_bytes=4 * gpu.memory_bytes) for gpu in server.gpus))
        for server in cluster.servers
    ]
    placed_GLE = np.zeros((3, 3, 8), bool)
    placed_GLE[0, :, :4] = placed_GLE[1, :, 4:6] = placed_GLE[2, :, 6:] = True
    costs = []
    for size, machines in ((0, cluster), (4096, replace(cluster, servers=tuple(larger)))):
        options = replace(OPTIONS, expert_bytes=size, migrate="free", decide="always")
        world = read_world(traces, machines, options)
        inputs = ModeInputs(plan=bare_plan(world.spec, machines, placed_GLE, "by hand"))
        found = simulate(world, "prism_exact", "poisson:1s", 60, options, inputs=inputs)
        costs.append([one.cost_s for one in found.migrations])
    assert costs[0] and costs[1] == pytest.approx([4 * cost_s for cost_s in costs[0]])


def test_progress_is_told_by_what_is_done(world: SimulationInputs) -> None:
    told: list[tuple[str, int, int]] = []
    simulate(world, "uniform", "poisson:3s", 5, OPTIONS, on_progress=lambda *at: told.append(at))
    assert told[:2] == [("uniform: placing", 0, 1), ("uniform: placing", 1, 1)]
    assert told[2:] == [("uniform: serving requests", count, 5) for count in range(1, 6)]
    told.clear()
    simulate(world, "director-offline", "poisson:3s", 1, OPTIONS, on_progress=lambda *at: told.append(at))
    assert told[1:-2] == [("director-offline: placing", done, 6) for done in range(1, 7)]  # 3 layers, then their copies


def test_another_seed_draws_other_requests(world: SimulationInputs) -> None:
    runs = [simulate(world, "uniform", "poisson:3s", 12, replace(OPTIONS, seed=seed)) for seed in (1, 2)]
    assert runs[0].latencies_s != runs[1].latencies_s


def test_a_migration_is_made_when_eq_4_says_so_and_helps(world: SimulationInputs) -> None:
    """From a placement for nobody, prism_exact changes to the optimum; both sides of Eq. 4 are there."""
    spec, cluster = world.spec, world.cluster
    placed_GLE = np.zeros((3, 3, 8), bool)
    placed_GLE[0, :, :4] = placed_GLE[1, :, 4:6] = placed_GLE[2, :, 6:] = True
    inputs = ModeInputs(plan=bare_plan(spec, cluster, placed_GLE, "by hand"))
    moving = simulate(world, "prism_exact", "poisson:1s", 120, OPTIONS, inputs=inputs)
    static = simulate(world, "prism_exact", "poisson:1s", 120, replace(OPTIONS, replan_s=0.0), inputs=inputs)
    first = moving.migrations[0]
    assert first.made and first.worth_it and first.saved_s > first.cost_s > 0
    assert first.done_s is not None and first.done_s > first.at_s == 20.0
    assert all(one.made == one.worth_it == (one.saved_s > one.cost_s) for one in moving.migrations)
    assert static.migrations == ()
    assert moving.local > static.local + 0.05
    assert moving.windows[0].local == static.windows[0].local  # alike until the first migration
    always = simulate(world, "prism_exact", "poisson:1s", 120, replace(OPTIONS, decide="always"), inputs=inputs)
    assert all(one.made for one in always.migrations)
    with refused(MismatchError, "another cluster"):
        simulate(
            replace(world, cluster=replace(cluster, link_bytes_s=1.0)), "prism", "every:1s", 1, OPTIONS, inputs=inputs
        )


def test_who_sees_the_coming_requests_has_more_of_their_experts_at_hand(world: SimulationInputs) -> None:
    options = replace(OPTIONS, migrate="free", decide="always")
    local = {
        mode: np.mean([simulate(world, mode, "every:5s", 12, replace(options, seed=seed)).local for seed in range(2)])
        for mode in ("uniform", "director-offline", "director-proactive")
    }
    assert local["director-proactive"] > local["director-offline"] > local["uniform"]
    guessed = simulate(world, "director-proactive", "every:5s", 8, replace(options, lookahead="predicted"))
    assert guessed.migrations and guessed.local > local["uniform"]


@pytest.mark.parametrize("name", ["cascade", "single_transformer"])
def test_requests_that_wait_are_predicted_from_their_tokens_alone(world: SimulationInputs, name: str) -> None:
    predictor: Any = build(name, SPEC, {"width": 16, "heads": 2, "vocabulary": 4096}).eval().requires_grad_(False)
    asked: list[tuple[tuple[int, ...], int]] = []
    workload = predictor.workload

    def hear(token_id_S: Sequence[int], new_tokens: int) -> np.ndarray:
        asked.append((tuple(token_id_S), new_tokens))
        made: np.ndarray = workload(token_id_S, new_tokens)
        return made

    predictor.workload = hear
    options = replace(OPTIONS, lookahead="predicted", migrate="free", decide="always")
    inputs = ModeInputs(predictor=predictor)
    found = simulate(world, "director-proactive", "every:5s", 8, options, inputs=inputs)
    assert len(found.served) == 8 and found.migrations
    prompts = {tuple(ids.tolist()) for source in world.sources.values() for ids in source.token_ids}
    lengths = [len(reply_TS) for source in world.history_sources.values() for reply_TS in source.replies]
    assert {ids for ids, _ in asked} <= prompts and {new for _, new in asked} == {round(np.mean(lengths))}
    for source in world.sources.values():
        assert [len(ids) for ids in source.token_ids] == [len(prompt_TS) for prompt_TS in source.prompts]


def test_a_round_that_waits_for_its_experts_begins_later(world: SimulationInputs) -> None:
    runs = {
        how: simulate(world, "director-proactive", "every:50s", 6, replace(OPTIONS, migrate=how))
        for how in ("free", "pipelined", "overlap", "stop")
    }
    assert runs["free"].mean_wait_s == runs["pipelined"].mean_wait_s == runs["overlap"].mean_wait_s == 0
    assert runs["stop"].mean_wait_s > 0
    assert all(one.done_s == one.at_s for one in runs["free"].migrations)
    assert all(runs[how].sent_bytes > runs["free"].sent_bytes for how in ("pipelined", "overlap"))  # experts, too


def test_planning_takes_time_where_it_is_charged(world: SimulationInputs) -> None:
    """Six rounds; who places for the queue waits for its plan, who places from the past moves later."""
    options = replace(OPTIONS, migrate="free", decide="always", plan_s=3.0, predict_share=0.5)
    runs = {
        how: simulate(world, "director-proactive", "every:50s", 6, replace(options, planning=how))
        for how in ("free", "beside", "wait")
    }
    assert runs["free"].mean_wait_s == 0 and all(one.plan_s == 0 for one in runs["free"].migrations)
    assert runs["beside"].mean_wait_s <= runs["wait"].mean_wait_s
    assert all(one.waited_s >= 3.0 for one in runs["wait"].migrations)
    assert runs["wait"].mean_wait_s >= 3.0
    reactive = simulate(world, "director-reactive", "every:50s", 6, replace(options, planning="wait"))
    assert reactive.mean_wait_s == 0 and reactive.migrations
    assert all((one.done_s, one.waited_s) == (one.at_s + 3.0, 0) for one in reactive.migrations)
    measured = simulate(world, "director-proactive", "every:50s", 2, replace(options, planning="wait", plan_s=0.0))
    assert all(0 < one.plan_s <= one.waited_s for one in measured.migrations)


@pytest.mark.parametrize("mode", ["director-proactive", "director-reactive"])
def test_a_round_that_waits_for_its_experts_waited_until_they_moved(world: SimulationInputs, mode: str) -> None:
    options = replace(OPTIONS, migrate="stop", decide="always", planning="wait", plan_s=3.0)
    found = simulate(world, mode, "every:50s", 6, options)
    moved = [one for one in found.migrations if one.made]
    assert moved and all(one.done_s == pytest.approx(one.at_s + one.waited_s) and one.waited_s > 3.0 for one in moved)
    waited = {one.at_s: one.waited_s for one in found.migrations}
    for one in found.served:
        assert one.started_s - one.arrived_s == pytest.approx(waited.get(one.arrived_s, 0.0))


@pytest.mark.parametrize(("mode", "waited"), [("uniform-proactive", [3.0] * 3), ("uniform-reactive", [])])
def test_a_plan_without_moves_is_on_record_where_a_round_waited_for_it(
    world: SimulationInputs, mode: str, waited: list[float]
) -> None:
    """The planner proposes the same placement whatever the requests of the three rounds."""
    options = replace(OPTIONS, decide="always", planning="wait", plan_s=3.0)
    found = simulate(world, mode, "every:50s", 6, options)
    assert [one.waited_s for one in found.migrations] == waited
    assert not any(one.made or one.copies for one in found.migrations)
    assert found.mean_wait_s == pytest.approx(np.mean(waited or [0.0]))


def test_lengths_come_from_the_file_of_arrivals(world: SimulationInputs, tmp_path: Path) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 30, "output_length": 3}\n' * 3)
    found = simulate(world, "uniform", str(file), 10, replace(OPTIONS, decode_tokens=9))
    assert [(one.prompt_tokens, one.new_tokens) for one in found.served] == [(30, 3)] * 3
    cut = simulate(world, "uniform", str(file), 10, replace(OPTIONS, prompt_tokens=8, decode_tokens=2))
    assert [(one.prompt_tokens, one.new_tokens) for one in cut.served] == [(8, 2)] * 3


def test_a_grid_of_clusters(traces: dict[str, Trace], cluster: Cluster) -> None:
    larger = resize(cluster, 7)
    assert [(s.name, len(s.gpus)) for s in larger.servers] == [
        *(("s0", 1), ("s1", 2), ("s0#1", 1), ("s1#1", 2), ("s0#2", 1))
    ]
    swept = parse_sweeps(["gpus=3,6", "bandwidth=16kbps,1Mbps", "planner=uniform,prism_exact"])
    runs = sweep(traces, cluster, swept, "uniform", "poisson:3s", 20, OPTIONS)
    assert len(runs) == 8
    found = {(at["gpus"], at["bandwidth"], at["planner"]): run for at, run in runs}
    assert len(found["3", "1Mbps", "uniform"].served) == 20
    assert len(found["6", "1Mbps", "uniform"].served) == 40
    assert {one.server for one in found["6", "1Mbps", "uniform"].served} == {"s0", "s1", "s0#1", "s1#1"}
    for gpus in ("3", "6"):
        assert found[gpus, "1Mbps", "uniform"].mean_s < found[gpus, "16kbps", "uniform"].mean_s
        assert found[gpus, "16kbps", "prism_exact"].local > found[gpus, "16kbps", "uniform"].local


def test_copies_of_servers_add_rounds_and_nothing_else(
    traces: dict[str, Trace], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plan before each round, and one prediction for each drawn route, from each request of the history once."""
    plans: list[str] = []
    histories: list[int] = []
    predicted: list[int] = []
    place = planner.place

    class Told(Recall):
        def __init__(self, history: Sequence[Batch]) -> None:
            super().__init__(history)
            histories.append(sum(len(parts) for _, parts in history))

        def __call__(self, batch: Batch) -> Demand:
            predicted.append(len(batch[1]))
            return super().__call__(batch)

    monkeypatch.setattr(planner, "place", lambda name, *more: plans.append(name) or place(name, *more))
    monkeypatch.setattr("moetool.simulation.simulate.Recall", Told)
    options = replace(OPTIONS, lookahead="predicted", migrate="free")
    for gpus in (3, 48):
        plans.clear()
        predicted.clear()
        swept = {"gpus": [str(gpus)]}
        ((_, found),) = sweep(traces, cluster, swept, "uniform-proactive", "every:1ms", 12, options)
        assert len(found.served) == 4 * gpus
        assert len(plans) == 1 + len({one.started_s for one in found.served}) < 10
        assert 0 < sum(predicted) <= 12  # half of the requests of two traces
    assert histories == [12, 12]


def test_what_makes_no_sense_is_refused(world: SimulationInputs) -> None:
    for settings, message in (
        ({"seats": 0}, "seats is 0, expected at least 1"),
        ({"admission": "round"}, "did you mean 'rounds'"),
        ({"decay": 2.0}, "decay"),
        ({"dense_s": -1.0}, "dense_s is -1"),
    ):
        with pytest.raises(UsageError, match=message):
            read_settings(settings)
    assert read_settings({"fill": False})[2] == {"fill": False}
    for swept in (["gpu=4"], ["gpus="]):
        with pytest.raises(UsageError, match=r"did you mean 'gpus'|no value"):
            parse_sweeps(swept)
    with refused(UsageError, "prism"):
        simulate(world, "prsm", "every:1s", 1)
    for option in ("copies=links", "planning=wait", "plan_s=1.0", "predict_share=0.5"):
        with refused(UsageError, option, "mode=ep"):
            simulate(world, "prism", "every:1s", 1, read_settings(parse_settings([option]))[0])
    with refused(MismatchError, "hidden", "size"):
        nameless = replace(world, spec=replace(SPEC, hidden_size=0))
        simulate(nameless, "uniform", "every:1s", 1)


def test_results_that_join_their_link_ahead_of_time_change_nothing(
    world: SimulationInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        (mode, gap, replace(OPTIONS, seats=seats, links=links))
        for mode, gap, seats, links in (
            ("uniform", "every:1s", 2, "pair"),
            ("prism_exact", "poisson:1s", 1, "pair"),
            ("redundant", "every:2s", 3, "server"),
        )
    ]
    ahead = [simulate(world, mode, gap, 30, options).to_json() for mode, gap, options in runs]
    monkeypatch.setattr(EventLoop, "ahead_G", lambda self: [-np.inf] * len(self.cluster.gpus))
    assert [simulate(world, mode, gap, 30, options).to_json() for mode, gap, options in runs] == ahead
