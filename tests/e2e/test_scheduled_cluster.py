"""The scheduler over servers that compute: what they find at home, and what migrations do to their answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.types import Cluster
from moetool.capture.job import CaptureOptions
from moetool.capture.run import capture
from moetool.cluster.edge.protocol import ArrivedExpert, ExpertLocations, ExpertLocationsUpdate, WorkerInfo, WorkerStats
from moetool.cluster.edge.replacement import places_of
from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions
from moetool.models.checkpoint import Checkpoint
from moetool.placement.plan import Place, PlacementPlan
from moetool.placement.planning import plan_placement, score_plan
from moetool.prompts.gather import gather
from moetool.runtime.request import Output, SamplingParams
from moetool.trace.edit import split
from moetool.trace.reader import Trace
from tests.clusters import make_cluster
from tests.edge import Node, Nodes, cluster
from tests.edge_workers import Table
from tests.engines import engine

TASKS = ("arithmetic", "code", "narratives")
NEW_TOKENS = 2
LETTERS = 160  # of a prompt
SLOTS = (96, 96, 96)
BASELINES = ("uniform", "redundant", "smartmoe", "eplb")


class NodeWorker:
    """A server of this process, as the scheduler asks it."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            server=self.node.server,
            url="",
            peer=self.node.listener.address,
            held=self.node.experts.held,
            slots=self.node.experts.holding.capacity,
        )

    def stats(self) -> WorkerStats:
        return self.node.meter.take(0)

    def set_holders(self, holders: ExpertLocations) -> None:
        self.node.experts.set_holders(holders)

    def change_holders(self, change: ExpertLocationsUpdate) -> bool:
        return self.node.experts.change_holders(change)

    def adopt_all(self, moves: Sequence[tuple[int, int, int]]) -> list[ArrivedExpert | str]:
        return self.node.experts.adopt_all(moves)

    def time_copies(self, moves: Sequence[tuple[int, int, int]]) -> list[ArrivedExpert]:
        return self.node.experts.time_copies(moves)

    def drop_all(self, places: Sequence[tuple[int, int]]) -> None:
        for place in places:
            self.drop(*place)

    def adopt(self, layer: int, expert: int, source: int) -> ArrivedExpert:
        return self.node.experts.adopt(layer, expert, source)

    def drop(self, layer: int, expert: int) -> None:
        self.node.experts.drop(layer, expert)

    def drain(self) -> None:
        """Nothing runs but what the test steps."""

    def close(self) -> None:
        """The test closes the nodes."""


@dataclass(frozen=True)
class Work:
    """Planned and served workloads of servers: one task per server.

    Attributes:
        planned: traces by server.
        served: the same, of other prompts.
        ids: the tokens of those prompts, by server.
    """

    planned: dict[str, Trace]
    served: dict[str, Trace]
    ids: list[list[list[int]]]


@pytest.fixture(scope="module")
def work(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """Captured once, then parted."""
    folder = tmp_path_factory.mktemp("traces")
    prompts = [
        replace(prompt, text=prompt.text[-LETTERS:])
        for task in TASKS
        for prompt in gather([task], max_prompts=6).prompts
    ]
    capture(
        "reference",
        prompts,
        folder / "all",
        CaptureOptions(max_new_tokens=NEW_TOKENS, keep=("topk",), batch_size=8, dtype="float32"),
    )
    halves = split(Trace(folder / "all"), folder / "halves", by="request", shares=(0.5,))
    parts = [split(half, folder / f"tasks-{name}", by="task") for name, half in sorted(halves.items())]
    planned, served = ({f"s{n}": part[task] for n, task in enumerate(TASKS)} for part in parts)
    texts = {prompt.prompt_id: prompt.text for prompt in prompts}
    ids = [
        [tokenizer(texts[name])["input_ids"] for name in trace.requests["prompt_id"].to_pylist()]
        for trace in served.values()
    ]
    assert [len(part) for part in ids] == [3, 3, 3]
    return Work(planned=planned, served=served, ids=ids)


@pytest.fixture(scope="module")
def machines(reference: Path) -> Cluster:

    return make_cluster([[room] for room in SLOTS], Checkpoint.open(reference).spec.slot_bytes)


@pytest.fixture(scope="module")
def plans(work: Work, machines: Cluster) -> dict[str, PlacementPlan]:
    return {name: plan_placement(work.planned, machines, name, {})[0] for name in (*BASELINES, "prism", "prism_exact")}


@pytest.fixture(scope="module")
def nodes(reference: Path, tokenizer: Any, plans: dict[str, PlacementPlan]) -> Iterator[Nodes]:
    """Three servers under the uniform placement."""
    with cluster(reference, tokenizer, held_by(plans["uniform"]), capacity=SLOTS[0]) as made:
        yield made


def held_by(plan: PlacementPlan) -> list[list[Place]]:
    return [places_of(placed_LE) for placed_LE in plan.placed_GLE]


def serve(node: Node, ids: Sequence[list[int]]) -> list[list[int]]:
    """Prompts one after the other; their new tokens."""
    made: list[list[int]] = []
    for prompt in ids:
        tokens: list[int] = []

        def sink(output: Output, tokens: list[int] = tokens) -> None:
            assert output.error is None, output.error
            if output.token is not None:
                tokens.append(output.token)

        node.engine.submit(prompt, SamplingParams(max_tokens=NEW_TOKENS), sink)
        while not node.engine.idle:
            node.engine.step()
        made.append(tokens)
    return made


def arrange(nodes: Nodes, held: Sequence[Sequence[Place]]) -> None:
    """Have each server hold these experts and no others, and tell all."""
    for node, places in zip(nodes.nodes, held, strict=True):
        for place in set(node.experts.held) - set(places):
            node.experts.drop(*place)
        for place in sorted(set(places) - set(node.experts.held)):
            node.experts.adopt(*place, -1)
    nodes.publish()


def table_of(nodes: Nodes) -> Table:
    """The servers as a scheduler finds them; what is published later than it is newer."""
    nodes.version += 10**6
    workers = {n: NodeWorker(node) for n, node in enumerate(nodes.nodes)}
    return Table(nodes[0].experts.spec, workers, version=nodes.version - 10**6)


def test_live_shares_are_those_of_plan_score_and_ours_is_the_largest(
    nodes: Nodes, plans: dict[str, PlacementPlan], work: Work
) -> None:
    live: dict[str, float] = {}
    answers: dict[str, list[Any]] = {}
    for name, plan in plans.items():
        arrange(nodes, held_by(plan))
        for node in nodes.nodes:
            node.meter.take(0)
        answers[name] = [serve(node, work.ids[n]) for n, node in enumerate(nodes.nodes)]
        stats = [node.meter.take(0) for node in nodes.nodes]
        local, remote = sum(one.local_pairs for one in stats), sum(one.remote_pairs for one in stats)
        live[name] = local / (local + remote)
        scored = score_plan(plan, work.served).score
        assert live[name] == pytest.approx(scored.local, abs=0.01)
        for one, share in zip(stats, scored.local_N, strict=True):
            assert one.local_pairs / (one.local_pairs + one.remote_pairs) == pytest.approx(share, abs=0.01)
    assert live["prism_exact"] >= live["prism"] >= max(live[name] for name in BASELINES), live
    assert all(found == answers["uniform"] for found in answers.values())


def test_text_is_the_same_while_experts_move(
    nodes: Nodes, plans: dict[str, PlacementPlan], machines: Cluster, work: Work, reference: Path, tokenizer: Any
) -> None:
    ids = [part[:2] for part in work.ids]
    alone = engine(reference, tokenizer, "lru", 256)
    expected = [serve_alone(alone, prompts) for prompts in ids]
    alone.close()
    arrange(nodes, held_by(plans["uniform"]))
    table = table_of(nodes)
    options = SchedulerOptions(interval_s=10.0, poll_s=1.0, decide="always", half_life_s=60.0, share=0.1)
    scheduler = Scheduler(table.spec, machines, options)
    now_s, moved, unmoved = 1000.0, 0, 0
    while now_s < 1000.0 + 120.0 and not (moved and unmoved):
        for n, node in enumerate(nodes.nodes):
            for text, prompt in enumerate(ids[n]):
                for _ in range(6):
                    scheduler.tick(table, now_s)
                    now_s += 0.1
                assert not table.uncovered()
                moved += scheduler.migrating
                unmoved += bool(moved) and not scheduler.migrating
                assert serve(node, [prompt]) == [expected[n][text]]
    made = [one for one in scheduler.history.decisions if one.made]
    assert moved > 1 and made and made[0].outcome == "done" and made[0].copies > 20
    assert made[0].local_after > made[0].local_before
    assert all(node.meter.total["last_resort"] == 0 for node in nodes.nodes)
    assert [set(node.experts.held) for node in nodes.nodes] == table.held()


def serve_alone(alone: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    class One:
        engine = alone

    return serve(One, prompts)  # type: ignore[arg-type]


def test_a_change_of_tasks_is_followed_by_migrations_that_pay(nodes: Nodes, machines: Cluster, work: Work) -> None:
    """Eq. 4 decides, with seconds of calls as the servers measure them and links on which an expert takes 0.6 ms."""
    ids = work.ids
    arrange(nodes, held_by(plan_placement(work.served, machines, "prism_exact", {})[0]))
    for node in nodes.nodes:
        node.meter.take(0)
    table = table_of(nodes)
    scheduler = Scheduler(
        table.spec, machines, SchedulerOptions(interval_s=6.0, horizon_s=300.0, poll_s=1.0, half_life_s=6.0)
    )
    now_s = 1000.0

    def go(rounds: int, task_of: Sequence[int]) -> float:
        """Serve, and give the share that was computed at home in the last of the rounds."""
        nonlocal now_s
        share = 0.0
        for _ in range(rounds):
            before = pairs(scheduler)
            for turn in range(3):
                for n, node in enumerate(nodes.nodes):
                    serve(node, [ids[task_of[n]][turn]])
                now_s += 1.0
                while scheduler.tick(table, now_s) < 0.2 or scheduler.migrating:
                    now_s += 0.1
            local, remote = (b - a for a, b in zip(before, pairs(scheduler), strict=True))
            share = local / (local + remote)
        return share

    steady = go(4, (0, 1, 2))
    assert [one for one in scheduler.history.decisions if one.made] == []
    shifted = go(1, (1, 2, 0))
    assert shifted < steady
    settled = go(5, (1, 2, 0))
    made = [one for one in scheduler.history.decisions if one.made]
    assert made and all(one.saved_s > one.cost_s and one.outcome == "done" for one in made)
    assert settled > shifted + 0.05


def pairs(scheduler: Scheduler) -> tuple[int, int]:
    windows = scheduler.history.to_json()["windows"]
    return tuple(int(np.sum([window[name] for window in windows])) for name in ("local", "remote"))  # type: ignore[return-value]
