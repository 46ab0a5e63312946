"""The head of expert-parallel ranks without ranks: what it makes of what they say, in every order that it may come."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.cluster.frames import FrameConnection, LinkError
from moetool.cluster.parallel import channel, members
from moetool.cluster.parallel.batch_loop import BatchLoop
from moetool.cluster.parallel.batch_placement import BatchReplacement
from moetool.cluster.parallel.channel import RankChannel
from moetool.cluster.parallel.members import Members
from moetool.cluster.parallel.rank_head import RankedModel, RankHead
from moetool.cluster.parallel.rank_options import HeadOptions, RankOptions
from moetool.cluster.parallel.requests import RankRequest, Requests
from moetool.placement.request_ranks import RankAssignment
from moetool.runtime.request import Output, SamplingParams, Unavailable
from tests.clusters import make_cluster
from tests.live_page import missing_fields
from tests.refusals import refused
from tests.servers import PATIENCE_S, eventually
from tests.synthetic import make_spec

SPEC = make_spec(1, 4)
CLUSTER = make_cluster([[4, 4]], slot_bytes=SPEC.slot_bytes)


class Launched:
    """A `Launcher` that starts nothing."""

    def __init__(self, fail: int = 0) -> None:
        self.restarted: list[int] = []
        self.released: list[int] = []
        self.fail = fail

    def launch(self, arguments: Sequence[Mapping[str, Any]], on_death: Callable[[int], None]) -> None:
        pass

    def restart(self, gpu: int) -> None:
        self.restarted.append(gpu)
        if len(self.restarted) <= self.fail:
            raise MoetoolError("no machine")

    def kill(self, gpu: int) -> None:
        pass

    def release(self, gpu: int) -> None:
        self.released.append(gpu)

    def close(self) -> None:
        pass


class Told(RankChannel):
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def open_head(starts: str = "round_robin", **options: Any) -> tuple[RankHead, list[Told]]:
    """Two ranks, whole and ready; events are handled by the test."""
    head = RankHead(
        RankedModel(name="model", spec=SPEC, tokenizer=None, vocab_size=16),
        CLUSTER,
        np.array([[[True, True, False, False]], [[False, False, True, True]]]),
        BatchReplacement("offline", SPEC, CLUSTER),
        Launched(),
        rank_options=RankOptions(),
        options=HeadOptions(seating=RankAssignment(server_G=(0, 0), starts=starts), gather_s=0.0, **options),
    )
    channels = [Told(), Told()]
    hello = {"revision": SPEC.revision, "migration": ["", 0], "max_context": 64, "seats": 1}
    hello["memory_bytes"] = {"dense": 100, "kv_cache": 10}
    for gpu, told in enumerate(channels):
        head.loop.handle("hello", (gpu, told, hello))
    head.loop.advance()
    form(head, channels)
    assert head.state == "ready"
    return head, channels


def test_a_rank_with_another_file_ends_the_head() -> None:
    loop = BatchLoop(SPEC, CLUSTER, HeadOptions(), {"config.json": "a", "model.safetensors": "b"})
    hello = {"revision": SPEC.revision, "content": {"config.json": "a", "model.safetensors": "c"}}
    with refused(MismatchError, "GPU 1", "model.safetensors"):
        loop.handle("hello", (1, Told(), hello))
    assert loop.state == "failed" and "another model.safetensors" in loop.reason


def form(head: RankHead, channels: Sequence[Told]) -> None:
    """Those that are there form the generation that was called."""
    there = head.loop.ranks.there
    for kind in ("alive", "holds", "formed"):
        for gpu in there:
            say(head, channels, gpu, {"kind": kind, "generation": head.loop.ranks.generation})


def say(head: RankHead, channels: Sequence[Told], gpu: int, message: dict[str, Any]) -> None:
    """A rank says something."""
    head.loop.handle("message", (gpu, channels[gpu], message))


def submit(head: RankHead, max_tokens: int = 4) -> list[Output]:
    """Ask for something that begins to run."""
    outputs: list[Output] = []
    head.submit([1, 2], SamplingParams(max_tokens=max_tokens), outputs.append)
    head.loop.handle(*head.loop.events.get())
    return outputs


def done(generation: int, batch: int, left: Sequence[int] = ()) -> dict[str, Any]:
    """A rank's message at the end of a batch; requests in `left` go on in the next batch."""
    tally = {"steps": 1, "rows_SL": [[1]], "tokens_LE": [[1, 0, 0, 0]], "sent": [0, 0], "wire": [0.0] * 5}
    return {
        "kind": "done",
        "generation": generation,
        "batch": batch,
        "left": list(left),
        **{"seconds": 1.0, "ready_s": 0.0, "waited_s": 0.0, "held": 2, "version": 1},
        "tally": {**tally, "expert_s": 0.0, "dense_s": 0.0, "exchange_s": 0.0},
        "moved": {"experts": 0, "bytes": 0, "during_exchange": 0, "from_disk": 0, "seconds": 0.0},
    }


@pytest.mark.follows("moetool.cluster.parallel.rank_head RankHead.check")
def test_what_ranks_cannot_answer_is_to_be_left_out() -> None:
    head, _ = open_head()
    for field, asked in (
        ("response_format", SamplingParams(max_tokens=1, grammar=Mock())),
        ("return_routed_experts", SamplingParams(max_tokens=1, return_routes=True)),
    ):
        with refused(UsageError, field, "omit"):
            head.check([1], asked)
    head.check([1], SamplingParams(max_tokens=1))


def test_the_end_of_a_batch_that_was_lost_ends_no_other() -> None:
    head, channels = open_head()
    outputs = submit(head)
    head.loop.advance()
    first = head.loop.ranks.generation
    head.loop.handle("gone", (1, channels[1]))  # it had done its part, and died before it said so
    say(head, channels, 0, done(first, 0))  # said before this one heard of it
    assert head.loop.began is None and not head.batches
    form(head, channels)
    head.loop.advance()
    assert head.loop.batch == 1 and len(head.loop.requests.running) == 1
    say(head, channels, 0, done(first, 1))
    assert len(head.loop.requests.running) == 1 and not outputs
    tokens = {"kind": "tokens", "generation": head.loop.ranks.generation}
    say(head, channels, 0, {**tokens, "outputs": [{"request": 0, "token": 5, "finish": "stop"}]})
    say(head, channels, 0, done(head.loop.ranks.generation, 1))
    assert [(o.token, o.finish) for o in outputs] == [(5, "stop")] and len(head.batches) == 1
    stats = head.stats()
    server = {"status": head.state, "uptime_seconds": 1.0}
    shown = {"model": "model", "settings": [], "server": server, "engine": stats}
    assert missing_fields("ranksView", shown) == {"engine.decisions[0]"}  # the placement is offline
    first, second = stats["experts"]["devices"]
    assert first["resident"] == [1, 1, 1, 1] and not any(second["resident"])  # rank 1 is gone
    assert first["needed"] == [1, 0, 0, 0] and stats["experts"]["by_layer"]["needed"] == [1]
    assert stats["memory_bytes"] == {"dense": 100, "kv_cache": 10, "expert_slots": 4 * SPEC.slot_bytes}


def test_what_was_cancelled_does_not_run_again_when_a_rank_is_lost() -> None:
    head, channels = open_head()
    outputs, others = submit(head), submit(head)
    head.loop.advance()
    head.cancel(0)
    head.loop.handle(*head.loop.events.get())
    assert channels[0].sent[-1] == {"kind": "cancel", "request": 0, "generation": 1}
    head.loop.handle("gone", (0, channels[0]))
    assert [output.finish for output in outputs] == ["cancelled"] and not others
    assert [request.id for request in head.loop.requests.pending] == [1]


def test_requests_start_on_the_ranks_that_the_plan_names() -> None:
    head, channels = open_head(starts="first")
    assert head.max_requests == 1
    submit(head)
    submit(head)
    head.loop.advance()
    assert [len(told.sent[-1]["requests"]) for told in channels] == [1, 0]
    assert len(head.loop.requests.pending) == 1  # for a seat of its own


def _take_all(head: RankHead) -> None:
    """Take in what other threads have posted."""
    while not head.loop.events.empty():
        head.loop.handle(*head.loop.events.get())


def _waits(head: RankHead, max_tokens: int = 4) -> RankRequest:
    """Ask for something that is not submitted yet."""
    submit(head, max_tokens)
    return head.loop.requests.pending.pop()


def test_a_request_joins_the_batch_that_runs_at_a_free_seat() -> None:
    head, channels = open_head()
    outputs, second = submit(head), _waits(head, max_tokens=1)
    head.loop.advance()
    assert head.loop.batch == 0
    head.loop.requests.admit(second)
    third = _waits(head)
    head.loop.requests.admit(third)
    for _ in range(2):
        head.loop.advance()
    joined = [[one for one in told.sent if one["kind"] == "requests"] for told in channels]
    assert not joined[0] and [[one["id"] for one in said["requests"]] for said in joined[1]] == [[1]]
    assert set(head.loop.requests.running) == {0, 1} and list(head.loop.requests.pending) == [third]  # no seat
    assert head.loop.batch == 0 and not outputs and not any(told.sent[-1]["kind"] == "end" for told in channels)


def test_a_request_that_joins_a_batch_as_it_ends_is_served_by_the_next() -> None:
    head, channels = open_head()
    submit(head)
    second = _waits(head)
    head.loop.advance()
    head.loop.requests.admit(second)
    head.loop.advance()
    generation, ends = head.loop.ranks.generation, "the request was lost by its rank"
    say(head, channels, 0, done(generation, 0, left=[0]))
    say(head, channels, 1, done(generation, 0))  # said before it heard of the second
    head.loop.advance()
    assert head.loop.batch == 1 and set(head.loop.requests.running) == {0, 1}
    assert [told.sent[-1]["requests"] for told in channels] == [[], []]  # the rank has been told once
    failed: list[Output] = []
    second.sink = failed.append
    say(head, channels, 0, done(generation, 1, left=[0]))
    say(head, channels, 1, done(generation, 1))
    assert [output.error for output in failed] == [ends]


class Slow(BatchReplacement):
    """Looks ahead, and decides when it may."""

    decides = looks_ahead = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__("offline", SPEC, CLUSTER)
        self.may = threading.Event()

    def decide(self, *_: Any) -> None:
        assert self.may.wait(PATIENCE_S)


def test_requests_that_run_wait_for_no_decision_about_others() -> None:
    head, channels = open_head()
    control = Slow()
    submit(head)
    second = _waits(head)
    head.loop.advance()
    head.loop.placing.control = control
    head.loop.patience_s = 60.0
    generation, tokens = head.loop.ranks.generation, {"request": 0, "token": 5, "finish": None}
    say(head, channels, 0, {"kind": "tokens", "generation": generation, "outputs": [tokens]})
    head.loop.requests.admit(second)
    head.loop.advance()
    assert head.loop.placing.deciding is not None
    for gpu, left in ((0, [0]), (1, [])):
        say(head, channels, gpu, done(generation, 0, left=left))
    head.loop.advance()
    assert head.loop.batch == 1 and set(head.loop.requests.running) == {0}
    control.may.set()
    eventually(lambda: not head.loop.events.empty())
    _take_all(head)
    head.loop.advance()
    assert head.loop.placing.deciding is None and not head.loop.placing.late
    say(head, channels, 0, {"kind": "tokens", "generation": generation, "outputs": [tokens]})
    head.loop.advance()
    head.loop.advance()
    ends = [[message["batch"] for message in told.sent if message["kind"] == "end"] for told in channels]
    assert ends == [[1], [1]]  # asked once, though the head has looked twice
    for gpu, left in ((0, [0]), (1, [])):
        say(head, channels, gpu, done(generation, 1, left=left))
    head.loop.advance()
    assert head.loop.batch == 2 and set(head.loop.requests.running) == {0, 1}
    assert [[one["id"] for one in told.sent[-1]["requests"]] for told in channels] == [[], [1]]


def test_a_request_that_its_rank_no_longer_has_fails() -> None:
    head, channels = open_head()
    outputs = submit(head)
    head.loop.advance()
    for gpu in (0, 1):
        say(head, channels, gpu, done(head.loop.ranks.generation, 0))
    assert [(o.finish, o.error) for o in outputs] == [("error", "the request was lost by its rank")]


def test_nothing_is_settled_before_all_that_has_happened_is_taken_in() -> None:
    head, channels = open_head()
    batches = head.loop
    assert batches.idle
    outputs: list[Output] = []
    head.submit([1, 2], SamplingParams(max_tokens=4), outputs.append)
    kind, value = batches.events.get()
    assert not batches.idle  # taken from the queue, and nowhere else yet
    batches.step(kind, value)
    batches.events.task_done()
    assert not batches.idle
    for gpu in (0, 1):
        say(head, channels, gpu, done(head.loop.ranks.generation, 0))
    assert batches.idle and len(head.batches) == 1


def test_what_is_asked_when_the_head_has_ended_is_refused_and_not_lost() -> None:
    head, _ = open_head()
    outputs = submit(head)
    running = head.state
    head.loop.events.put(("close", None))
    head.loop.run()
    assert [output.finish for output in outputs] == ["error"]
    head.loop.state = running  # somebody has looked just before it ended
    with pytest.raises(Unavailable):
        head.submit([1], SamplingParams(max_tokens=1), outputs.append)
    with pytest.raises(Unavailable):
        head.prompt_logprobs([1, 2], 0)


@pytest.mark.parametrize("state", ["draining", "failed"])
def test_nobody_waits_for_what_a_head_that_has_ended_would_have_done(state: str) -> None:
    head, _ = open_head()
    submit(head)
    if state == "draining":  # it is being closed
        head.loop.state = "draining"
    head.loop.post("close", None)
    head.loop.run()
    assert head.state == state
    with refused(MoetoolError, "engine", "closed"):
        head.wait_idle()
    with refused(MoetoolError, "engine", "closed"):
        head.use(BatchReplacement("offline", SPEC, CLUSTER), head.loop.placing.placed_GLE)


def test_a_request_is_retried_three_times() -> None:
    requests = Requests()
    outputs: list[Output] = []
    requests.admit(RankRequest(id=0, prompt=[1], params=SamplingParams(max_tokens=3), sink=outputs.append))
    for _ in range(3):
        requests.begin(requests.choose(RankAssignment(server_G=(0, 0)), [0], 1))
        requests.begin_again()
        assert not outputs and len(requests.pending) == 1
    (share,) = requests.begin(requests.choose(RankAssignment(server_G=(0, 0)), [1], 1))[1]
    requests.answer({"request": 0, "token": 7, "finish": None})
    assert share["drawn"] == 0 and share["params"]["max_tokens"] == 3
    requests.begin_again()
    assert outputs[-1].finish == "error" and "4 times" in str(outputs[-1].error) and not requests.pending


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.001)


def settle(launched: Launched, count: int) -> None:
    """Until so many restarts were tried."""
    eventually(lambda: len(launched.restarted) >= count)


@pytest.mark.usefixtures("quick")
def test_a_rank_that_ends_before_it_says_hello_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    launched, posted = Launched(), list[tuple[str, Any]]()
    ranks = Members(2, launched, lambda kind, value: posted.append((kind, value)))
    for gpu in range(2):
        ranks.greet(gpu, Told(), ("", 0))
    ranks.call({})
    assert ranks.lose(1)
    settle(launched, 1)
    eventually(lambda: 1 not in ranks.starting)
    for tries in range(2, 6):
        ranks.died(1)
        ranks.died(1)  # said of the same process twice, it counts once
        settle(launched, tries)
        eventually(lambda: 1 not in ranks.starting)
    with caplog.at_level(logging.ERROR):  # at the level that silences all else
        ranks.died(1)
    assert launched.restarted == [1] * 5 and ranks.there == [0]
    assert caplog.messages == ["rank 1 failed to start 5 times; continuing without it"]
    ranks.lose(0)
    assert not ranks.gone  # all are gone, and one is on its way


@pytest.mark.usefixtures("quick")
def test_ranks_that_go_and_come_are_narrated() -> None:
    launched, said = Launched(), list[str]()
    ranks = Members(2, launched, lambda kind, value: None, names=["clinic", "court"], narrate=said.append)

    def form(*there: int) -> None:
        ranks.call({})
        for kind in ("holds", "formed"):
            for gpu in there:
                ranks.heard(gpu, kind, ranks.generation)

    for gpu in range(2):
        ranks.greet(gpu, Told(), ("", 0))
    form(0, 1)
    assert not said  # the command says itself that it serves
    ranks.lose(1)
    form(0)
    assert said == [
        "rank court left, 1 of 2 remain; restarting it",
        "1 of 2 ranks serve, with all experts",
    ]
    settle(launched, 1)
    ranks.greet(1, Told(), ("", 0))
    form(0, 1)
    assert said[2:] == ["rank court is back; 2 of 2 ranks serve"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ends_at_once", [False, True])
def test_a_rank_that_leaves_finishes_its_requests_first(ends_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    head, channels = open_head(narrate=said.append)
    batches, ranks, launched = head.loop, head.loop.ranks, head.launcher
    assert isinstance(launched, Launched)

    def restart(gpu: int) -> None:
        assert gpu in launched.released
        raise CapacityError("no machine")

    monkeypatch.setattr(launched, "restart", restart)
    outputs, waits = submit(head), _waits(head)
    batches.advance()
    running = batches.requests.running[0]
    leaving, other = running.gpu, 1 - running.gpu
    say(head, channels, leaving, {"kind": "leaving"})
    batches.requests.admit(waits)
    batches.advance()
    assert ranks.generation == 1 and list(batches.requests.pending) == [waits] and not launched.released
    if ends_at_once:
        batches.step("gone", (leaving, channels[leaving]))
        assert running.retries == 1
    else:
        last = {"request": 0, "token": 1, "finish": "length"}
        say(head, channels, leaving, {"kind": "tokens", "outputs": [last]})
        for gpu in (0, 1):
            say(head, channels, gpu, done(1, 0))
        batches.advance()
        assert outputs[-1].finish == "length" and not running.retries
    assert ranks.members == [other] and ranks.generation == 2
    form(head, channels)
    eventually(lambda: leaving in launched.released)
    if not ends_at_once:
        batches.step("gone", (leaving, channels[leaving]))
    batches.advance()
    served = running if ends_at_once else waits
    assert served.gpu == other and batches.failures == ends_at_once and head.state == "ready"
    left = "1 of 2 remain; it returns when its machine joins again, or with the next head"
    expected = [f"rank {leaving} is leaving, once the running requests have ended"]
    expected += ["1 of 2 ranks serve, with all experts", f"rank {leaving} left, {left}"]
    assert sorted(said) == sorted(expected)
    ranks.dismiss()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_all_leave_answer_the_waiting_requests_first(dies: bool) -> None:
    head, channels = open_head()
    batches, ranks, launched = head.loop, head.loop.ranks, head.launcher
    assert isinstance(launched, Launched)
    answers = [submit(head), submit(head)]
    batches.advance()
    answers.append(submit(head))
    for gpu in (0, 1):
        say(head, channels, gpu, {"kind": "leaving"})
    if dies:
        batches.step("gone", (1, channels[1]))
        for kind in ("alive", "holds", "formed"):
            say(head, channels, 0, {"kind": kind, "generation": ranks.generation})
    while batches.requests.pending or batches.requests.running:
        batches.advance()
        assert batches.requests.running and not set(launched.released) & set(ranks.members)
        for number, request in list(batches.requests.running.items()):
            last = {"request": number, "token": 1, "finish": "length"}
            say(head, channels, request.gpu, {"kind": "tokens", "outputs": [last]})
        for gpu in ranks.members:
            say(head, channels, gpu, done(ranks.generation, batches.batch))
    assert [outputs[-1].finish for outputs in answers] == ["length"] * 3
    batches.advance()
    assert not batches.requests.running and not ranks.members
    eventually(lambda: set(launched.released) == {0, 1})
    ranks.dismiss()


@pytest.mark.usefixtures("quick")
def test_a_rank_that_leaves_while_a_generation_forms_is_released_once_by_the_next() -> None:
    launched = Launched()
    ranks = Members(3, launched, lambda kind, value: None)

    def form(*members: int) -> None:
        for kind in ("holds", "formed"):
            for gpu in members:
                ranks.heard(gpu, kind, ranks.generation)

    for gpu in range(3):
        ranks.greet(gpu, Told(), ("", 0))
    ranks.call({})
    ranks.leave(2)
    form(0, 1, 2)
    assert ranks.whole and not launched.released  # the others would wait for it
    for _ in range(2):
        ranks.call({})
        form(0, 1)
    ranks.leave(1)
    ranks.call({})
    form(0)
    eventually(lambda: 1 in launched.released)
    assert launched.released == [2, 1]


def test_a_rank_that_returns_after_all_were_lost_serves() -> None:
    head, channels = open_head()
    for gpu in (0, 1):
        head.loop.step("gone", (gpu, channels[gpu]))
    assert not head.loop.ranks.members and head.state == "ready"
    hello = {"revision": SPEC.revision, "migration": ["", 0], "max_context": 64, "seats": 1, "memory_bytes": {}}
    head.loop.step("hello", (1, channels[1], hello))
    form(head, channels)
    submit(head)
    head.loop.advance()
    assert head.loop.ranks.members == [1] and len(head.loop.requests.running) == 1
    head.loop.ranks.dismiss()


@pytest.mark.usefixtures("quick")
def test_a_rank_that_cannot_be_started_is_tried_again() -> None:
    launched = Launched(fail=2)
    posted: list[tuple[str, Any]] = []
    ranks = Members(1, launched, lambda kind, value: posted.append((kind, value)))
    ranks.greet(0, Told(), ("", 0))
    ranks.lose(0)
    for failed in (1, 2):
        eventually(lambda failed=failed: len(posted) == failed)  # type: ignore[misc]
        ranks.died(posted[-1][1])
    eventually(lambda: len(launched.restarted) == 3)
    assert not ranks.gone
    ranks.greet(0, Told(), ("", 0))
    assert ranks.there == [0]


@pytest.mark.usefixtures("quick")
def test_a_rank_whose_machine_has_gone_waits_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MACHINE_S", 0.001)
    launched, is_back = Launched(), threading.Event()
    posted: list[tuple[str, Any]] = []

    def restart(gpu: int) -> None:
        launched.restarted.append(gpu)
        if not is_back.is_set():
            raise CapacityError("no machine")

    monkeypatch.setattr(launched, "restart", restart)
    ranks = Members(2, launched, lambda kind, value: posted.append((kind, value)))
    for gpu in range(2):
        ranks.greet(gpu, Told(), ("", 0))
    ranks.lose(1)
    eventually(lambda: len(launched.restarted) >= 20)  # far more often than one that fails is tried
    assert not ranks.gone
    ranks.lose(0)
    eventually(lambda: posted == [("waits", 1), ("waits", 0)])
    assert ranks.gone  # nobody is there, and nobody can be started
    is_back.set()
    eventually(lambda: not ranks.gone)
    ranks.greet(1, Told(), ("", 0))
    assert ranks.there == [1]


@pytest.mark.usefixtures("quick")
def test_a_rank_without_a_machine_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    head, channels = open_head(narrate=said.append)

    def restart(self: Launched, gpu: int) -> None:
        raise CapacityError("no machine")

    monkeypatch.setattr(Launched, "restart", restart)
    batches = head.loop
    batches.step("gone", (1, channels[1]))
    batches.step(*batches.events.get(timeout=PATIENCE_S))
    assert said == ["rank 1 left, 1 of 2 remain; restarting it", "rank 1 waits for a machine"]
    assert head.problems == ["GPU 1 has no machine; continuing without it"] and head.state == "ready"
    with refused(MoetoolError, "ranks", "ended"):
        batches.step("gone", (0, channels[0]))
        batches.step(*batches.events.get(timeout=PATIENCE_S))
    batches.ranks.dismiss()


def test_a_rank_that_reads_for_long_is_not_ended_and_a_silent_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, now = Launched(), [1000.0]
    killed: list[int] = []
    monkeypatch.setattr(launched, "kill", killed.append)
    monkeypatch.setattr(members, "monotonic", lambda: now[0])
    ranks = Members(3, launched, lambda kind, value: None)
    for gpu in range(3):
        ranks.greet(gpu, Told(), ("", 0))
    ranks.call({})
    for gpu in range(3):
        ranks.heard(gpu, "alive", 1)
    ranks.heard(0, "holds", 1)
    for _ in range(20):  # 0 is through, 1 reads, 2 has stopped
        now[0] += 5.0
        ranks.heard(1, "alive", 1)
        ranks.heard(1, "alive", 0)  # said while it read for the one before
        ranks.end_silent()
    assert set(killed) == {2}
    killed.clear()
    ranks.heard(2, "holds", 1)
    ranks.heard(1, "holds", 1)
    ranks.end_silent()
    now[0] += 50.0
    ranks.heard(0, "formed", 1)
    ranks.end_silent()
    assert not killed
    now[0] += 20.0
    ranks.end_silent()
    assert killed == [1, 2]


@pytest.fixture
def pair() -> Iterator[tuple[RankChannel, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    yield RankChannel(FrameConnection(near, 2**20)), far
    near.close()
    far.close()


def test_who_takes_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[RankChannel, socket.socket]
) -> None:
    monkeypatch.setattr(channel, "TAKEN_S", 0.1)
    monkeypatch.setattr(channel, "LEAST_BYTES_S", 1e9)
    made = pair[0]
    heard: list[BaseException] = []

    def hear() -> None:
        try:
            made.receive()
        except LinkError as error:
            heard.append(error)

    thread = threading.Thread(target=hear, daemon=True)
    thread.start()
    with pytest.raises(LinkError):
        made.send({}, bytes(16 * 2**20))  # a process that was stopped takes what fits into the system's buffers
    thread.join(PATIENCE_S)
    assert heard  # and its own thread says that it is gone
