"""The scheduler and the head of a cluster together, over workers that draw tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

from moetool.bench.live_cluster.sites import Threads
from moetool.cluster.edge.edge_head import ClusterOptions, EdgeHead
from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions
from moetool.cluster.edge.worker import WorkerSettings
from tests.edge_workers import DrawnWorker, odds
from tests.identities import NOBODY
from tests.unit.cluster.edge.test_scheduler import CLUSTER, SLOTS, SPEC, planned

ODDS_NLE = odds(SPEC, 3)


class Drawn(DrawnWorker):
    """Does what a real one does where it holds an expert already."""

    def adopt(self, layer: int, expert: int, source: int) -> Any:
        assert (layer, expert) not in self.held
        return super().adopt(layer, expert, source)


@pytest.fixture
def workers() -> dict[int, DrawnWorker]:
    return {}


@pytest.fixture
def head(workers: dict[int, DrawnWorker]) -> Iterator[EdgeHead]:
    held = planned(ODDS_NLE, "uniform")

    def build(server: int) -> DrawnWorker:
        return Drawn(server, SPEC, held[server], SLOTS[server], ODDS_NLE[server], workers)

    settings = [
        WorkerSettings(
            server=n,
            model="drawn",
            revision=SPEC.revision,
            held=tuple(sorted(held[n])),
            capacity=SLOTS[n],
            identity=NOBODY,
            distance=(1.0,) * 3,
        )
        for n in range(3)
    ]
    processes = Threads(build, [{"server": n} for n in range(3)])
    made = EdgeHead(processes, settings, ("s0", "s1", "s2"), SPEC.num_experts_L, options=ClusterOptions(ping_s=60.0))
    made.start()
    yield made
    made.close()


def test_experts_move_through_the_head_and_everybody_knows(head: EdgeHead, workers: dict[int, DrawnWorker]) -> None:
    scheduler = Scheduler(SPEC, CLUSTER, SchedulerOptions(interval_s=60.0, poll_s=5.0, half_life_s=60.0))
    now_s, seen = 1e6, 0
    while now_s < 1e6 + 200:
        wait_s = max(1e-3, min(5.0, scheduler.tick(head, now_s)))
        seen += scheduler.migrating
        for worker in workers.values():
            worker.serve(max(1, int(12 * wait_s)), wait_s)  # says so if an expert is called where it is not
        now_s += wait_s
    made = [decision for decision in scheduler.history.decisions if decision.made]
    assert seen > 1 and [decision.outcome for decision in made][:1] == ["done"]
    assert made[0].local_after > made[0].local_before + 0.2
    assert [worker.held for _, worker in sorted(workers.items())] == head.held()
    assert all(worker.holders == head.holders() for worker in workers.values())
    shown = scheduler.snapshot()
    assert [server["url"] for server in shown["servers"]] == [f"http://127.0.0.1:{9000 + n}" for n in range(3)]
    assert shown["uncovered"] == 0
