"""Expert parallelism with ranks in threads: the same text as one machine, whatever moves and whoever dies."""

import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.capture.run import CaptureOptions, capture
from moetool.cluster.parallel import members
from moetool.cluster.parallel.batch_placement import BatchCosts, BatchReplacement, Waiting, replacement_costs
from moetool.cluster.parallel.expert_buffers import ExpertBuffers
from moetool.cluster.parallel.process_group import Group
from moetool.cluster.parallel.rank_head import RankHead
from moetool.models.checkpoint import Checkpoint
from moetool.placement.decide import Decision, InForce, Observed, Replanner, decide
from moetool.prompts.gather import Prompt
from moetool.runtime.request import SamplingParams, Unavailable
from moetool.simulation.lockstep import RankMachines
from moetool.simulation.lockstep_serving import LockstepServing, ServingOptions
from moetool.simulation.rank_seconds import AssumedRank
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.workload import SimulatedRequest, read_source
from moetool.trace.reader import Trace
from tests import engines
from tests.ranks import Answers, ThreadRanks, held, joined_after, open_head, striped
from tests.refusals import refused
from tests.servers import eventually
from tests.simulated import static
from tests.synthetic_routes import route_of

GPUS = 3
TEXTS = ["The capital of France", "def add(a, b):", "12 + 30 =", "Once upon", "the court found", "import os"]


class Restless(BatchReplacement):
    """Places at random before every batch, whatever it costs."""

    def __init__(self, head: RankHead) -> None:
        super().__init__("offline", head.spec, head.cluster)
        self._rng = np.random.default_rng(0)

    @property
    def decides(self) -> bool:
        return True

    @property
    def looks_ahead(self) -> bool:
        return True

    def decide(self, batch: Sequence[Waiting], placed_GLE: np.ndarray, costs: BatchCosts) -> Decision:
        new_GLE = np.zeros_like(placed_GLE)
        for layer in range(self._spec.num_layers):
            order = self._rng.permutation(self._spec.num_experts)
            for place, expert in enumerate(order):
                new_GLE[place % GPUS, layer, expert] = True
            new_GLE[0, layer, order[1]] = True  # and one copy
        tokens_GLE = np.ones(placed_GLE.shape)
        return decide(
            Observed(tokens_GLE=tokens_GLE, horizon_tokens=1.0, source="nothing"),
            InForce(spec=self._spec, cluster=self._cluster, placed_GLE=placed_GLE),
            replacement_costs(self._cluster, self._spec, tokens_GLE, costs),
            Replanner(planner="uniform", weighs="latency", always=True),
            new_GLE,
        )


@pytest.fixture(scope="module")
def head(reference: Path, tokenizer: Any) -> Iterator[RankHead]:
    """Three ranks with two seats each."""
    made = open_head(reference, tokenizer, gpus=GPUS, slots=256, seats=2, gather_s=0.2, micro_batches=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Two for each rank."""
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def alone(reference: Path, tokenizer: Any, prompts: list[list[int]]) -> list[tuple[list[list[int]], list[Any]]]:
    """Tokens and logits of a single machine, for the requests of each rank as one batch."""
    engine = engines.engine(reference, tokenizer, "lru", 256, max_requests=2)
    found = [engines.generate(engine, prompts[g::GPUS], 6) for g in range(GPUS)]
    engine.close()
    return found


def _same_as_alone(head: RankHead, prompts: list[list[int]], alone: Any, rounds: int = 1) -> None:
    """Serve full batches; every rank's logits are a single machine's to the bit."""
    logits: list[list[torch.Tensor]] = [[] for _ in range(GPUS)]
    hooks = [
        head.launcher.ranks[g].loaded.model.lm_head.register_forward_hook(
            lambda m, a, out, g=g: logits[g].append(out.clone())
        )
        for g in range(GPUS)
    ]
    answers = Answers(head)
    with held(head):
        requests = [answers.ask(prompt, 6) for _ in range(rounds) for prompt in prompts]
    tokens = answers.wait(requests)
    head.wait_idle()
    for hook in hooks:
        hook.remove()
    for g in range(GPUS):
        expected_tokens, expected_logits = alone[g]
        for start in range(0, len(tokens), len(prompts)):
            assert tokens[start : start + len(prompts)][g::GPUS] == expected_tokens
        assert len(logits[g]) == rounds * len(expected_logits)
        for found, expected in zip(logits[g], expected_logits * rounds, strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("placement", ["striped", "replicas", "one has all"])
def test_ranks_give_a_single_machines_logits(head: RankHead, prompts: Any, alone: Any, placement: str) -> None:
    placed_GLE = striped(head.spec, GPUS, replicas=5 if placement == "replicas" else 0)
    if placement == "one has all":
        placed_GLE[:] = False
        placed_GLE[1] = True
    head.use(BatchReplacement("offline", head.spec, head.cluster), placed_GLE)
    _same_as_alone(head, prompts, alone)
    record = head.batches[-1]
    uses = record.tokens_GLE.sum()
    assert record.rows == uses == sum(6 - 1 + len(prompt) for prompt in prompts) * sum(head.spec.top_k_L)
    if placement == "one has all":
        assert record.hottest == record.rows  # all of it on one GPU
        assert (record.sent_GG > 0).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    row_bytes = 192 * 4
    away = record.tokens_GLE[(0, 2), :].sum() if placement == "one has all" else None
    if away is not None:
        assert record.sent_GG.sum() == 2 * away * row_bytes  # there and back


@pytest.mark.parametrize("copies", [0, 5])
def test_the_simulated_ranks_have_the_same_loads_and_bytes(
    head: RankHead, reference: Path, tokenizer: Any, tmp_path: Path, copies: int
) -> None:
    """Rows of every rank, those of the busiest in each layer of each step, and bytes of every link."""
    placed_GLE = striped(head.spec, GPUS, replicas=copies)
    head.use(BatchReplacement("offline", head.spec, head.cluster), placed_GLE)
    answers = Answers(head)
    with held(head):
        asked = [answers.ask(tokenizer(text)["input_ids"], 6, ignore_eos=True) for text in TEXTS]
    answers.wait(asked)
    head.wait_idle()
    record = head.batches[-1]
    texts = [Prompt(prompt_id=str(n), text=text, dataset="", task="") for n, text in enumerate(TEXTS)]
    options = CaptureOptions(max_new_tokens=6, batch_size=1, keep=("topk",), threads=1, dtype="float32")
    capture(reference, texts, tmp_path / "trace", options)
    source = read_source(Trace(tmp_path / "trace"), lambda place: True, decode_tokens=5)
    requests = [
        SimulatedRequest(number=n, gpu=0, route=route_of(head.spec, prompt_TS, reply_TS), arrived_s=0.0)
        for n, (prompt_TS, reply_TS) in enumerate(zip(source.prompts, source.replies, strict=True))
    ]
    free = replace(head.cluster, servers=tuple(replace(one, gpu_link_bytes_s=1e300) for one in head.cluster.servers))
    costs = AssumedCosts(dense_s=0.0, dense_token_s=0.0, expert_s=1.0, expert_token_s=1.0)  # a second for each row
    machines = RankMachines(
        spec=head.spec, cluster=free, seconds=AssumedRank(costs=costs), token_bytes=4 * head.spec.hidden_size
    )
    serving = LockstepServing(machines, requests, static(head.spec, free, placed_GLE), ServingOptions(seats=2))
    serving.run()
    assert serving.ranks.rows_GL.sum() == record.rows
    assert serving.now_s == pytest.approx(record.hottest)
    assert (serving.ranks.sent_GG == record.sent_GG).all()
    assert sum(batch.steps for batch in serving.batches) == record.steps


def test_a_decode_step_takes_two_exchanges_a_layer(
    head: RankHead, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    taken: Counter[str] = Counter()

    def count(name: str) -> None:
        method = getattr(Group, name)

        def counted(group: Group, *args: Any) -> Any:
            taken[name] += group.rank == 0
            return method(group, *args)

        monkeypatch.setattr(Group, name, counted)

    for name in ("counts", "exchange", "exchange_few", "begin_exchange"):
        count(name)
    answers = Answers(head)
    answers.wait([answers.ask(prompts[0], 9, ignore_eos=True)])
    head.wait_idle()
    steps = sum(record.steps for record in head.batches[-2:])
    assert steps == 9
    layers = head.spec.num_layers
    assert taken["counts"] <= steps + layers  # in a step's first layer, and where a prompt has many rows
    in_halves = taken["begin_exchange"] // 4
    assert in_halves <= layers
    assert taken["exchange"] + taken["exchange_few"] == 2 * (layers * steps - in_halves)
    assert taken["exchange_few"] >= (layers - 1) * (steps - 1)


def test_half_of_many_rows_travels_while_the_other_half_is_computed(
    reference: Path, tokenizer: Any, head: RankHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS, replicas=5))
    long = [tokenizer(text * 8)["input_ids"] for text in TEXTS]  # two for each rank
    engine = engines.engine(reference, tokenizer, "lru", 256, max_requests=2)
    expected = [engines.generate(engine, long[g::GPUS], 6) for g in range(GPUS)]
    engine.close()
    done: list[str] = []
    buffers = head.launcher.ranks[0].buffers  # type: ignore[attr-defined]
    begin, weights = Group.begin_exchange, buffers.weights

    def begun(group: Group, *args: Any) -> Any:
        if group.rank == 0:
            done.append("exchange")
        return begin(group, *args)

    def used(key: int) -> Any:
        if done[-1:] == ["exchange"]:
            done.append("compute")
        return weights(key)

    monkeypatch.setattr(Group, "begin_exchange", begun)
    monkeypatch.setattr(buffers, "weights", used)
    _same_as_alone(head, long, expected)
    layer = ["exchange", "exchange", "compute", "exchange", "compute", "exchange"]
    assert done[: 6 * head.spec.num_layers] == layer * head.spec.num_layers


@pytest.mark.parametrize("slots", [256, 100], ids=["one stage", "many stages"])
def test_text_is_the_same_while_experts_move(head: RankHead, prompts: Any, alone: Any, slots: int) -> None:
    head.loop.placing.slots_G = (slots,) * GPUS
    head.use(Restless(head), striped(head.spec, GPUS))
    begun = head.loop.placing.version
    _same_as_alone(head, prompts, alone, rounds=3)
    assert len(head.decisions) == 2  # for every batch but the first
    moved = sum(record.moved_bytes for record in head.batches)
    assert moved == sum(decision.bytes for decision in head.decisions) > 0
    assert sum(record.moved_during_exchange for record in head.batches) == 0
    assert sum(record.from_disk for record in head.batches) == 0
    assert head.batches[-1].held <= slots + 1
    assert (head.loop.placing.version - begun > 2) == (slots == 100)  # a stage a decision, or several
    held = [rank.buffers for rank in head.launcher.ranks.values()]  # type: ignore[attr-defined]
    placed_GLE = head.decisions[-1].placed_GLE
    assert [len(buffers.keys) for buffers in held] == placed_GLE.sum(axis=(1, 2)).tolist()


def test_a_rank_that_dies_is_done_without_and_taken_back(head: RankHead, prompts: Any, alone: Any) -> None:
    head.loop.placing.slots_G = (256,) * GPUS
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    answers = Answers(head)
    seeded = {"temperature": 1.0, "seed": 7}
    calm = answers.wait([answers.ask(prompts[0], 32), answers.ask(prompts[1], 32, **seeded)])
    answers.tokens.clear()
    generation, failures = head.loop.ranks.generation, head.metrics()["failures"]
    requests = [answers.ask(prompts[0], 32), answers.ask(prompts[1], 32, **seeded)]
    answers.wait_for_tokens(2)
    died = time.monotonic()
    head.launcher.kill(2)
    assert answers.wait(requests) == calm  # nothing is lost and nothing said twice
    assert all(answers.ends[request].finish == "length" for request in requests)
    joined = joined_after(head, generation)
    assert joined is not None and joined - died < 10
    assert head.metrics()["requests_retried"] > 0 and head.metrics()["failures"] == failures + 1
    eventually(lambda: head.metrics()["ranks"] == GPUS)
    answers.wait([answers.ask(prompts[0], 2)])
    _same_as_alone(head, prompts, alone)


def test_a_rank_that_dies_while_half_of_the_rows_travels(
    head: RankHead, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    prompts = [tokenizer(text * 8)["input_ids"] for text in TEXTS]
    answers = Answers(head)
    with held(head):
        calm = [answers.ask(prompt, 3) for prompt in prompts]
    expected = answers.wait(calm)
    calls: list[int] = []
    begin = Group.begin_exchange

    def begun(group: Group, *args: Any) -> Any:
        calls.append(group.rank)
        if calls.count(0) == 6:
            head.launcher.kill(2)
        return begin(group, *args)

    monkeypatch.setattr(Group, "begin_exchange", begun)
    failures = head.metrics()["failures"]
    with held(head):
        again = [answers.ask(prompt, 3) for prompt in prompts]
    assert answers.wait(again) == expected
    assert head.metrics()["failures"] > failures
    eventually(lambda: head.metrics()["ranks"] == GPUS)


def test_a_late_short_request_does_not_wait_for_a_long_one(head: RankHead, prompts: Any) -> None:
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    answers = Answers(head)
    alone = answers.wait([answers.ask(prompts[0], 48, ignore_eos=True)])[0]
    calm = answers.wait([answers.ask(prompts[1], 3)])[0]
    long = answers.ask(prompts[0], 48, ignore_eos=True)
    answers.wait_for_tokens(len(alone) + len(calm) + 2)
    short = answers.ask(prompts[1], 3)
    assert answers.wait([short]) == [calm]
    assert long not in answers.ends  # and it loses nothing
    assert answers.wait([long]) == [alone]


def test_an_expert_that_never_arrives_costs_a_generation_and_no_rank(head: RankHead, prompts: Any) -> None:
    """A piece of it keeps a compute phase open, and the other ranks are in the all-to-all that follows."""
    head.use(BatchReplacement("offline", head.spec, head.cluster), striped(head.spec, GPUS))
    answers = Answers(head)
    calm = answers.wait([answers.ask(prompt, 32) for prompt in prompts[:3]])
    answers.tokens.clear()
    ranks, windows = dict(head.launcher.ranks), head.launcher.ranks[1].windows
    requests = [answers.ask(prompt, 32) for prompt in prompts[:3]]
    answers.wait_for_tokens(2)
    generation = head.loop.ranks.generation
    eventually(windows.try_hold)
    eventually(lambda: joined_after(head, generation))
    windows.release()
    assert answers.wait(requests) == calm
    assert head.launcher.ranks == ranks  # none was ended for being silent


def test_requests_that_cannot_be_served_are_refused_and_cancelled_ones_end(head: RankHead, prompts: Any) -> None:
    with refused(UsageError, "empty"):
        head.check([], SamplingParams(max_tokens=1))
    with refused(UsageError, "4096"):
        head.check([4096], SamplingParams(max_tokens=1))
    with refused(CapacityError, "1,024"):
        head.check([1] * 1000, SamplingParams(max_tokens=100))
    answers = Answers(head)
    running, waiting = [answers.ask(prompts[0], 200) for _ in range(6)], answers.ask(prompts[0], 200)
    answers.wait_for_tokens(1)
    for request in (*running, waiting):
        head.cancel(request)
    answers.wait([*running, waiting])
    assert {output.finish for output in answers.ends.values()} == {"cancelled"}
    assert answers.wait([answers.ask(prompts[0], 0)]) == [[]]


def test_nothing_listens_where_no_rank_is(head: RankHead) -> None:
    rank = head.launcher.ranks[0]  # type: ignore[attr-defined]
    assert len(head.addresses) == 1  # a store is for ranks on GPUs
    for _, port in (*head.addresses, rank.transfer.address):
        with socket.create_connection(("127.0.0.1", port), timeout=5.0):
            pass
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=5.0):
            pass


def test_prompts_are_scored_as_by_one_machine(
    head: RankHead, prompts: Any, reference: Path, tokenizer: Any, full: Any
) -> None:
    found = head.prompt_logprobs(prompts[0], 2)
    with torch.inference_mode():
        logits_TV = full.model(torch.tensor([prompts[0]])).logits[0].log_softmax(-1)
    assert found[0] is None and len(found) == len(prompts[0])
    for t, token in enumerate(prompts[0][1:]):
        assert found[t + 1] is not None and found[t + 1].logprob == pytest.approx(float(logits_TV[t, token]), abs=1e-4)
        assert [pair[0] for pair in found[t + 1].top] == logits_TV[t].topk(2).indices.tolist()


def test_a_ranks_first_rows_are_of_its_number_of_compute_threads(
    reference: Path, tokenizer: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, before, found = engines.openmp(), torch.get_num_threads(), list[int]()
    load, head = ExpertBuffers.load, None
    with ThreadPoolExecutor(1) as other:
        threads = other.submit(library.omp_get_max_threads).result() + 1  # a new thread's number is another
        # A large copy would set the number too; not every read of an expert has one.
        monkeypatch.setattr(ExpertBuffers, "load", lambda buffers, key: other.submit(load, buffers, key).result())
        try:
            head = open_head(reference, tokenizer, gpus=2, seats=1, threads=threads)
            buffers = head.launcher.ranks[1].buffers  # type: ignore[attr-defined]
            weights = buffers.weights

            def before_products(key: int) -> Any:
                found.append(library.omp_get_max_threads())
                return weights(key)

            monkeypatch.setattr(buffers, "weights", before_products)
            answers = Answers(head)
            answers.wait([answers.ask(prompts[0], 1)])  # on rank 0 alone
        finally:
            if head is not None:
                head.close()
            torch.set_num_threads(before)
    assert set(found) == {threads}


def test_a_rank_that_cannot_be_built_says_why(tokenizer: Any, reference: Path) -> None:
    with refused(UsageError, "dtype"):
        open_head(reference, tokenizer, gpus=1, dtype="float99", launcher=ThreadRanks())
    assert Checkpoint.open(reference).spec.num_layers == 8


def test_without_any_rank_nobody_is_left_waiting(
    reference: Path, tokenizer: Any, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.01)
    launcher = ThreadRanks(restarts=False)
    head = open_head(reference, tokenizer, gpus=1, launcher=launcher)
    answers = Answers(head)
    request = answers.ask(prompts[0], 500)
    answers.wait_for_tokens(1)
    launcher.kill(0)
    answers.wait([request])
    assert answers.ends[request].finish == "error" and head.state == "failed"
    with pytest.raises(Unavailable):
        head.submit(prompts[0], SamplingParams(max_tokens=1), lambda output: None)
    head.close()
