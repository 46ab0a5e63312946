"""Experiments of papers against values that are known by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moetool.base.config import parse
from moetool.base.errors import UsageError
from moetool.bench.experiment_figure import ExperimentResult, average, draw
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.claims import Claim, Sizes, read_paper
from moetool.bench.paper.experiments import (
    activation_patterns,
    edge_servers,
    expert_affinity,
    expert_parallel,
    map_quality,
    memory,
    offload_or_call,
    policies,
    predictor_cost,
    routing_drift,
    score_ranks,
    substitution,
)
from moetool.bench.paper.experiments import predictor_accuracy as predictors
from moetool.bench.paper.verdict import CannotTestError, Check
from moetool.bench.paper.workbench import MODEL, Workbench
from moetool.costing.machines import read_named_model
from moetool.measuring.alpha import AlphaOptions
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather
from moetool.prompts.gather import Prompt
from moetool.trace.reader import Trace
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace

LAYERS, EXPERTS, TOP_K = 4, 8, 2
LOADS_ALONE = AssumedMachine(load_s=1e-3, expert_s=0.0, expert_token_s=0.0, dense_s=0.0, dense_token_s=0.0)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("routes") / "trace"
    return {"there": write_trace(folder, make_spec(LAYERS, EXPERTS, TOP_K), num_requests=8)}


def _bench(tmp_path: Path, given: dict[str, Path]) -> Workbench:
    return Workbench(sizes=Sizes(), machine=LOADS_ALONE, work=tmp_path, given=given)


def test_time_per_token_is_load_time_if_nothing_else_costs(tmp_path: Path, given: dict[str, Path]) -> None:
    lines = {
        "ACC": policies.PolicyLine(policy="on_demand"),
        "whole layers": policies.PolicyLine(policy="moesys"),
        "what is needed of them": policies.PolicyLine(policy="moesys", synchronous=False),
    }
    options = policies.Options(lines=lines, memory=(1.0,), measure="tpot", machine={"load_s": 3e-3})
    found = policies.run(_bench(tmp_path, given), options)
    assert found.values["ACC"] == [pytest.approx(3 * LAYERS * TOP_K)]  # milliseconds
    assert found.traces == 1  # one trace decides nothing
    assert found.best["ACC"] == [pytest.approx(3 * (LAYERS - 1) * TOP_K)]  # what its pool cannot hold from before
    assert found.best["whole layers"] == [0.0] and set(found.whole_layers) == set(lines) - {"ACC"}
    assert found.values["whole layers"] == [pytest.approx(3 * LAYERS * EXPERTS)]
    assert found.values["what is needed of them"][0] < found.values["whole layers"][0]
    with refused(UsageError, "load_s"):
        policies.run(_bench(tmp_path, given), policies.Options(lines=lines, machine={"lod_s": 1.0}))
    with refused(UsageError, "predict_from"):
        policies.PolicyLine(policy="smoe", options={"look": "resident"})


def test_link_and_host_time_per_token_and_costs_per_line(tmp_path: Path, given: dict[str, Path]) -> None:
    """Without a cache the link carries every expert of a token, and on a link half as fast for twice as long."""
    lines = {
        "fast": policies.PolicyLine(policy="on_demand"),
        "slow": policies.PolicyLine(policy="on_demand", machine={"load_s": 2e-3}),
    }
    options = policies.Options(lines=lines, memory=(1.0,), measure="sides")
    bench = _bench(tmp_path, given)
    found = policies.run(bench, options)
    assert {name: values[0] for name, values in found.values.items()} == pytest.approx(
        {"fast, link": LAYERS * TOP_K, "fast, host": 0.0, "slow, link": 2 * LAYERS * TOP_K, "slow, host": 0.0}
    )
    drawn = replace(options, measure="tpot", along={"fast": 1, "slow": 2}, axis="seconds of a load")
    found = policies.run(bench, drawn)
    ((curve,),) = found.curves.values()
    assert curve == ((1, 2), (pytest.approx(LAYERS * TOP_K), pytest.approx(2 * LAYERS * TOP_K)))
    assert found.axes == ("seconds of a load", "time per output token, ms")
    with refused(UsageError, "slow"):
        policies.run(bench, replace(drawn, along={"slwo": 1}))


def test_a_measure_is_refused_on_traces_without_its_tokens(tmp_path: Path) -> None:
    """Published routes have prompts only, as DeepSeek-V2-Lite's, or new tokens only, as gpt-oss-20b's."""
    spec, lines = make_spec(LAYERS, EXPERTS, TOP_K), {"ACC": policies.PolicyLine(policy="on_demand")}
    shapes = {"ttft": {"new_tokens": 0}, "tpot": {"prompt_tokens": 0}}
    for measure, shape in shapes.items():
        trace = write_trace(tmp_path / measure, spec, num_requests=4, **shape)
        bench = _bench(tmp_path, {"there": trace})
        (value,) = policies.run(bench, policies.Options(lines=lines, measure=measure)).values["ACC"]
        assert value > 0
        (other,) = shapes.keys() - {measure}
        with refused(CannotTestError, "tokens", trace):
            policies.run(bench, policies.Options(lines=lines, measure=other))


def test_memory_sizes_batches_and_named_lines_give_curves(tmp_path: Path, given: dict[str, Path]) -> None:
    lines = {"a, 1 ahead": policies.PolicyLine(policy="lru"), "b, 1 ahead": policies.PolicyLine(policy="lfu")}
    bench = _bench(tmp_path, given)
    options = policies.Options(lines=lines, memory=(0.25, 0.5, 0.75), measure="tpot")
    found = policies.run(bench, options)
    assert [curve[0] for curves in found.curves.values() for curve in curves] == [(25.0, 50.0, 75.0)] * 2
    assert found.curves["a, 1 ahead"][0][1][2] == found.values["a, 1 ahead, 0.75"][0]
    assert found.axes[0] == "experts in memory, %"
    many = policies.run(bench, replace(options, memory=(0.5,), batch=(1, 2, 3)))
    assert many.curves["b, 1 ahead"][0][0] == (1, 2, 3) and many.axes[0] == "requests per batch"
    named = {**lines, "a, 3 ahead": policies.PolicyLine(policy="lru"), "b, 3 ahead": policies.PolicyLine(policy="lfu")}
    along = {name: int(name[3]) for name in named}
    found = policies.run(bench, policies.Options(lines=named, along=along, axis="distance"))
    assert {name: curves[0][0] for name, curves in found.curves.items()} == {"a": (1, 3), "b": (1, 3)}
    assert found.curves["a"][0][1][0] == 100 * found.values["a, 1 ahead"][0]


def test_swept_edge_servers_and_store_capacities_give_curves(tmp_path: Path, given: dict[str, Path]) -> None:
    bench = replace(_bench(tmp_path, given), sizes=Sizes(seeds=1, requests=2))
    options = edge_servers.Options(
        servers={"there": 1},
        memory=1.0,
        modes=("uniform",),
        arrivals="every:1s",
        sweep={"gpus": ("2", "3"), "bandwidth": ("100Mbps", "200Mbps", "300Mbps")},
        simulation={"token_bytes": 8},
    )
    found = edge_servers.run(bench, options)
    assert {name: curves[0][0] for name, curves in found.curves.items()} == dict.fromkeys(
        ("2 GPUs", "3 GPUs"), (100.0, 200.0, 300.0)
    )
    assert found.curves["3 GPUs"][0][1][1] == found.values["3 GPUs, 200Mbps"][0]
    assert found.axes == ("link, Mbit/s", "mean latency per request, s")


def test_stores_of_maps_have_the_bytes_of_the_named_model(tmp_path: Path) -> None:
    """Of the paper's three models, Qwen1.5-MoE's maps are the largest, though its embeddings are the smallest."""
    options = map_quality.Options(capacities=(1024, 32768), measure="bytes", model="qwen1.5-moe-a2.7b")
    found = map_quality.run(_bench(tmp_path, {}), options)
    numbers = 24 * 60 + 24 + 1  # a map, its squared norm up to numbers layer, and the next iteration
    assert found.exact and found.values["32768 maps"] == [pytest.approx(32768 * numbers * 4 / 1e6)]
    assert found.values["32768 maps with embeddings"] == [pytest.approx(32768 * (numbers + 2048) * 4 / 1e6)]
    assert found.curves["maps"][0] == ((1024, 32768), (found.values["1024 maps"][0], found.values["32768 maps"][0]))
    largest = {}
    for model in ("mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b"):
        (largest[model],) = map_quality.run(_bench(tmp_path, {}), replace(options, model=model)).values["32768 maps"]
    assert max(largest, key=largest.__getitem__) == "qwen1.5-moe-a2.7b"


def test_affinity_experiment_needs_two_layers(tmp_path: Path, given: dict[str, Path]) -> None:
    found = expert_affinity.run(_bench(tmp_path, given), expert_affinity.Options())
    assert found.values["by chance"] == [TOP_K / EXPERTS]
    assert {len(curves[0][0]) for curves in found.curves.values()} == {LAYERS - 1}
    alone = Trace(write_trace(tmp_path / "alone", make_spec(1, EXPERTS, TOP_K), num_requests=4))
    with refused(CannotTestError, 1, 4):
        expert_affinity.run(_bench(tmp_path, {"alone": alone.path}), expert_affinity.Options())


def test_predictor_cost_at_a_shape(tmp_path: Path) -> None:
    options = predictor_cost.Options(predictor="affinity", model="mixtral-8x7b", measure="bytes")
    bench = replace(_bench(tmp_path, {}), sizes=Sizes(rounds=2))
    counted = predictor_cost.run(bench, options)
    assert counted.exact
    assert counted.values == {"affinity": [pytest.approx(31 * 8 * 8 * 4 / 1e6, rel=0.5)]}  # 31 pairs of layers
    timed = predictor_cost.run(bench, replace(options, measure="time"))
    assert len(timed.values["affinity"]) == 2 and min(timed.values["affinity"]) > 0


def test_predictors_train_on_other_parts_than_the_measured_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: dict[str, list[str]] = {}

    def capture(model: str, prompts: Sequence[Prompt], out: Path, options: object) -> SimpleNamespace:
        captured[out.name.rpartition("-")[0]] = sorted(prompt.prompt_id for prompt in prompts)
        write_trace(out, make_spec(LAYERS, EXPERTS, TOP_K), num_requests=len(prompts), seed=len(captured))
        return SimpleNamespace(out=out)

    monkeypatch.setattr("moetool.bench.paper.workbench.capture", capture)
    bench = Workbench(sizes=Sizes(seeds=3, prompts=2), machine=LOADS_ALONE, work=tmp_path)
    options = predictors.Options(
        data=("arithmetic",), lines={"affinity": predictors.PredictorLine(predictor="affinity")}
    )
    found = predictors.run(bench, options)
    assert len(found.values["affinity"]) == 3
    assert "6 requests" in found.on
    parts = [captured[f"trace-arithmetic-24-1-{part}-0"] for part in ("0", "1", "2")]
    assert len({prompt for part in parts for prompt in part}) == 6
    assert captured["trace-arithmetic-24-1-0.2-0"] == sorted(parts[0] + parts[2])
    learned, part = bench.others(("arithmetic",), 1), bench.trace(("arithmetic",), fold=1)
    assert learned is not None and len(learned.requests) == 4
    line = policies.PolicyLine(policy="lru")
    assert len(policies.measure(bench, part, line, 0.5, 1, 1, learned=learned).request_s) == 2
    compared = policies.run(bench, policies.Options(data=("arithmetic",), apart=True, lines={"LRU": line}))
    assert "all measured" in compared.on
    given = replace(bench, given={"one": part.path, "other": learned.path})
    assert given.others(("arithmetic",), 1) is None
    alone = replace(bench, sizes=Sizes(seeds=1, prompts=2))
    assert alone.others(("arithmetic",), 0) is None


def test_routing_drift_exceeds_chance_only_if_batches_differ(tmp_path: Path, given: dict[str, Path]) -> None:
    shares_BLE = np.array([[[0.5, 0.5, 0.0]], [[0.0, 0.5, 0.5]], [[0.0, 0.5, 0.5]]])
    assert routing_drift.changed(shares_BLE) == 0.25  # a half of the calls, then none
    found = routing_drift.run(_bench(tmp_path, given), routing_drift.Options(batch=2))
    assert set(found.values) == {"batch to batch", "by chance"} and found.traces == 1
    assert all(0 < value < 1 for values in found.values.values() for value in values)
    assert [len(curve[0][0]) for curve in found.curves.values()] == [4, 4, 4]
    with refused(CannotTestError, 1):
        routing_drift.run(_bench(tmp_path, given), routing_drift.Options(batch=8))


def test_scores_and_reuse_by_rank(tmp_path: Path) -> None:
    spec = make_spec(LAYERS, EXPERTS, TOP_K)
    trace = Trace(write_trace(tmp_path / "scored", spec, num_requests=4, keep=("topk", "logits")))
    share_E = score_ranks.by_rank(trace, score_ranks.Options())
    assert share_E[0] == 1 and (np.diff(share_E) <= 0).all() and len(share_E) == EXPERTS
    # Over all ranks, as many experts are used again as the router chooses within one iteration.
    assert score_ranks.by_rank(trace, score_ranks.Options(measure="reuse", within=1)).sum() == pytest.approx(TOP_K)
    found = score_ranks.run(_bench(tmp_path, {"there": trace.path}), score_ranks.Options(measure="reuse", within=1))
    assert set(found.values) == {"highest active", "lowest active", "highest inactive", "lowest"} and found.traces == 1
    with refused(CannotTestError, 99):
        score_ranks.by_rank(trace, score_ranks.Options(measure="reuse", within=99))


def test_migration_and_planning_cost_as_on_the_named_machine(tmp_path: Path, given: dict[str, Path]) -> None:
    bench = Workbench(sizes=Sizes(seeds=2), machine=LOADS_ALONE, work=tmp_path, given=given)
    runs = {
        "stop": expert_parallel.ModeRun(mode="director-proactive", migrate="stop"),
        "free": expert_parallel.ModeRun(mode="director-proactive", migrate="free"),
        "planned": expert_parallel.ModeRun(mode="director-proactive", migrate="free", planning="wait"),
    }
    common: dict[str, Any] = {"data": (), "model": "deepseek-v2-lite", "gpus": (4,), "runs": runs}
    common |= {"seats": 1, "batches": 4, "new_tokens": 2}
    found = expert_parallel.run(bench, expert_parallel.Options(**common, machine="h200-node", plan_s=(0.5, 1.0)))
    free, stop, planned = (found.values[f"{name}, 500 ms"][0] for name in ("free", "stop", "planned"))
    assert free < stop < planned and planned == pytest.approx(500 + free, rel=1e-3)
    assert found.values["planned, 1000 ms"][0] == pytest.approx(1000 + free, rel=1e-3)
    assert [x for x, _ in found.curves["planned"]] == [(500.0, 1000.0)] * 2
    assert "DeepSeek-V2-Lite on 8 x H200" in found.on and found.experts == (EXPERTS, TOP_K)
    grouped, apart = (
        expert_parallel.run(bench, expert_parallel.Options(**common, machine="h200-node", grouped=once)).values["free"]
        for once in (True, False)
    )
    assert all(a < b for a, b in zip(grouped, apart, strict=True))
    with refused(UsageError, "no link"):
        expert_parallel.run(bench, expert_parallel.Options(**common, machine="rtx-3080"))
    with refused(CannotTestError, 256):
        expert_parallel.run(bench, expert_parallel.Options(**{**common, "new_tokens": 256}, machine="h200-node"))


def test_the_headline_is_a_table_over_compositions_and_gpus(tmp_path: Path, given: dict[str, Path]) -> None:
    """Its cells have the values that they have alone, and every cell has a bound and a printed size."""
    (claim,) = (one for one in read_paper("director").claim if one.id == "Abstract")
    small = {**claim.options, "data": (), "seats": 1, "batches": 2, "new_tokens": 1}

    def run(options: dict[str, Any]) -> dict[str, list[float]]:
        bench = Workbench(sizes=Sizes(seeds=2), machine=LOADS_ALONE, work=tmp_path, given=given)
        return expert_parallel.run(bench, parse(expert_parallel.Options, options, "a test")).values

    found = run(small)
    cells = [f"{tasks}, {gpus} GPUs" for tasks in ("mixed", "one task", "drift") for gpus in (8, 16, 32)]
    assert list(found) == [f"{mode}, {cell}" for cell in cells for mode in ("offline", "director")]
    assert list(claim.derive) == list(claim.size) == list(claim.check.at_least) == list(claim.check.at_most) == cells
    for cell in cells:
        assert claim.derive[cell] == {"less": (f"offline, {cell}", f"director, {cell}")}
    alone = run({**small, "compositions": ["one task"], "gpus": [16]})
    assert alone == {mode: found[f"{mode}, one task, 16 GPUs"] for mode in ("offline", "director")}


def test_a_replica_of_the_model_predicts_queued_requests(tmp_path: Path, given: dict[str, Path]) -> None:
    runs = {
        name: expert_parallel.ModeRun(mode="director-proactive", migrate="free", predictor=predictor)
        for name, predictor in (("replica", "awq_replica"), ("oracle", ""))
    }
    common: dict[str, Any] = {"machine": "h200-node", "model": "deepseek-v2-lite", "gpus": (2,), "runs": runs}
    common |= {"seats": 1, "batches": 3, "new_tokens": 1}
    sizes = Sizes(seeds=2, prompts=4)
    found = expert_parallel.run(
        Workbench(sizes=sizes, machine=LOADS_ALONE, work=tmp_path),
        expert_parallel.Options(data=("arithmetic",), **common),
    )
    assert found.values["replica"] == pytest.approx(found.values["oracle"], rel=0.05)
    with refused(CannotTestError, "a replica needs the model"):
        expert_parallel.run(
            Workbench(sizes=sizes, machine=LOADS_ALONE, work=tmp_path, given=given),
            expert_parallel.Options(data=(), **common),
        )


def test_a_text_without_substitution_loses_as_in_the_plain_model(tmp_path: Path, given: dict[str, Path]) -> None:
    sizes = Sizes(seeds=2, texts=1)
    options = substitution.Options(data=("code",))
    found = substitution.run(Workbench(sizes=sizes, machine=LOADS_ALONE, work=tmp_path), options)
    assert list(found.values) == ["alpha 0", "alpha 0.35", "alpha 0.6"] and found.traces == 2
    for seed, nats in enumerate(found.values["alpha 0"]):
        assert nats == pytest.approx(_plain_nats(seed), rel=1e-4)
    with refused(CannotTestError, "texts"):
        substitution.run(_bench(tmp_path, given), options)


def _plain_nats(seed: int) -> float:
    """Cross-entropy of the first text of a seed by transformers, without its first tokens."""
    prompts = list(gather.load(["code"]))[seed::2]
    with Checkpoint.open(MODEL) as checkpoint:
        texts = [checkpoint.tokenizer(f"{p.text} {p.answer or ''}")["input_ids"] for p in prompts]
        model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    ids_1T = torch.tensor([next(ids[:48] for ids in texts if len(ids) >= 48)])
    known = AlphaOptions().known
    with torch.inference_mode():
        logits_TV = model(ids_1T).logits[0, known:-1]
    return float(torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, known + 1 :]))


@pytest.mark.parametrize("composition", ["mixed", "one task", "drift"])
def test_batches_are_drawn_from_their_tasks(tmp_path: Path, composition: Any) -> None:
    """Prompts of the first task have other lengths than the second's; nothing is served that placements are made of."""
    spec = make_spec(LAYERS, EXPERTS, TOP_K)
    given = {name: write_trace(tmp_path / name, spec, num_requests=8, seed=n) for n, name in enumerate(("a", "b"))}
    bench = Workbench(sizes=Sizes(seeds=2), machine=LOADS_ALONE, work=tmp_path, given=given)
    options = expert_parallel.Options(
        data=(),
        machine="h200-node",
        model="deepseek-v2-lite",
        runs={},
        batches=5,
        new_tokens=2,
    )
    tasks = expert_parallel.tasks_of(bench, options, 0)
    routes = [{id(route) for route in mine} for mine in tasks.served]
    assert [len(mine) for mine in routes] == [4, 4] and len(tasks.history) == 8
    queue = expert_parallel.draw_queue(tasks.served, options, composition, 2, seed=0)
    of_b = [np.mean([id(route) in routes[1] for route in queue[8 * n : 8 * n + 8]]) for n in range(5)]
    assert len(queue) == 40
    if composition == "one task":
        assert sorted(set(of_b)) == [0, 1] and all(a != b for a, b in pairwise(of_b))
    elif composition == "drift":
        assert (of_b[0], of_b[-1]) == (0, 1) and 0 < of_b[2] < 1
    else:
        assert 0.2 < np.mean(of_b) < 0.8


def test_memory_of_a_named_model(tmp_path: Path) -> None:
    """In experts: 256 in all and dense weights of ten; two or two layers of eight beside the dense weights."""
    dense = 10 * read_named_model("mixtral-8x7b").expert_bytes
    lines = {"ACC": policies.PolicyLine(policy="on_demand"), "MoESys": policies.PolicyLine(policy="moesys")}
    found = memory.run(_bench(tmp_path, {}), memory.Options(lines=lines, model="mixtral-8x7b", dense_bytes=dense))
    assert found.values == {memory.WHOLE: [1.0], "ACC": [12 / 266], "MoESys": [26 / 266]}


def test_warm_up_requests_are_not_counted(tmp_path: Path, given: dict[str, Path]) -> None:
    """All experts fit: once they are loaded a request takes its computing alone, and before that its loads too."""
    machine = AssumedMachine(load_s=1.0, expert_s=0.0, expert_token_s=0.0, dense_s=1e-3, dense_token_s=0.0)
    bench = replace(_bench(tmp_path, given), machine=machine, sizes=Sizes(seeds=1, requests=4))
    options = offload_or_call.Options(servers={"there": 1}, memory=1.0, simulation={"token_bytes": 8})
    warm, cold = (offload_or_call.run(bench, replace(options, warm=count)).values for count in (4, 0))
    assert warm[offload_or_call.ALONE][0] < 0.1 < cold[offload_or_call.ALONE][0]
    with refused(CannotTestError, 8):
        offload_or_call.run(bench, replace(options, warm=8))


def test_phases_need_a_run_longer_than_the_first_decision(tmp_path: Path, given: dict[str, Path]) -> None:
    bench = replace(_bench(tmp_path, given), sizes=Sizes(seeds=1, requests=6))
    options = edge_servers.Options(
        servers={"there": 1},
        memory=1.0,
        modes=("prism",),
        arrivals="every:1s",
        measure="phases",
        simulation={"token_bytes": 8, "replan_s": 3.0, "window_s": 1.0},
    )
    found = edge_servers.run(bench, options)
    assert found.values == {"prism, before": [1.0], "prism, after": [1.0]}
    assert "Eq. 4 asked 1 to 1 times a run" in found.on
    late = replace(options, simulation={**options.simulation, "replan_s": 60.0})
    with refused(CannotTestError, "60 s"):
        edge_servers.run(bench, late)


def test_divergence_within_a_task_is_that_of_chance(tmp_path: Path, given: dict[str, Path]) -> None:
    bench = replace(_bench(tmp_path, dict.fromkeys("ab", given["there"])), sizes=Sizes(seeds=2))
    found = activation_patterns.run(bench, activation_patterns.Options())
    assert found.values["same task"] == pytest.approx(found.values["other task"])
    assert sum(found.curves["a"][0][1]) == pytest.approx(100)
    ginis = activation_patterns.run(bench, activation_patterns.Options(measure="layers"))
    assert list(ginis.values) == [f"layer {layer}" for layer in range(LAYERS)]
    assert all(0 < value < 1 for values in ginis.values.values() for value in values)
    with refused(CannotTestError, 8, 10):
        activation_patterns.run(replace(bench, sizes=Sizes(seeds=5)), activation_patterns.Options())


def test_curves_are_averaged_at_common_points() -> None:
    x, means, halves = average([((1.0, 2.0, 2.5), (1.0, 5.0, 9.0)), ((1.0, 2.0, 3.0), (3.0, 5.0, 9.0))])
    assert (x, means) == ([1.0, 2.0], [2.0, 5.0])
    assert halves == [pytest.approx(12.7062, rel=1e-5), 0.0]  # Student's t of two values that are 2 apart
    assert average([((1.0, 4.0), (2.0, 3.0))]) == ([1.0, 4.0], [2.0, 3.0], None)
    assert average([((1.0,), (2.0,)), ((3.0,), (4.0,))]) == ([1.0], [2.0], None)


def test_figures_have_labels_and_points_for_uneven_values(tmp_path: Path) -> None:
    claim = Claim(id="Figure 1", says="-", printed="-", experiment="policies", check=Check(lowest="few"))
    for far, scale in ((2.0, "linear"), (900.0, "log")):
        found = ExperimentResult(
            values={"few": [1.0, 1.2], "many": [far, far]}, what="time to first token", unit="ms", on="a model"
        )
        draw(tmp_path / f"{scale}.svg", claim.id, found)
        text = (tmp_path / f"{scale}.svg").read_text()
        assert "time to first token, ms" in text and "95 % interval of 2 runs" in text
