"""`moetool bench serve`: the model uses the experts of the trace, and the counts are those of replay."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import GateEvent
from moetool.bench import serve, serving_setup
from moetool.bench.forced_routes import CutPredictor, ForcedRoutes, ReplayedRequest, bench_spec, choose, write_part
from moetool.bench.random_checkpoint import random_checkpoint
from moetool.bench.serve import bench_serve
from moetool.bench.serving_results import RESIDENT, tables
from moetool.bench.serving_runs import Workload, run_engine
from moetool.bench.serving_setup import BenchModel, ServingBenchOptions
from moetool.caching.policies import lru
from moetool.caching.policy import build_policy
from moetool.cli import main as cli
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from moetool.models.router_hooks import watch
from moetool.runtime.loop.own_caches import OwnCaches
from moetool.runtime.request import SamplingParams
from moetool.trace.reader import Trace
from moetool.training.training import train
from moetool.tuning.replay import ReplaySetup, replay
from tests import families
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace
from tests.tiny_shape import EXPERT_BYTES, write_shape

SPEC = make_spec(num_layers=6)  # two layers more than the shape has
OPTIONS = ServingBenchOptions(rounds=1, requests=3, new_tokens=6, threads=1)
POLICIES = ["on_demand", "lru", "lfu", "static_split", "duoserve", "moe_infinity", "layerwise", "moesys"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape, routes for it, and a predictor trained on some of them."""
    folder = tmp_path_factory.mktemp("bench")
    write_shape(folder / "tiny")
    write_trace(folder / "routes", SPEC)
    train("affinity", folder / "routes", folder / "affinity")
    return folder


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kilobytes are read so often for one reading of the disk's rate that the tests would do little else."""
    monkeypatch.setattr(serve, "THREADS", (2,))
    monkeypatch.setattr(serve, "READINGS", 2)


@pytest.fixture
def subject(folder: Path) -> BenchModel:
    return BenchModel(shape=str(folder / "tiny"), layers=4, routes=folder / "routes", work=folder / "work")


def test_the_model_uses_the_experts_and_weights_of_the_trace(folder: Path) -> None:
    trace = Trace(folder / "routes")
    path = random_checkpoint(str(folder / "tiny"), 4, folder / "work")
    loaded, full = load_lazy(Checkpoint.open(path), torch.float32), load_full(Checkpoint.open(path), torch.float32)
    chosen = [
        ReplayedRequest(request=7, prompt_tokens=5, tokens=10),
        ReplayedRequest(request=2, prompt_tokens=9, tokens=14),
    ]
    part = write_part(trace, bench_spec(loaded.spec, trace), chosen, folder / "work")
    forced = ForcedRoutes(loaded.layers, part)
    forced.attach(full.layers)
    seen: dict[int, list[Any]] = {layer.index: [] for layer in loaded.layers}
    for layer in loaded.layers:
        watch(layer, lambda index, weights, i=layer.index: seen[i].append((index.clone(), weights.clone())))
    events: list[GateEvent] = []

    class Listening(lru.Policy):
        def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Any:
            events.append(event)
            return super().gate(event, hits, misses)

    workload = Workload(prompts=((3, 4, 5, 6, 7), tuple(range(10, 19))), new_tokens=6)
    run_engine(loaded, Listening(loaded.spec, lru.Options(), 5), workload, io_threads=1, forced=forced)
    expected = np.concatenate([batch.experts_TS for batch in trace.batches()])
    request = np.concatenate([batch.request_T for batch in trace.batches()])
    weights = np.concatenate([batch.weights_TS for batch in trace.batches(["weights"])])
    for layer, pairs in seen.items():
        for column, recorded in ((0, expected), (1, weights)):
            used = torch.cat([pair[column] for pair in pairs]).numpy()
            rows = np.concatenate([recorded[request == 7][:10], recorded[request == 2][:14]])
            assert np.array_equal(used, rows[:, 2 * layer : 2 * layer + 2]), (layer, column)
    assert [e.experts_TK for e in events] == [e.experts_TK for _, es in part.forwards(sequential=True) for e in es]
    assert [len(e.experts_TK) for e in events[::4]] == [5, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1]

    logits: list[torch.Tensor] = []
    hooks = [m.lm_head.register_forward_hook(lambda *a: logits.append(a[2][0, -1])) for m in (loaded.model, full.model)]
    run_engine(loaded, build_policy("lru", loaded.spec, {}, 3), workload, io_threads=1, forced=forced)
    _run_plain(full.model, workload, forced)
    for hook in hooks:
        hook.remove()
    assert len(logits) == 24
    torch.testing.assert_close(torch.stack(logits[:12]), torch.stack(logits[12:]), rtol=1e-4, atol=1e-5)
    forced.close()
    loaded.close()


def _run_plain(model: Any, workload: Workload, forced: ForcedRoutes) -> None:
    """Run the requests in plain transformers on the same routes."""
    batcher = OwnCaches(model, kv_tokens=workload.kv_tokens)
    batcher.on_forward = lambda batch: forced.begin_forward(batch.info)
    for number, prompt in enumerate(workload.prompts):
        batcher.add(number, list(prompt), SamplingParams(max_tokens=workload.new_tokens, ignore_eos=True))
        forced.follow(number, number)
        while not batcher.idle:
            batcher.step()
    batcher.close()


def test_counts_equal_replays_for_every_policy(folder: Path, subject: BenchModel) -> None:
    subject = BenchModel(
        shape=subject.shape, layers=4, routes=subject.routes, predictor=folder / "affinity", work=subject.work
    )
    made = bench_serve(
        subject, policies=POLICIES, budgets=["25%", "75%"], options=OPTIONS, policy_options={"lfu": {"forget": True}}
    )
    assert made.facts["experts_bytes"] == 4 * 8 * EXPERT_BYTES
    assert made.rows[0]["policy"] == RESIDENT and made.rows[0]["hit_rate"] == 1.0
    assert made.rows[0]["bytes_per_token"] == 0
    served = made.rows[1:]
    assert {row["policy"] for row in served} == set(POLICIES)
    assert all(row["as_replayed"] for row in served)
    assert made.notes == [
        "on_demand uses 2 slots with 73.7 kB too: measured once",
        "duoserve uses 2 slots with 73.7 kB too: measured once",
        "moesys needs 16 slots: left out with 24.6 kB",
    ]

    part = Trace(Path(made.facts["routes"]))
    trace = Trace(folder / "routes")
    card = json.loads((folder / "affinity" / "card.json").read_text())
    taken = choose(trace, requests=3, new_tokens=6, prompt_share=None, predictor=_Card(card))
    assert {one.request for one in taken} <= set(card["requests"]["test"])
    assert part.requests["prompt_id"].to_pylist() == [str(one.request) for one in taken]
    assert part.requests["tokens"].to_pylist() == [17] * 3
    from moetool.training.predictor import load_predictor

    predictor = CutPredictor(load_predictor(folder / "affinity"), part.spec)
    budgets = [made.facts["experts_bytes"] // 4, made.facts["experts_bytes"] * 3 // 4]
    options = {"lfu": {"forget": True}}
    fitting = [name for name in POLICIES if name != "moesys"]
    rows = replay(part, fitting, budgets, ReplaySetup(predictor=predictor, options=options, pool_unit="slots"))
    rows += replay(part, ["moesys"], budgets[1:], ReplaySetup(pool_unit="slots"))
    by_name = {(row.policy, row.budget_bytes): row for row in rows}
    for line in served:
        row = by_name[line["policy"], line["budget_bytes"]]
        assert line["hit_rate"] == row.decode.hit_rate
        assert line["rounds"][0]["decode_counts"] == row.decode.to_json()


class _Card:
    def __init__(self, card: dict[str, Any]) -> None:
        self.card = card


def test_other_routes_than_the_traces_are_detected(subject: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(ForcedRoutes):
        def begin_forward(self, info: Any) -> None:
            super().begin_forward(info)
            self._rows_T = self._rows_T // 2

    monkeypatch.setattr(serving_setup, "ForcedRoutes", Shifted)
    made = bench_serve(subject, policies=["lru"], budgets=["25%"], options=OPTIONS)
    assert made.rows[1]["as_replayed"] is False
    assert "lru with 8 slots: the counts differ from replay" in [*tables(made)]


def test_routes_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    for name, spec in (
        ("few", make_spec(num_layers=3)),
        ("wide", make_spec(num_experts=16)),
        ("top", make_spec(4, 8, 3)),
    ):
        routes = write_trace(tmp_path / name, spec, num_requests=3)
        subject = BenchModel(shape=str(folder / "tiny"), routes=routes, work=folder / "work")
        with refused(MismatchError, "routes", "shape"):
            bench_serve(subject, policies=["lru"], budgets=["25%"], options=OPTIONS)


@pytest.mark.follows("moetool.bench.serve _require_memory")
def test_a_pool_that_does_not_fit_is_refused(subject: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "memory_bytes", lambda: (2**30, 20 * EXPERT_BYTES))
    few = partial(bench_serve, subject, policies=["lru"], budgets=["25%"])
    with refused(CapacityError, "smaller budgets", "--set bench.resident=false"):
        few(options=OPTIONS)
    assert {row["policy"] for row in few(options=replace(OPTIONS, resident=False)).rows} == {"lru"}


@pytest.mark.follows("moetool.bench.forced_routes ForcedRoutes.attach")
def test_routers_without_a_choice_to_replace_are_refused(folder: Path, tmp_path: Path, reference: Path) -> None:
    families.save("jetmoe", tmp_path / "m", vocab_size=4096, max_position_embeddings=512)
    for file in reference.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "m")
    with Checkpoint.open(tmp_path / "m") as opened, refused(UsageError, "a MODEL with --data"):
        ForcedRoutes(load_full(opened, torch.float32).layers, Trace(folder / "routes"))
    subject = BenchModel(model=str(tmp_path / "m"), data=("arithmetic",))
    assert bench_serve(subject, policies=["lru"], budgets=["50%"], options=OPTIONS).rows


def test_policies_that_fit_no_budget_are_refused(subject: BenchModel) -> None:
    options = ServingBenchOptions(rounds=1, requests=3, new_tokens=6, threads=1, resident=False)
    with refused(CapacityError, "moesys", "16"):
        bench_serve(subject, policies=["moesys"], budgets=["25%"], options=options)


def test_requests_must_be_long_enough(subject: BenchModel) -> None:
    options = ServingBenchOptions(requests=3, new_tokens=20)
    with refused(UsageError, "requests", "enough", "0", "3"):
        bench_serve(subject, policies=["lru"], budgets=["25%"], options=options)


def test_policies_that_need_scores_are_refused_on_random_weights(
    subject: BenchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lru.Policy, "needs", frozenset({"experts", "logits"}))
    with refused(UsageError, "lru", "logits"):
        bench_serve(subject, policies=["lru"], budgets=["25%"], options=OPTIONS)


def _main(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["moetool", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_prints_a_table_and_writes_the_raw_values(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work, out = tmp_path / "work", tmp_path / "results.json"
    common = ["--shape", folder / "tiny", "--layers", 2, "--routes", folder / "routes", "--work", work]
    settings = [f"--set=bench.{s}" for s in ("rounds=2", "requests=2", "new_tokens=4", "threads=1")]
    code = _main(
        monkeypatch, *["bench", "serve", *common, "--policy", "lru,on_demand", "--budget", "25%,50%"],
        *settings, "--out", out,
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    made = json.loads(out.read_text())
    assert [row["policy"] for row in made["rows"]][:4] == [RESIDENT, "lru", "lru", "on_demand"]
    assert all(len(row["rounds"]) == 2 for row in made["rows"])
    assert len(made["rows"][1]["rounds"][0]["decode"]["seconds"]) == 2 * 3
    assert made["command"].startswith("moetool bench serve --shape")
    assert made["facts"]["dtype"] == "bfloat16" and made["facts"]["threads"] == 1
    for words in (
        "all in memory",
        "x bound",
        "GB/s",
        "on_demand uses 2 slots",
        "2 rounds\n",
        made["command"],
    ):
        assert words in printed.out
    assert (
        _main(monkeypatch, *["bench", "serve", *common, "--policy", "lru", "--budget", "50%", "--json"], *settings) == 0
    )
    assert json.loads(capsys.readouterr().out)["options"]["rounds"] == 2


def test_a_checkpoint_uses_its_own_routing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"--set=bench.{s}" for s in ("rounds=1", "requests=2", "new_tokens=3")]
    args = ["bench", "serve", "reference", "--data", "chat,code", "--policy", "lru", "--budget", "50%", "--json"]
    assert _main(monkeypatch, *args, *settings) == 0
    made = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in made["rows"]] == [RESIDENT, "lru"]
    assert made["facts"]["routes"] is None and made["rows"][1]["as_replayed"] is None
    assert 0 < made["rows"][1]["hit_rate"] < 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--policy lru --budget 25%", "a MODEL or a --shape"),
        ("reference --shape deepseek-v2-lite --policy lru --budget 25%", "a MODEL or a --shape"),
        ("reference --policy lru --budget 25%", "--routes DIR, or --data"),
        ("reference --layers 2 --data chat --policy lru --budget 25%", "--layers works with --shape only"),
        ("--shape deepseek-v2-lite --policy lru --budget 25%", "give --routes DIR"),
        ("reference --data chat --policy belady --budget 25%", "needs future requests"),
        ("reference --data chat --policy duoserve --budget 25%", "needs a predictor"),
        ("reference --data chat --policy lru --budget 25% --set bench.rounds=0", "bench.rounds is 0"),
        ("reference --data chat --policy lru --budget 25% --set bench.runds=1", "did you mean 'rounds'"),
        ("reference --data chat --policy lru --budget 25% --set lfu.forget=true", "fits none of lru"),
    ],
)
def test_refusals(args: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(monkeypatch, "bench", "serve", *args.split()) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_chunked_prompts_are_timed_as_a_whole_and_read_more(subject: BenchModel) -> None:
    made = {}
    for chunk in (None, 4):
        options = replace(OPTIONS, prefill_chunk=chunk, resident=False)
        (made[chunk],) = bench_serve(subject, policies=["lru"], budgets=["25%"], options=options).rows
    whole, parts = made[None], made[4]
    assert whole["as_replayed"] and not parts["as_replayed"]  # the trace has each prompt as one forward
    for row in (whole, parts):
        assert all(
            len(run["prefill"]["seconds"]) == 3 and len(run["decode"]["seconds"]) == 3 * 5 for run in row["rounds"]
        )
    assert parts["prompt_bytes"] > whole["prompt_bytes"]


def test_pools_per_layer_count_as_in_replay(subject: BenchModel) -> None:
    options = replace(OPTIONS, pool="layer", resident=False)
    own = bench_serve(subject, policies=["lru", "lfu"], budgets=["50%"], options=options).rows
    one = bench_serve(subject, policies=["lru", "lfu"], budgets=["50%"], options=replace(options, pool="one")).rows
    assert all(row["as_replayed"] for row in (*own, *one))
    assert [row["hit_rate"] for row in own] != [row["hit_rate"] for row in one]
    with refused(UsageError, "pool"):
        ServingBenchOptions(pool="floor")
