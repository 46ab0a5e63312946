"""Experts on several servers: the same bits as on one, wherever they are and whatever becomes of the others."""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, MismatchError, MoetoolError
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge.meter import Meter
from moetool.cluster.edge.peers import Peers
from moetool.cluster.edge.placed_experts import PlacedExperts
from moetool.cluster.edge.protocol import ExpertLocations
from moetool.cluster.frames import Frame, LinkError
from moetool.cluster.links import Links
from moetool.cluster.listener import listen
from moetool.cluster.row_bytes import read_rows, rows_parts
from moetool.cluster.transport import Listener
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_form import ExpertForm
from moetool.models.loading import CPU, load_lazy
from moetool.runtime.experts.grouping import ROWS_TOGETHER
from moetool.runtime.experts.store import open_store
from moetool.runtime.request import Output, SamplingParams
from tests import families
from tests.edge import PATIENT, Nodes, cluster
from tests.engines import engine, every_read_fails_once, generate, openmp
from tests.identities import identity
from tests.refusals import refused
from tests.servers import eventually

TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]
LAYERS, EXPERTS = 8, 32
ALL = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def _third(n: int) -> list[tuple[int, int]]:
    return [at for i, at in enumerate(ALL) if i % 3 == n]


REST = [*_third(1), *_third(2)]
PLACEMENTS = {
    "a third each": [_third(0), _third(1), _third(2)],
    "all here": [ALL, _third(1), []],
    "nothing here": [[], ALL[:130], ALL[130:]],
    "replicas": [ALL[:100], ALL, ALL],
    "layer by layer": [[at for at in ALL if at[0] % 3 == n] for n in range(3)],
}


@pytest.fixture(scope="module")
def baseline(reference: Path, tokenizer: Any) -> Any:
    """One server that has it all: prompts, tokens and logits of one batch."""
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    made = engine(reference, tokenizer, "lru", 256)
    result = generate(made, ids, 5)
    made.close()
    return ids, *result


@pytest.fixture(scope="module")
def thirds(reference: Path, tokenizer: Any) -> Iterator[Nodes]:
    """Three servers with a third of the experts each. Who changes that puts it back."""
    with cluster(reference, tokenizer, PLACEMENTS["a third each"]) as nodes:
        yield nodes


@pytest.fixture
def well_again(thirds: Nodes) -> Iterator[Nodes]:
    """The same, and after the test all is as it was."""
    yield thirds
    for node in thirds.nodes:
        node.on_call = None
        node.experts.options = PATIENT
        node.peers.distance = (1.0,) * 3
        node.listen_again()  # so that nobody thinks ill of it any more
    thirds.arrange(PLACEMENTS["a third each"])


def _check(nodes: Nodes, baseline: Any, server: int = 0) -> None:
    ids, tokens, logits = baseline
    found_tokens, found = generate(nodes[server].engine, ids, 5)
    assert found_tokens == tokens
    assert len(found) == len(logits) and all(map(torch.equal, found, logits))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_logits_are_those_of_one_server(name: str, baseline: Any, well_again: Nodes) -> None:
    nodes = well_again
    nodes.arrange(PLACEMENTS[name])
    for node in nodes.nodes:
        node.meter.take(0)
    before = [dict(node.meter.total) for node in nodes.nodes]
    _check(nodes, baseline)
    stats = nodes[0].meter.take(0)
    needed = 4 * LAYERS * (sum(map(len, baseline[0])) + 4 * len(TEXTS))  # each token's top-k, in every layer
    assert stats.tokens_LE.sum() == needed == stats.local_pairs + stats.remote_pairs
    here = sum(stats.tokens_LE[at] for at in PLACEMENTS[name][0])
    assert stats.local_pairs == here
    assert nodes[0].meter.total["last_resort"] == before[0].get("last_resort", 0)
    served = sum(
        node.meter.total["served_pairs"] - was.get("served_pairs", 0)
        for node, was in zip(nodes.nodes, before, strict=True)
    )
    assert served == stats.remote_pairs == sum(stats.call_pairs.values())
    assert (stats.remote_pairs == 0) == (not stats.calls)


def test_a_server_that_must_be_called_takes_the_experts_that_others_have_too(
    reference: Path, tokenizer: Any, baseline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(reference, tokenizer, [[], ALL[1::2], ALL]) as nodes:
        for server in (1, 2):
            nodes[0].peers.answered(server, 9, 1.0)
        monkeypatch.setattr(nodes[0].peers, "answered", lambda *call: None)  # so a call costs a second, pairs nothing
        _check(nodes, baseline)
        assert nodes[0].meter.take(0).calls == {2: 5 * LAYERS}  # five forwards, each with experts that only it has


def test_a_row_is_sent_once_to_a_server(baseline: Any, well_again: Nodes) -> None:
    nodes = well_again
    nodes.arrange([[], ALL, []])
    nodes[0].meter.take(0)
    _check(nodes, baseline)
    stats = nodes[0].meter.take(0)
    width = nodes[0].experts.spec.hidden_size
    rows = stats.remote_pairs // 4  # of four experts each
    assert 4 * width * rows < stats.bytes_out[1] < 1.2 * 4 * width * rows


def test_forwards_of_many_rows(reference: Path, tokenizer: Any, thirds: Nodes) -> None:
    prompt = [(7 * i + 3) % 4000 + 3 for i in range(ROWS_TOGETHER // 4 + 40)]
    alone = engine(reference, tokenizer, "lru", 256)
    baseline = [prompt], *generate(alone, [prompt], 2)
    alone.close()
    seen = list[int]()
    for node in thirds.nodes[1:]:
        node.on_call = lambda message: seen.append(len(message.parts[1]))
    ids, tokens, logits = baseline
    found_tokens, found = generate(thirds[0].engine, ids, 2)
    for node in thirds.nodes:
        node.on_call = None
    assert found_tokens == tokens and all(map(torch.equal, found, logits))
    assert max(seen) > ROWS_TOGETHER // 6 * thirds[0].experts.spec.hidden_size * 4


def test_malformed_rows_are_refused(thirds: Nodes) -> None:
    spec = thirds[0].experts.spec
    rows = torch.arange(2.0 * spec.hidden_size).view(2, -1)
    head, data = rows_parts(3, {1: 2, 4: 1}, rows, [0, 1, 0])
    found = read_rows([head, bytearray(data)], spec)
    assert found.counts == {1: 2, 4: 1} and torch.equal(found.rows_RD, rows[[0, 1, 0]])
    for counts, sources in (({1: 2, 4: 1}, [0, 1]), ({1: 2}, [0, 1, 0]), ({1: 9}, [1] * 9), ({1: 2, 4: 1}, [0, 2, 0])):
        damaged = rows_parts(3, counts, rows, None)[0] + struct.pack(f"!{len(sources)}I", *sources)
        with refused(MoetoolError, "malformed", "rows"):
            read_rows([damaged, bytearray(data)], spec)
    for damaged in (head[:5], head[:-1], head + bytes(4)):
        with refused(MoetoolError, "malformed", "rows"):
            read_rows([damaged, bytearray(data)], spec)


@pytest.mark.parametrize("slots", [256, 100], ids=["all have slots", "some are read when needed"])
def test_servers_with_several_devices(reference: Path, tokenizer: Any, baseline: Any, slots: int) -> None:
    held = PLACEMENTS["a third each"]
    with cluster(reference, tokenizer, held, devices=(2, 3, 1), slots=slots) as nodes:
        _check(nodes, baseline)
        even = [at for at in ALL if at[1] % 2 == 0]  # all on the first device of two
        nodes.arrange([even, *held[1:]])
        nodes.nodes[1].experts.adopt(0, 2, source=0)
        nodes.arrange([even, [at for at in ALL if at[1] % 2], held[2]])
        for server in range(3):
            _check(nodes, baseline, server)
        assert nodes[0].meter.total["remote_pairs"] and not nodes[0].meter.total["last_resort"]
        assert len(nodes[0].experts.held) == len(even)


@pytest.mark.parametrize("name", ["llama4_text", "longcat_flash", "jetmoe", "dbrx", "gpt_oss", "finished"])
def test_every_way_to_call_experts(name: str, tmp_path: Path) -> None:
    finished = name == "finished"  # made up: what no family here does to an expert's output
    families.save("qwen3_moe" if finished else name, tmp_path)
    tokens = torch.tensor([[(7 * i + 3) % 60 + 3 for i in range(24)]])
    info = ForwardInfo(forward_id=0, request_T=(0,) * 24, phase_T=(Phase.PREFILL,) * 24, position_T=tuple(range(24)))
    logits, ends = [], contextlib.ExitStack()
    with ends:
        for shares in ([[0, 1]], [[0], [1]]):  # of every two experts; one server, and two
            runtimes = [_bare(tmp_path, n, share, finished, ends) for n, share in enumerate(shares)]
            listeners = [
                Listener(listen("127.0.0.1"), identity(f"server-{n}"), runtime.handle)
                for n, runtime in enumerate(runtimes)
            ]
            for listener in listeners:
                ends.callback(listener.close)
            holders = ExpertLocations(
                version=1,
                servers_LE=tuple(
                    tuple(tuple(n for n, share in enumerate(shares) if e % 2 in share) for e in range(num))
                    for num in runtimes[0].spec.num_experts_L
                ),
                peers=tuple(listener.address for listener in listeners),
            )
            for runtime in runtimes:
                runtime.set_holders(holders)
            runtimes[0].runtime.begin_forward(info)
            with torch.inference_mode():
                logits.append(runtimes[0].model(tokens, use_cache=False).logits)  # type: ignore[attr-defined]
            runtimes[0].runtime.end_forward()
            total = runtimes[0].meter.total
            assert bool(total["calls"]) == (len(shares) == 2) and not total["last_resort"]
    assert torch.equal(*logits)


def _bare(
    path: Path,
    server: int,
    share: list[int],
    finished: bool,
    ends: contextlib.ExitStack,
    device: torch.device = CPU,
) -> PlacedExperts:
    """A runtime with every second expert, or all, and no engine; its slots are said to be on this device."""
    loaded = load_lazy(Checkpoint.open(path), torch.float32)
    assert loaded.files is not None
    ends.callback(loaded.files.shards.close)
    if finished:
        layers = [replace(layer, form=replace(layer.form, finish=torch.cos)) for layer in loaded.layers]
        loaded = replace(loaded, layers=layers)
    total = loaded.spec.total_experts
    pool = Residency(build_policy("lru", loaded.spec, {}, total))
    store = open_store(loaded, pool, 1)
    store.copies.device = device
    runtime = PlacedExperts(
        *(loaded, pool, store),
        held=[
            (layer, expert)
            for layer, num in enumerate(loaded.spec.num_experts_L)
            for expert in range(num)
            if expert % 2 in share
        ],
        capacity=total,
        peers=Peers(server, identity(f"server-{server}"), (0.0, 0.0)),
        meter=Meter(server, loaded.spec, Links()),
    )
    runtime.model = loaded.model  # type: ignore[attr-defined]
    ends.callback(runtime.runtime.close)
    return runtime


@pytest.mark.parametrize("num_rows", [2, ROWS_TOGETHER + 1])
def test_rows_of_others_are_computed_on_the_device_of_the_expert(
    num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.save("qwen3_moe", tmp_path)
    found = list[str]()

    def compute_each(form: ExpertForm, xs: Sequence[torch.Tensor], weights: Any) -> list[torch.Tensor]:
        found.extend(x.device.type for x in xs)
        return [torch.zeros(x.shape) for x in xs]

    monkeypatch.setattr(ExpertForm, "compute_each", compute_each)
    with contextlib.ExitStack() as ends:
        runtime = _bare(tmp_path, 0, [0, 1], False, ends, torch.device("meta"))
        rows = torch.ones(2 * num_rows, runtime.spec.hidden_size)
        parts = [bytearray(part) for part in rows_parts(0, {1: num_rows, 2: num_rows}, rows)]
        answer = read_rows(runtime.handle(Frame(head={}, parts=parts)).parts, runtime.spec)
    assert found == ["meta", "meta"]
    assert answer.counts == {1: num_rows, 2: num_rows}


def test_every_server_has_users_at_once(thirds: Nodes, baseline: Any) -> None:
    failed: list[BaseException] = []

    def run(server: int) -> None:
        try:
            _check(thirds, baseline, server)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(server,)) for server in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed


def test_a_new_thread_answers_with_the_servers_number_of_compute_threads(
    thirds: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, runtime = openmp(), thirds[0].experts
    layer, expert = _third(0)[0]
    parts = [bytearray(part) for part in rows_parts(layer, {expert: 2}, torch.randn(2, runtime.spec.hidden_size))]
    ready, found = runtime.store.ready, list[int]()

    def before_products(key: int, slot: int) -> Any:
        found.append(library.omp_get_max_threads())
        return ready(key, slot)

    def answer() -> None:
        library.omp_set_num_threads(7)  # a new thread's number on a machine with 7 cores
        runtime.handle(Frame(head={}, parts=parts))

    monkeypatch.setattr(runtime.store, "ready", before_products)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    assert found == [torch.get_num_threads()]


def test_cold_experts_lie_on_disk(reference: Path, tokenizer: Any, baseline: Any) -> None:
    with cluster(reference, tokenizer, [ALL[::2], ALL[1::2]], slots=7) as nodes:
        _check(nodes, baseline)
        assert nodes[0].engine.store.num_slots == 7
        assert nodes[0].engine.metrics()["misses"] > 20


def test_one_message_a_layer_and_server(thirds: Nodes, baseline: Any) -> None:
    before = [node.meter.total.copy() for node in thirds.nodes]
    _, tokens, _ = baseline
    generate(thirds[0].engine, baseline[0][:1], 5)
    calls = thirds[0].meter.total["calls"] - before[0]["calls"]
    assert 0 < calls <= 5 * LAYERS * 2  # forwards, layers, other servers
    assert len(tokens[0]) == 5


def test_experts_that_move_while_requests_run(well_again: Nodes, baseline: Any) -> None:
    nodes, (ids, tokens, _) = well_again, baseline
    found: dict[int, list[int]] = {}

    def sink(output: Output) -> None:
        assert output.error is None, output.error
        found.setdefault(output.request, []).append(output.token or 0)

    moving = iter(
        [(at, source, target) for source in range(3) for at in _third(source) for target in [(source + 1) % 3]]
    )
    requests = [nodes[0].engine.submit(prompt, SamplingParams(max_tokens=5), sink) for prompt in ids]
    while not nodes[0].engine.idle:
        for (layer, expert), source, target in [next(moving) for _ in range(6)]:
            moved = nodes[target].experts.adopt(layer, expert, source)
            assert (moved.source, moved.bytes) == (source, nodes[0].engine.store.files.slot_bytes)
            assert nodes[target].experts.adopt(layer, expert, source).bytes == 0  # it is there
            nodes.publish()
            nodes[source].experts.drop(layer, expert)  # its table still says that it is held there
        nodes[0].engine.step()
    assert [found[request] for request in requests] == tokens
    assert nodes[1].meter.take(0).migrated_bytes > 0


def test_a_drop_that_nobody_was_told_of_is_refused_and_tried_elsewhere(well_again: Nodes, baseline: Any) -> None:
    nodes = well_again
    for at in _third(1):
        nodes[2].experts.adopt(*at, source=1)
    nodes.publish()
    for at in _third(1)[::2]:
        nodes[1].experts.drop(*at)
    before = nodes[0].meter.total["last_resort"]
    _check(nodes, baseline)
    assert nodes[0].meter.total["last_resort"] == before


def test_what_nobody_gives_is_read_from_the_own_disk(well_again: Nodes, baseline: Any) -> None:
    nodes = well_again
    nodes.publish(gone=[1])
    held = nodes[0].experts.held
    before = nodes[0].meter.total["last_resort"]
    with every_read_fails_once(nodes[0].engine.store.files) as tries:
        _check(nodes, baseline)
    assert nodes[0].meter.total["last_resort"] > before + 20 and tries
    assert nodes[0].experts.held == held
    assert set(nodes[0].experts.residency.slot_of) == {layer * EXPERTS + expert for layer, expert in held}


def test_without_a_last_resort_the_forward_fails_and_the_next_is_served(well_again: Nodes, baseline: Any) -> None:
    nodes = well_again
    ended: list[Output] = []
    nodes[0].experts.options = ClusterOptions(last_resort=False, hedge_s=0.0)
    nodes.publish(gone=[1])
    nodes[0].engine.submit(baseline[0][0], SamplingParams(max_tokens=5), ended.append)
    while not nodes[0].engine.idle:
        nodes[0].engine.step()
    assert [output.finish for output in ended] == ["error"]
    assert "no server holds expert" in str(ended[0].error)
    nodes.publish()
    _check(nodes, baseline)


def test_a_peer_that_dies_in_the_middle_of_a_call(well_again: Nodes, baseline: Any) -> None:
    nodes, calls = well_again, []
    nodes.arrange([_third(0), REST, REST])
    nodes[0].peers.distance = (1.0, 0.5, 1.0)
    before = dict(nodes[0].meter.total)

    def die(message: Frame) -> None:
        calls.append(message.call)
        if len(calls) == 9:
            threading.Thread(target=nodes[1].listener.close).start()
            eventually(lambda: nodes[0].meter.total["failed_calls"] > before.get("failed_calls", 0))

    nodes[1].on_call = die
    _check(nodes, baseline)
    assert len(calls) == 9
    assert nodes[0].meter.total["failed_calls"] > before.get("failed_calls", 0)
    assert nodes[0].meter.total["last_resort"] == before.get("last_resort", 0)


def test_a_slow_peer_is_given_up_for_a_replica(well_again: Nodes, baseline: Any) -> None:
    nodes = well_again
    nodes.arrange([_third(0), REST, REST])
    nodes[0].experts.options = ClusterOptions(call_timeout_s=1.0, hedge_s=0.0)
    nodes[0].peers.distance = (0.0, 1.0, 2.0)  # the slow one is nearer
    nodes[1].on_call = lambda message: time.sleep(2.0)
    before = dict(nodes[0].meter.total)
    began = time.monotonic()
    _check(nodes, baseline)
    failed = nodes[0].meter.total["failed_calls"] - before.get("failed_calls", 0)
    assert 1 <= failed <= (time.monotonic() - began) / 1.0 + 1
    assert nodes[0].meter.total["last_resort"] == before.get("last_resort", 0)


@pytest.mark.parametrize("replicas", [True, False], ids=["replicas", "disk"])
def test_a_peer_that_stands_still_costs_little(well_again: Nodes, baseline: Any, replicas: bool) -> None:
    nodes = well_again
    if replicas:
        nodes.arrange([_third(0), REST, REST])
        nodes[0].peers.distance = (0.0, 1.0, 2.0)  # who will stand still is nearer
    _check(nodes, baseline)  # and is known to be quick
    before, goes_on = Counter(nodes[0].meter.total), threading.Event()
    asked: list[Frame] = []

    def stand_still(message: Frame) -> None:
        asked.append(message)
        goes_on.wait(60.0)

    nodes[0].experts.options = ClusterOptions(call_timeout_s=120.0, hedge_s=0.1)
    nodes[1].on_call = stand_still
    began = time.monotonic()
    _check(nodes, baseline)
    assert time.monotonic() - began < 60.0  # its answer would have come no sooner
    total = nodes[0].meter.total
    assert len(asked) == 1 <= total["late_calls"] - before["late_calls"]  # others may be late on a busy machine
    assert total["failed_calls"] == before["failed_calls"]
    assert (total["last_resort"] == before["last_resort"]) == replicas
    goes_on.set()
    eventually(lambda: nodes[0].peers.choose([1], 1) == 1)  # its answer has come, though nobody wants it any more
    _check(nodes, baseline)


def test_a_half_open_link_holds_nobody_up(well_again: Nodes, baseline: Any) -> None:
    nodes = well_again
    nodes[0].experts.options = ClusterOptions(call_timeout_s=0.2, hedge_s=0.0)
    before = nodes[0].meter.total["last_resort"]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        holders = nodes.publish()
        peers = (None, silent.getsockname(), holders.peers[2])
        nodes.version += 1
        nodes[0].experts.set_holders(replace(holders, version=nodes.version, peers=peers))
        _check(nodes, baseline)  # from the own disk
    assert nodes[0].meter.total["last_resort"] > before + 20


def test_an_answer_to_another_question_is_no_answer(well_again: Nodes, baseline: Any, monkeypatch: Any) -> None:
    nodes = well_again
    real = nodes[1].experts.handle

    def lie(message: Frame) -> Frame:
        head, rows = real(message).parts
        layer = int.from_bytes(head[:4])
        return Frame(head={}, parts=[((layer + 1) % LAYERS).to_bytes(4) + head[4:], rows])

    with monkeypatch.context() as patch:
        patch.setattr(nodes[1].experts, "handle", lie)
        _check(nodes, baseline)
    assert nodes[0].meter.total["failed_calls"] > 0


def test_an_answer_in_another_type_is_no_answer(
    well_again: Nodes, baseline: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = well_again
    real, before = nodes[1].experts.handle, nodes[0].meter.total["failed_calls"]

    def narrow(message: Frame) -> Frame:
        found = read_rows([bytearray(part) for part in real(message).parts], nodes[1].experts.spec)
        return Frame(head={}, parts=rows_parts(found.layer, found.counts, found.rows_RD.bfloat16()))

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "moetool.cluster"):
        patch.setattr(nodes[1].experts, "handle", narrow)
        _check(nodes, baseline)
    assert nodes[0].meter.total["failed_calls"] > before
    assert "the answer has rows in torch.bfloat16, expected torch.float32" in caplog.text


def test_a_full_server_takes_no_more(well_again: Nodes, baseline: Any) -> None:
    runtime = well_again[0].experts
    runtime.holding.capacity = len(runtime.held)
    try:
        with refused(CapacityError, "server 0", "86"):
            runtime.adopt(0, 1, source=1)
        runtime.drop(0, 0)
        assert runtime.adopt(0, 1, source=1).source == 1
        well_again.publish()
        _check(well_again, baseline)  # nobody holds the dropped one now
    finally:
        runtime.holding.capacity = 256


def test_a_damaged_expert_is_not_taken(well_again: Nodes, monkeypatch: Any) -> None:
    nodes = well_again
    real = nodes[1].experts.handle

    def damage(message: Frame) -> Frame:
        answer = real(message)
        return Frame(head=answer.head, parts=[bytes(len(answer.parts[0]))])

    layer, expert = _third(1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(nodes[1].experts, "handle", damage)
        assert nodes[0].experts.adopt(layer, expert, source=1).source == -1
    key = layer * EXPERTS + expert
    runtimes = [node.experts for node in nodes.nodes]
    found = [runtime.store.bytes_of(key, runtime.residency.slot_of[key]) for runtime in runtimes[:2]]
    assert torch.equal(*found)


def test_a_timed_copy_changes_nothing(thirds: Nodes) -> None:
    runtime, held = thirds[0].experts, thirds[0].experts.held
    there, elsewhere = _third(1)[0], _third(2)[0]
    before = runtime.meter.take(0).migrated_bytes, runtime.version
    (timed,) = runtime.time_copies([(*there, 1), (*elsewhere, 1)])  # server 1 holds only the first
    assert (timed.source, timed.bytes) == (1, runtime.spec.slot_bytes) and timed.seconds > 0
    assert runtime.held == held and (runtime.meter.take(0).migrated_bytes, runtime.version) == (0, before[1])


@pytest.mark.parametrize(("copy_s", "timed"), [(0.25, 8), (0.75, 3), (30.0, 1)])
def test_no_copy_is_timed_after_two_seconds(
    copy_s: float, timed: int, well_again: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def pass_time(message: Frame) -> None:
        now[0] += copy_s

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("moetool.cluster.edge.placed_experts.time", clock)
    well_again[1].on_call = pass_time
    found = well_again[0].experts.time_copies([(*at, 1) for at in _third(1)[:8]])
    assert [one.seconds for one in found] == [pytest.approx(copy_s)] * timed


def test_what_cannot_be_is_refused(thirds: Nodes) -> None:
    nodes = thirds

    def head(layer: int = 0, width: int = 192, kind: int = 0, numbers: Sequence[int] = (0, 1)) -> bytes:
        return struct.pack(f"!IIB{len(numbers)}I", layer, width, kind, *numbers)

    row = b"\0" * 192 * 4
    wrong: list[tuple[dict[str, Any], list[bytes]]] = [
        ({"do": "format"}, [head(), row]),
        ({}, [head(layer=8), row]),
        ({}, [head(numbers=(32, 1)), row]),
        ({}, [head(numbers=(0, 0, 1, 1)), row + row]),
        ({}, [head(numbers=(0, 2)), row]),
        ({}, [head(numbers=(0, 0)), b""]),
        ({}, [head(numbers=(0, 1, 1)), row]),
        ({}, [head(width=0), b""]),
        ({}, [head(width=96), row[: 96 * 4]]),  # not the width of the model's hidden states
        ({}, [head(width=384), row + row]),
        ({}, [head(width=10**9), row]),
        ({}, [head(kind=3), row]),
        ({}, [head(numbers=()), b""]),
        ({}, [head()[:7], row]),
        ({}, [head()]),
        ({}, []),
        ({"do": "fetch", "layer": 0, "expert": 1}, []),  # held elsewhere
        ({"do": "fetch", "layer": "x", "expert": 1}, []),
        ({"do": "fetch", "layer": 0, "expert": 96}, []),
    ]
    for asked, parts in wrong:
        with pytest.raises(MoetoolError):
            nodes[0].experts.handle(Frame(head=asked, parts=parts))
    with refused(MismatchError, "belongs", "model"):
        nodes[0].experts.set_holders(ExpertLocations(version=10**6, servers_LE=((),), peers=()))
    with pytest.raises(LinkError):
        nodes[0].peers.call(2, {}, (), timeout_s=0.0).result(5)
