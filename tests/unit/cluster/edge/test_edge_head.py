"""The head of a cluster: who is told what, and what it does when servers die; the servers are made up here."""

import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge import edge_head as edge
from moetool.cluster.edge.edge_head import EdgeHead
from moetool.cluster.edge.protocol import ArrivedExpert, ExpertLocations, ExpertLocationsUpdate, WorkerInfo
from moetool.cluster.edge.server_settings import Endpoints, held_by, worker_settings
from moetool.cluster.edge.worker import Worker, WorkerSettings, message_bytes
from moetool.cluster.transport import own_address
from moetool.cluster.worker_link import WorkerDied
from moetool.models.checkpoint import Checkpoint
from moetool.placement.plan import PlacementPlan
from moetool.runtime.serve_options import ServeOptions
from moetool.serving.server_options import ServerOptions
from tests.clusters import make_cluster, make_plan
from tests.identities import NOBODY, identity
from tests.refusals import refused
from tests.servers import eventually
from tests.synthetic import make_spec

EXPERTS_L = (4, 4)
ALL = {(layer, expert) for layer in range(2) for expert in range(4)}
Held = Sequence[set[tuple[int, int]]]


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self.server, self.slots, self.port = settings.server, settings.capacity, settings.port
        self.held = set(settings.held)
        self.holders: list[ExpertLocations] = []
        self.changes: list[ExpertLocationsUpdate] = []
        self.hangs = self.leaving = False
        self.idle = threading.Event()
        self.idle.set()

    def info(self) -> WorkerInfo:
        held = tuple(sorted(self.held))
        url = f"http://127.0.0.1:{self.port or 5000 + self.server}"
        version = self.holders[-1].version if self.holders else -1
        return WorkerInfo(
            server=self.server,
            url=url,
            peer=("127.0.0.1", self.server),
            held=held,
            slots=self.slots,
            version=version,
            leaving=self.leaving,
        )

    def stats(self) -> str:
        return f"stats {self.server}"

    def set_holders(self, holders: ExpertLocations) -> None:
        if not self.holders or holders.version > self.holders[-1].version:
            self.holders.append(holders)

    def change_holders(self, change: ExpertLocationsUpdate) -> bool:
        if not self.holders or (changed := change.applied_to(self.holders[-1])) is None:
            return False
        self.changes.append(change)
        self.holders.append(changed)
        return True

    def adopt_all(self, moves: Sequence[tuple[int, int, int]]) -> list[ArrivedExpert | str]:
        arrived: list[ArrivedExpert | str] = []
        for move in moves:
            try:
                arrived.append(self.adopt(*move))
            except MoetoolError as error:
                arrived.append(str(error))
        return arrived

    def time_copies(self, moves: Sequence[tuple[int, int, int]]) -> list[ArrivedExpert]:
        return [ArrivedExpert(source=source, bytes=1, seconds=0.5) for *_, source in moves]

    def drop_all(self, places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            self.drop(*place)

    def adopt(self, layer: int, expert: int, source: int) -> ArrivedExpert:
        if len(self.held) >= self.slots:
            raise CapacityError("full")
        self.held.add((layer, expert))
        return ArrivedExpert(source=source, bytes=1, seconds=0.0)

    def drop(self, layer: int, expert: int) -> None:
        self.held.discard((layer, expert))

    def drain(self) -> None:
        self.idle.wait(20)


class _Processes:
    """Stands in for the workers' processes; a test kills them and lets them hang."""

    def __init__(self, settings: Sequence[WorkerSettings], late: Sequence[int]) -> None:
        self.late = set(late)
        self.workers = [None if n in self.late else _Worker(own) for n, own in enumerate(settings)]
        self.watching: dict[int, Callable[[int], None]] = {}
        self.may_start = threading.Event()
        self.may_start.set()
        self.killed: list[int] = []
        self.fails_to_start = Counter[int]()
        self.loses_answers_to = ""
        self.on_release: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self.workers)

    def __getitem__(self, n: int) -> _Worker:
        worker = self.workers[n]
        assert worker is not None
        return worker

    def call(self, n: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        worker = self.workers[n]
        if worker is None:
            raise WorkerDied(f"server {n} has ended")
        if worker.hangs:
            time.sleep(timeout_s)
            raise MoetoolError(f"server {n} did not answer")
        answer = getattr(worker, method)(*args)
        if method == self.loses_answers_to:
            raise MoetoolError(f"server {n} did not answer {method}")
        return answer

    def restart(self, n: int, arguments: Mapping[str, Any] | None = None) -> None:
        self.may_start.wait(20)
        if n in self.late:
            raise CapacityError("no machine")
        if self.fails_to_start[n]:
            self.fails_to_start[n] -= 1
            raise MoetoolError("the port is in use")
        assert arguments is not None
        self.workers[n] = _Worker(arguments["settings"])

    def is_started(self, n: int) -> bool:
        return n not in self.late

    def kill(self, n: int) -> None:
        self.killed.append(n)
        self.workers[n] = None

    def release(self, n: int) -> None:
        self.on_release()
        self.late.add(n)
        self.workers[n] = None

    def die(self, n: int) -> None:
        self.workers[n] = None
        self.watching[n](n)

    def watch(self, n: int, on_death: Callable[[int], None]) -> None:
        self.watching[n] = on_death

    def close(self) -> None:
        self.may_start.set()
        self.workers = [None] * len(self)


class _Cluster:
    def __init__(self, held: Held, slots: int, **options: Any) -> None:
        self.lines: list[str] = []
        settings = [
            WorkerSettings(
                server=n, model="m", revision="r", held=tuple(sorted(own)), capacity=slots, identity=NOBODY, distance=()
            )
            for n, own in enumerate(held)
        ]
        self.processes = _Processes(settings, options.pop("late", ()))
        scheduler = options.pop("scheduler", None)
        meanwhile = options.pop("meanwhile", None)
        if meanwhile is not None:
            meanwhile(self.processes)
        self.head = EdgeHead(
            self.processes,
            settings,
            [f"s{n}" for n in range(len(held))],
            EXPERTS_L,
            options=ClusterOptions(ping_s=0.02, hang_s=0.1, **options),
            narrate=self.lines.append,
            scheduler=scheduler,
        )
        self.head.start(taken_over=meanwhile is not None)

    def agree(self) -> bool:
        """Whether every server has been told, and rightly, what all of them hold."""
        workers = [worker for worker in self.processes.workers if worker is not None]
        held = {worker.server: worker.held for worker in workers}
        for worker in workers:
            if not worker.holders:
                return False
            for layer, experts in enumerate(worker.holders[-1].servers_LE):
                for expert, servers in enumerate(experts):
                    if set(servers) != {n for n, has in held.items() if (layer, expert) in has}:
                        return False
            if [n for n, at in enumerate(worker.holders[-1].peers) if at is not None] != sorted(held):
                return False
        return True

    def covered(self) -> set[tuple[int, int]]:
        return {at for worker in self.processes.workers if worker is not None for at in worker.held}


@pytest.fixture
def start() -> Iterator[Callable[..., _Cluster]]:
    made: list[_Cluster] = []

    def call(held: Held, slots: int, **options: Any) -> _Cluster:
        made.append(_Cluster(held, slots, **options))
        return made[-1]

    yield call
    for cluster in made:
        cluster.head.close()
        assert not any(thread.is_alive() for thread in cluster.head.threads)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "RESTART_S", (0.01, 0.02))


HALVES: Held = [{at for at in ALL if at[1] < 2}, {at for at in ALL if at[1] == 2}, {at for at in ALL if at[1] == 3}]


def test_everybody_is_told_what_all_hold(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 4)
    assert cluster.agree() and cluster.head.stats() == ["stats 0", "stats 1", "stats 2"]
    before = cluster.processes[0].holders[-1].version
    cluster.head.adopt(1, 0, 0, source=0)
    assert cluster.agree() and cluster.processes[0].holders[-1].version > before
    cluster.head.drop(0, 0, 0)
    assert cluster.agree() and (0, 0) not in cluster.processes[0].held
    with refused(MoetoolError, "s1", "expert 0", "layer 0"):
        cluster.head.drop(1, 0, 0)
    assert cluster.head.holders() == cluster.processes[2].holders[-1]


def test_a_round_of_moves_is_told_twice_and_by_what_has_changed(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 4)
    worker, heard = cluster.processes[2], len(cluster.processes[2].holders)
    made = cluster.head.move([], [(1, (0, 0), 0), (1, (0, 1), 0), (2, (1, 0), 0)])
    assert set(made.arrived) == {(1, (0, 0)), (1, (0, 1)), (2, (1, 0))} and not made.failed
    assert len(worker.holders) == heard + 1 and cluster.agree()
    assert worker.changes[-1].servers == {(0, 0): (0, 1), (0, 1): (0, 1), (1, 0): (0, 2)}
    made = cluster.head.move([(0, (0, 0)), (0, (1, 1)), (0, (0, 1))], [(1, (1, 1), 0)])
    assert [(server, at) for server, at, _ in made.failed] == [(0, (1, 1)), (1, (1, 1))]
    assert "s0 is the only one" in str(made.failed[0][2]) and str(made.failed[1][2]) == "full"
    assert cluster.agree() and cluster.processes[0].held == {(1, 0), (1, 1)}
    assert len(worker.holders) == heard + 2  # before the drops; nothing has arrived


def test_copies_are_timed_where_a_server_answers(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 6)
    held = cluster.head.held()
    timed = cluster.head.time_copies([(1, (0, 0), 0), (1, (0, 1), 0)])
    assert timed == [(1, ArrivedExpert(source=0, bytes=1, seconds=0.5))] * 2 and cluster.head.held() == held
    cluster.processes.loses_answers_to = "time_copies"
    assert cluster.head.time_copies([(1, (0, 0), 0)]) == []


@pytest.mark.parametrize("method", ["adopt_all", "adopt"])
def test_an_expert_that_arrived_though_nobody_heard_of_it_is_known(start: Callable[..., _Cluster], method: str) -> None:
    cluster = start(HALVES, 6)
    cluster.processes.loses_answers_to = method
    if method == "adopt_all":
        assert [at for _, at, _ in cluster.head.move([], [(1, (0, 0), 0)]).failed] == [(0, 0)]
    else:
        with refused(MoetoolError, "adopt"):
            cluster.head.adopt(1, 0, 0, 0)
    assert (0, 0) in cluster.processes[1].held
    eventually(lambda: (0, 0) in cluster.head.held()[1] and cluster.agree())


def test_an_expert_that_a_server_no_longer_holds_is_read_again(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 6)
    cluster.processes[1].held.discard((0, 2))  # and nobody else has it
    eventually(lambda: cluster.covered() == ALL and cluster.agree())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_goes_is_replaced_and_comes_back(start: Callable[..., _Cluster], hangs: bool) -> None:
    cluster = start(HALVES, 6)
    cluster.processes.may_start.clear()
    if hangs:
        cluster.processes[0].hangs = True
        eventually(lambda: cluster.processes.killed == [0])
    else:
        cluster.processes.die(0)
    eventually(lambda: cluster.covered() == ALL and cluster.agree())  # by the two others
    assert cluster.head.infos()[0] is None and cluster.head.stats()[0] is None
    with refused(MoetoolError, "s0"):
        cluster.head.adopt(0, 0, 0, -1)
    with refused(MoetoolError, "s0"):
        cluster.head.drop(0, 0, 0)
    cluster.processes.may_start.set()
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == list(HALVES))
    eventually(cluster.agree)
    assert cluster.processes[0].port == 5000  # where its users know it
    eventually(lambda: any("s0 is back on http://127.0.0.1:5000/v1 with 4 experts" in line for line in cluster.lines))
    assert any("4 experts without a server are placed on other servers" in line for line in cluster.lines)


def test_a_server_that_leaves_is_replaced_before_it_ends_and_stays_away(start: Callable[..., _Cluster]) -> None:
    own = {(0, 0), (0, 1), (1, 0)}
    cluster = start([own, HALVES[1] | {(1, 1)}, HALVES[2]], 3)  # there is room for one of its experts
    leaving, others = cluster.processes[0], (cluster.processes[1], cluster.processes[2])
    told = list[tuple[str, int] | None]()
    leaving.idle.clear()
    leaving.leaving = True
    eventually(lambda: any("2 experts are unplaced" in line for line in cluster.lines))
    assert cluster.covered() == ALL and cluster.head.infos()[0] is None  # no scheduler plans with it
    with refused(MoetoolError, "s0"):
        cluster.head.adopt(0, 0, 2, -1)
    for worker in (*others, leaving):  # which has users of its own for now
        holders = worker.holders[-1]
        called = {(i, e) for i in range(2) for e in range(4) if 0 in holders.servers_LE[i][e]}
        assert called == leaving.held - others[0].held - others[1].held and len(called) == 2
        assert holders.peers[0] == ("127.0.0.1", 0)
    assert not any("has left" in line for line in cluster.lines)
    cluster.processes.on_release = lambda: told.extend(worker.holders[-1].peers[0] for worker in others)
    leaving.idle.set()
    left = "server s0 has left; it returns when its machine joins again, or with the next head"
    eventually(lambda: left in cluster.lines)
    eventually(cluster.agree)
    assert not cluster.processes.killed and cluster.processes.workers[0] is None
    assert told == [None, None]  # nobody calls it when it ends
    cluster.processes.late.clear()
    eventually(lambda: cluster.processes.workers[0] is not None and cluster.processes[0].held == own)
    eventually(cluster.agree)
    assert [line for line in cluster.lines if "s0" in line] == [
        "server s0 is leaving: it finishes its requests within 30 s and accepts no new ones",
        left,
        "server s0 is back on http://127.0.0.1:5000/v1 with 3 experts",
    ]


def test_a_head_that_closes_meanwhile_tells_of_no_unplaced_experts(
    start: Callable[..., _Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(HALVES, 6)
    worker, adopt = cluster.processes[1], cluster.processes[1].adopt

    def closes(layer: int, expert: int, source: int) -> ArrivedExpert:
        cluster.head.drain(1.0)
        return adopt(layer, expert, source)

    for one in cluster.processes.workers[1:]:
        monkeypatch.setattr(one, "adopt", closes)
    cluster.processes[0].leaving = True
    (watcher,) = (thread for thread in cluster.head.threads if thread.name == "server-0")
    eventually(lambda: not watcher.is_alive())
    assert len(worker.held) > len(HALVES[1]) and cluster.covered() != ALL
    assert not any("unplaced" in line for line in cluster.lines)


def test_replicas_make_room_and_come_back(start: Callable[..., _Cluster]) -> None:
    low, high = {at for at in ALL if at[1] < 3}, {at for at in ALL if at[1] > 0}
    cluster = start([low, high, {(0, 0), (1, 3)}], 6)
    cluster.processes.may_start.clear()
    cluster.processes.die(0)  # alone with (1, 0)
    eventually(lambda: cluster.covered() == ALL and cluster.agree())
    cluster.processes.may_start.set()
    wanted = [low, high, {(0, 0), (1, 3)}]
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == wanted)
    eventually(cluster.agree)


def test_what_fits_nowhere_is_said_and_the_rest_goes_on(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 4)
    cluster.processes.may_start.clear()
    cluster.processes.die(0)
    eventually(lambda: cluster.covered() == ALL)  # two more each
    cluster.processes.die(1)  # now two are gone, and one has room for four
    eventually(lambda: any("4 experts are unplaced until their server returns" in line for line in cluster.lines))
    assert len(cluster.covered()) == 4 and cluster.agree()
    cluster.processes.may_start.set()
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == list(HALVES))
    eventually(cluster.agree)


def test_moves_by_the_scheduler_outlive_a_death(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 5)
    cluster.head.adopt(1, 0, 0, 0)
    cluster.head.drop(0, 0, 0)
    cluster.processes.die(1)
    wanted = [HALVES[0] - {(0, 0)}, HALVES[1] | {(0, 0)}, HALVES[2]]
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == wanted)
    eventually(cluster.agree)


def test_a_server_that_fails_to_start_is_tried_again_elsewhere(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 6)
    cluster.processes.fails_to_start[2] = 2
    cluster.processes.die(2)
    eventually(lambda: cluster.processes.workers[2] is not None)
    assert cluster.processes[2].port == 0  # any free port, since its own did not do
    assert sum("failed to start: the port is in use; retrying" in line for line in cluster.lines) == 2
    eventually(cluster.agree)


def test_a_server_whose_machine_joins_later(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 6, late=[0])
    eventually(lambda: cluster.covered() == ALL and cluster.agree())
    assert cluster.head.infos()[0] is None
    cluster.processes.late.clear()
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == list(HALVES))
    eventually(cluster.agree)
    assert cluster.lines.count("server s0 waits for a machine: no machine") == 1
    joined = "server s0 has joined and serves on http://127.0.0.1:5000/v1 with 4"
    eventually(lambda: any(joined in line for line in cluster.lines))


def test_a_server_whose_machine_was_away_comes_back_where_its_users_know_it(start: Callable[..., _Cluster]) -> None:
    cluster = start(HALVES, 6)
    cluster.processes.late.add(1)
    cluster.processes.die(1)
    eventually(lambda: "server s1 waits for a machine: no machine" in cluster.lines)
    cluster.processes.late.clear()
    eventually(lambda: cluster.processes.workers[1] is not None)
    assert cluster.processes[1].port == 5001
    eventually(cluster.agree)


def test_random_deaths(start: Callable[..., _Cluster]) -> None:
    cluster, draw = start(HALVES, 6), random.Random(0)
    for _ in range(30):
        n = draw.randrange(3)
        if cluster.processes.workers[n] is not None and n in cluster.processes.watching:
            cluster.processes.die(n)
        time.sleep(draw.uniform(0, 0.02))
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == list(HALVES))
    eventually(cluster.agree)


def test_servers_of_an_earlier_head_keep_what_they_hold(start: Callable[..., _Cluster]) -> None:
    wanted = [HALVES[0] - {(0, 0)}, HALVES[1] | {(0, 0)}, HALVES[2]]

    def moved(processes: _Processes) -> None:
        for n, held in enumerate(wanted):
            processes[n].held = set(held)
            processes[n].holders = [ExpertLocations(version=50 + n, servers_LE=(((),) * 4,) * 2, peers=(None,) * 3)]

    cluster = start(HALVES, 5, meanwhile=moved)
    assert cluster.agree() and cluster.processes[0].holders[-1].version > 52
    cluster.processes.die(1)
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == wanted)
    eventually(cluster.agree)


def test_what_is_wrong_with_one_server_ends_no_other_that_was_taken_over(start: Callable[..., _Cluster]) -> None:
    there: list[_Worker] = []

    def died(processes: _Processes) -> None:
        there.extend((processes[0], processes[2]))
        processes.workers[1] = None

    cluster = start(HALVES, 6, meanwhile=died)
    assert "server s1 does not serve: server 1 has ended; restarting it" in cluster.lines
    eventually(lambda: [worker and worker.held for worker in cluster.processes.workers] == list(HALVES))
    eventually(cluster.agree)
    assert [cluster.processes[0], cluster.processes[2]] == there and not cluster.processes.killed


class _Scheduler:
    tick_s = 0.01

    def __init__(self) -> None:
        self.ticks = 0

    def on_tick(self, head: EdgeHead) -> None:
        self.ticks += 1
        if self.ticks == 1:
            raise RuntimeError("a bug")
        if self.ticks == 2:
            head.adopt(2, 0, 0, 0)


def test_a_scheduler_is_asked_again_after_an_error(start: Callable[..., _Cluster]) -> None:
    scheduler = _Scheduler()
    cluster = start(HALVES, 4, scheduler=scheduler)
    eventually(lambda: scheduler.ticks > 3)
    assert "the scheduler: RuntimeError: a bug" in cluster.lines
    assert (0, 0) in cluster.processes[2].held and cluster.agree()


def test_what_a_plan_becomes() -> None:
    spec = make_spec(layers=2, experts=4)
    cluster = make_cluster([[3], [2, 3]], slot_bytes=spec.slot_bytes)
    placed_GLE = np.zeros((3, 2, 4), bool)
    placed_GLE[0, 0, :3] = placed_GLE[1, 1, :2] = placed_GLE[2, 1, 1:] = True
    plan = make_plan(spec, cluster, placed_GLE)
    assert held_by(plan, 0) == ((0, 0), (0, 1), (0, 2))
    assert held_by(plan, 1) == ((1, 0), (1, 1), (1, 2), (1, 3))  # once, though two GPUs have it


def _settings(
    reference: Path,
    *,
    slots: int = 128,
    gpus: int = 1,
    options: Any = None,
    port: int = 8000,
    toward: str = "",
    **cluster: Any,
) -> Any:
    spec = Checkpoint.open(reference).spec
    placed_GLE = np.zeros((1 + gpus, 8, 32), bool)
    placed_GLE[0, :, :16] = placed_GLE[1, :, 16:] = True
    machines = make_cluster([[slots], [slots] * gpus], slot_bytes=spec.slot_bytes, link_bytes_s=1e6, link_latency_s=0.5)
    return worker_settings(
        Checkpoint.open("reference"),
        make_plan(spec, machines, placed_GLE),
        identify=lambda name: replace(NOBODY, name=name, key="tttt"),
        endpoints=Endpoints(port=port, toward=toward),
        options=options or ServeOptions(),
        limits=ServerOptions(),
        cluster=ClusterOptions(**cluster),
    )


@pytest.mark.follows("moetool.cluster.edge.server_settings worker_settings")
def test_settings_of_each_server(reference: Path) -> None:
    first, second = _settings(reference, slots=150, emulate_links=True, call_timeout_s=3.0)
    assert (first.capacity, len(first.held), first.port, second.port) == (150, 128, 8000, 8001)
    assert first.links == {1: (1e6, 0.5)} and second.links == {0: (1e6, 0.5)}
    assert first.distance[1] == pytest.approx(2 * (0.5 + 4 * 192 / 1e6)) and first.cluster.call_timeout_s == 3.0
    assert _settings(reference)[0].links == {}
    assert "tttt" not in repr(first)  # a key is not for logs
    assert [one.options.devices for one in _settings(reference, options=ServeOptions(devices=2))] == [2, 2]
    on_gpus = _settings(reference, options=ServeOptions(device="cuda"), gpus=3)
    assert [(one.options.devices, one.options.first_device) for one in on_gpus] == [(1, 0), (3, 1)]
    on_hosts = _settings(reference, options=ServeOptions(device="cuda"), gpus=3, toward="10.0.0.1:6379")
    assert [one.options.first_device for one in on_hosts] == [0, 0]
    given = _settings(reference, options=ServeOptions(device="cuda", first_device=2), gpus=3)
    assert [one.options.first_device for one in given] == [2, 2]
    with refused(UsageError, "state", "policies", "learn"):
        _settings(reference, options=ServeOptions(state="x"))
    with refused(UsageError, "keep_prefixes"):
        _settings(reference, options=ServeOptions(keep_prefixes=True))
    with refused(UsageError, 65535, "--port"):
        _settings(reference, port=65535)
    assert [one.port for one in _settings(reference, port=65534)] == [65534, 65535]
    with refused(CapacityError, "GPU 0"):
        _settings(reference, slots=127)
    with refused(MismatchError, "plan", "model"):
        worker_settings(
            Checkpoint.open("reference"),
            _other_plan(make_spec()),
            identify=identity,
            endpoints=Endpoints(),
            options=ServeOptions(),
            limits=ServerOptions(),
            cluster=ClusterOptions(),
        )


@pytest.mark.follows("moetool.cluster.edge.worker _require_revision")
def test_a_server_has_the_model_of_the_plan(reference: Path, tmp_path: Path) -> None:
    there = shutil.copytree(reference, tmp_path / "m")
    config = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    settings = replace(_settings(reference)[0], model=str(there), content={"config.json": "0" * 64})
    with refused(MismatchError, "copy the plan's model there", "moetool plan placement"):
        Worker(settings)
    shutil.copytree(reference, there, dirs_exist_ok=True)
    with refused(MismatchError, "another config.json than the head"):  # the next check
        Worker(settings)


def _other_plan(spec: Any) -> PlacementPlan:
    placed_GLE = np.ones((1, spec.num_layers, spec.num_experts), bool)
    return make_plan(spec, make_cluster([[spec.total_experts]], slot_bytes=spec.slot_bytes), placed_GLE)


def test_options_that_make_no_sense() -> None:
    with refused(UsageError, "cluster.ping_s", 0):
        ClusterOptions(ping_s=0)
    with refused(UsageError, "cluster.slots", -1, 0):
        ClusterOptions(slots=-1)


def test_the_own_address_on_the_way_to_another() -> None:
    assert own_address("127.0.0.1:6379") == own_address("127.0.0.1") == "127.0.0.1"
    with refused(MoetoolError, "nowhere.invalid"):
        own_address("nowhere.invalid:6379")


def test_a_message_may_have_the_rows_of_the_longest_prompt() -> None:
    spec = replace(make_spec(2, 8), hidden_size=2048)
    # All rows of a prompt that is scored, which is one forward, may be for experts of one server.
    rows = 100_000 * max(spec.top_k_L)
    assert message_bytes(spec, 100_000) >= rows * spec.hidden_size * 4 > 64 * 2**20
    assert message_bytes(spec, 16) >= spec.slot_bytes + 512 * max(spec.top_k_L) * spec.hidden_size * 4
