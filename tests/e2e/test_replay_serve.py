"""`replay` takes the decisions that `serve` took, on the gate stream that serve logged."""

import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import MismatchError, UsageError
from moetool.caching.layer_slots import equal_slots
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.kv import ledger
from moetool.runtime.loop.engine import Engine
from moetool.runtime.memory_share import MemoryShare
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import Trace
from moetool.training.predictor import build
from moetool.training.tokens import Tokens
from moetool.tuning.replay import SERVED, ReplaySetup, replay, replay_served
from tests.command_line import exit_code
from tests.engines import engine, require_replayed
from tests.live_page import missing_fields
from tests.refusals import refused

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 =", "User: hello"]


def _answer_all(made: Engine, tokenizer: Any, least: int, more: int) -> None:
    """Answer `PROMPTS`, each begun a step after the one before: the first with `least` tokens, the next with `more`."""
    for i, prompt in enumerate(PROMPTS):
        made.submit(tokenizer(prompt)["input_ids"], SamplingParams(max_tokens=least + more * i), lambda output: None)
        made.step()
    while not made.idle:
        made.step()


class _Torn:
    """A grammar that raises after a token, or (`tokens` 0) as it starts."""

    error, may_end = "", False

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def start(self) -> "_Torn":
        if not self._left:
            raise RuntimeError("the grammar is torn")
        return self

    def allowed(self) -> bytearray:
        return bytearray(b"\1" * 100_000)

    def accept(self, token: int) -> None:
        self._left -= 1
        if not self._left:
            raise RuntimeError("the grammar is torn")


@pytest.mark.parametrize(("tokens", "together"), [(0, True), (3, True), (3, False)])
def test_a_grammar_that_raises_leaves_the_forward_in_the_log(
    tokens: int, together: bool, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Its tokens were forwarded, and others go on from them."""
    made = engine(reference, tokenizer, "lru", 60, log=tmp_path / "log")
    answers: dict[int, list[Output]] = {}
    grammar: Any = _Torn(tokens)

    def sink(output: Output) -> None:
        answers.setdefault(output.request, []).append(output)

    torn = made.submit([8, 9, 10], SamplingParams(max_tokens=10, ignore_eos=True, grammar=grammar), sink)
    other = made.submit([5, 6, 7], SamplingParams(max_tokens=10, ignore_eos=True), sink) if together else None
    while not made.idle:
        made.step()
    assert answers[torn][-1] == Output(torn, None, finish="error", error="the grammar is torn")
    assert len(answers[torn]) == max(1, tokens) and made.metrics()["failures"] == 0
    trace, _ = require_replayed(made, tmp_path / "log", "lru")
    assert trace.manifest["provenance"]["failed_forwards"] == 0
    forwarded = (3 + tokens - 1 if tokens else 0) + (3 + 9 if together else 0)
    assert trace.num_tokens == forwarded and (other is None or len(answers[other]) == 10)


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        ("on_demand", 8),
        ("lru", 40),
        ("lru", 3),
        ("lfu", 90),
        ("duoserve", 8),
        ("layerwise", 40),
        ("moesys", 64),
        ("moe_infinity", 60),
        ("static_split", 70),
        ("finemoe", 60),
        ("finemoe", 4),
        ("hybrimoe", 3),
        ("hybrimoe", 60),
        ("foresight", 60),
        ("foresight", 5),
        ("mixtral_offloading", 60),
        ("mixtral_offloading", 6),
        ("promoe", 60),
    ],
)
def test_replay_decides_as_serve_did(
    policy: str, slots: int, reference: Path, tokenizer: Any, predictor: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    made = engine(reference, tokenizer, policy, slots, predictor=predictor, log=log)
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ended: list[int] = []
    requests = []
    for i, prompt in enumerate(ids):  # requests come and go while others run
        params = SamplingParams(max_tokens=4 + 2 * i, temperature=0.7, seed=i)
        requests.append(made.submit(prompt, params, lambda o: ended.append(o.request) if o.finish else None))
        for _ in range(3):
            made.step()
    made.cancel(requests[3])
    while not made.idle:
        made.step()
    trace, row = require_replayed(made, log, policy, slots, ReplaySetup(predictor=predictor))
    if policy == "layerwise":
        assert made.store.stats.reads == row.counts.loads  # nothing of a whole layer is spared, needed or not
    assert trace.manifest["composition"] == {"kind": "log"}
    assert row.slots == made.store.num_slots
    assert row.counts.needed > 500


@pytest.mark.parametrize("lag", [0, 2])
def test_replay_decides_as_serve_did_with_predictions_on_a_thread(
    lag: int, reference: Path, tokenizer: Any, predictor: Any, tmp_path: Path
) -> None:
    options = {"lag": lag, "slots_per_layer": 7}
    made = engine(reference, tokenizer, "duoserve", 60, predictor=predictor, log=tmp_path / "log", options=options)
    _answer_all(made, tokenizer, 3, 2)
    setup = ReplaySetup(predictor=predictor, options={"duoserve": options})
    assert require_replayed(made, tmp_path / "log", "duoserve", setup=setup)[1].counts.prefetched


@pytest.mark.parametrize("policy", ["foresight", "moe_infinity"])
def test_replay_decides_as_serve_did_where_a_request_is_cancelled_while_others_are_forwarded(
    policy: str, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Its last row does not say when it ended: a forward without it came between."""
    made = engine(reference, tokenizer, policy, 60, log=tmp_path / "log")
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first = made.submit(ids[0], params, lambda output: None)
    for _ in range(9):
        made.step()
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(made.prompt_logprobs, ids[1], 0)
        while not made.num_pending:
            time.sleep(0.001)
        made.cancel(first)
        made.step()
        assert len(scored.result()) == len(ids[1])
    for prompt in ids[2:4]:
        made.submit(prompt, params, lambda output: None)
    while not made.idle:
        made.step()
    trace, _ = require_replayed(made, tmp_path / "log", policy)
    assert [request for _, request in trace.manifest["provenance"]["ends"]] == [first]


@pytest.mark.parametrize("policy", ["lfru", "foresight"])
def test_replay_decides_as_serve_did_with_slots_for_each_layer(
    policy: str, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    slots = equal_slots(Checkpoint.open(reference).spec, 60, 0.8)
    made = engine(reference, tokenizer, policy, 60, log=log, layer_slots=slots)
    _answer_all(made, tokenizer, 3, 2)
    trace, row = require_replayed(made, log, policy, setup=ReplaySetup(layer_slots=slots))
    (one,) = replay(trace, [policy], [60 * trace.spec.slot_bytes])
    assert row.counts.kept and one.digest != row.digest


@pytest.mark.parametrize("name", ["gate_ahead", "promoe", "lstm", "cascade", "activation_matrix"])
def test_replay_decides_as_serve_did_with_every_kind_of_signal(
    name: str, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    predictor = (
        build(name, Checkpoint.open(reference).spec).eval().requires_grad_(False)
    )  # untrained ones take decisions too
    if name == "activation_matrix":
        experts_TPK = torch.randint(0, 32, (200, 8, 4))
        predictor.count(Tokens(experts_TPK=experts_TPK, request_T=torch.arange(200) // 20))
    made = engine(reference, tokenizer, "promoe", 60, predictor=predictor, log=tmp_path / "log")
    _answer_all(made, tokenizer, 3, 2)
    setup = ReplaySetup(predictor=copy.deepcopy(predictor))
    assert require_replayed(made, tmp_path / "log", "promoe", setup=setup)[1].counts.prefetch_loads


@pytest.mark.parametrize("policy", ["smoe", "hybrimoe"])
def test_replay_decides_by_the_costs_that_the_server_measured(
    policy: str, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    made = engine(reference, tokenizer, policy, 60, log=log, options={"live": True}, host_memory_bytes=40 * 73_728)
    _answer_all(made, tokenizer, 4, 3)
    trace, row = require_replayed(made, log, policy, setup=ReplaySetup(options={policy: {"live": True}}))
    costs = trace.manifest["provenance"]["costs"]
    assert row.counts.hosted and row.counts.missed
    assert costs and all(load_s > 0 and host_s > 0 for _, load_s, host_s in costs)
    trace.manifest["provenance"]["costs"] = [[0, 1.0, "a"]]
    with refused(MismatchError, "costs.0"):
        replay(trace, [policy], [60 * trace.spec.slot_bytes])


def test_a_log_replays_as_it_was_served(
    reference: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    checkpoint = Checkpoint.open(reference)
    options = ServeOptions(kv_tokens=512, pool="layer", oracle_s=0.0, log_segment_s=60.0)
    memory = divide_with_slots(checkpoint, options, 64).device_bytes
    made = build_engine(checkpoint, options=options, policy="foresight", device_memory_bytes=memory, log=log)
    made.state = "ready"
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(max_tokens=6 + 4 * i, ignore_eos=True)
        made.submit(tokenizer(prompt)["input_ids"], params, lambda output: None)
        made.step()
        made.step()
    made.cancel(1)
    while not made.idle:
        made.step()
    counts, stats = made.residency.counts, made.stats()
    made.close()
    assert not [field for field in missing_fields("serverView", {"engine": stats}) if field.startswith("row")]
    trace = Trace(log)
    budget = [64 * trace.spec.slot_bytes]
    row, plain = replay(trace, ["served", "foresight"], budget)
    assert row.policy == "served" and row.counts == counts
    assert row.digest == trace.manifest["provenance"]["decisions"] != plain.digest
    assert replay_served(trace) == row
    command = ("replay", "--trace", log, "--policy", "served")
    assert exit_code(monkeypatch, *command, "--json") == 0
    printed, said = capsys.readouterr()
    assert json.loads(printed)[0]["digest"] == row.digest and "equal to the log's" in said
    idle = (("--budget=25%", "slots"), ("--pool=layer", "--pool"), ("--draw=curve.svg", "--draw"))
    for option, fact in (*idle, ("--set=lru.admit=value", "lru")):
        assert exit_code(monkeypatch, *command, option) == 2
        said = capsys.readouterr().err
        assert fact in said and "no effect" in said
    assert replay(trace, ["served"], [20 * trace.spec.slot_bytes])[0].counts.needed == counts.needed
    last = ReplaySetup(requests=frozenset([4]), pool="layer")
    (row,), (alone,) = (replay(trace, [name], budget, last) for name in ("served", "foresight"))
    assert row.counts == alone.counts and row.digest == alone.digest
    with refused(UsageError, "server", "ran"):
        replay(trace, ["served"], budget, ReplaySetup(sequential=True))
    with refused(UsageError, "one device"):
        replay(trace, ["served"], budget, ReplaySetup(devices=2))


def test_replay_decides_as_serve_did_while_prompts_and_the_kv_cache_borrow_slots(
    reference: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answers are those of a server that lends nothing."""
    monkeypatch.setattr(ledger, "IDLE_FORWARDS", 12)
    answers: list[list[int | None]] = []
    kept: dict[str, Any]
    prompts = MemoryShare(slots=60, most_slots=24, chunk_tokens=700)
    both = MemoryShare(slots=60, most_slots=12, chunk_tokens=700, kv_slots=20, kv_tokens=960)
    for kept in ({}, {"share": prompts}, {"share": both, "first_kv_tokens": 64}):
        log, tokens, seen = tmp_path / str(len(kept)), list[int | None](), set[tuple[int, int]]()
        checkpoint = Checkpoint.open(reference)
        options = ServeOptions(prefill_chunk=700, kv_tokens=1024, pool="layer", oracle_s=0)
        budget = replace(divide_with_slots(checkpoint, options, 60), **kept)
        made = build_engine(checkpoint, options=options, policy="foresight", device_memory_bytes=budget, log=log)
        made.state = "ready"
        for prompt in ("The king said ", "12 * 3 = "):
            for words in (150, 1):
                ids = tokenizer(prompt * words)["input_ids"][:600]
                made.submit(ids, SamplingParams(max_tokens=20), lambda o, to=tokens: to.append(o.token))
                while not made.idle:
                    made.step()
                    sizes = made.stats()["memory_bytes"]
                    assert sizes["expert_slots"] + sizes["lent_by_expert_slots"] == made.store.pool_bytes
                    seen.add((made.residency.reserved_slots, sizes["kv_cache"]))
        answers.append(tokens)
        assert require_replayed(made, log, SERVED)[1].counts.kept
        lent = [slots for slots, _ in seen]
        assert (max(lent) > 10) == bool(kept)
        caches = {num_bytes for _, num_bytes in seen}
        if "first_kv_tokens" in kept:  # it has grown for each long prompt, and shrunk again
            assert min(caches) < 0.4 * max(caches) and min(lent) <= 4
            assert made.batcher.evicted_pages > 0
        else:
            assert len(caches) == 1 and min(lent) == 0
    assert answers[0] == answers[1] == answers[2]
