"""The cluster bench: every line once per round, all lines of a round under the same arrivals."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.types import Cluster
from moetool.bench.bench_result import BenchResult, Row, in_rounds, recorded
from moetool.bench.live_cluster.bench_inputs import BenchInputs, prepare
from moetool.bench.live_cluster.bench_options import ALONE, REDIRECTED, STATIC, ClusterBenchOptions
from moetool.bench.live_cluster.cluster_results import line_row
from moetool.bench.live_cluster.deployment import EdgeTestbed, open_alone, open_stand
from moetool.bench.live_cluster.load_generator import FinishedRequest, ScheduledRequest, draw, drive, warm
from moetool.bench.live_cluster.sites import open_site
from moetool.cluster.edge.scheduler import SchedulerOptions
from moetool.models.loading import DTYPES
from moetool.placement.demand import read_demand
from moetool.placement.plan import PlacementPlan
from moetool.runtime.serve_options import ServeOptions

_POLLS = 5  # reports of each server between two decisions


def bench_cluster(
    model: str,
    tasks: Sequence[str],
    lines: Sequence[str],
    options: ClusterBenchOptions,
    *,
    on_progress: Callable[[int], None] = lambda done: None,
    file: Path | None = None,
) -> BenchResult:
    """Run every line.

    Args:
        tasks: prompt sets, one per server.
        lines: from `parse_lines`.
        on_progress: called with the percentage done.
        file: see `BenchResult`.

    Effects: captures traces into a temporary folder; starts and ends servers.

    Raises:
        UsageError: the tasks do not fit the servers.
        MoetoolError: a server could not be started, or lacks room.
        CapacityError: the servers' memory cannot hold every expert once.
    """
    if options.where == "namespaces":
        from moetool.bench.live_cluster.namespaces import require_namespaces

        require_namespaces()
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="moetool-bench-"))
        inputs = prepare(model, tasks, options, Path(folder))
        # Lines share servers and prompts: without cached prefixes a later line computes as much as the first.
        serve = ServeOptions(dtype=inputs.dtype, kv_tokens=2048, max_requests=4, threads=1, prefix_caching=False)
        made = undo.enter_context(recorded("cluster", options, file))
        made.facts = {
            "model": model,
            "tasks": inputs.tasks,
            "slots": [inputs.slots(share) for share in options.memory],
            "total_experts": inputs.spec.total_experts,
            "expert_s": inputs.expert_s,
            "even_bytes_s": inputs.even_bytes_s,
        }
        site = undo.enter_context(open_site(options.where, inputs.tasks))
        alone = None
        if {ALONE, REDIRECTED} & set(lines):
            alone = undo.enter_context(open_alone(model, made.facts["slots"], serve, site, inputs.tasks))
        cluster = inputs.cluster(options)
        plans = inputs.plans(cluster, lines, options.seed)
        stand = None
        if plans:
            start = plans.get("uniform") or inputs.plans(cluster, ["uniform"], options.seed)["uniform"]
            stand = undo.enter_context(open_stand(model, start, serve, site))
            warm(stand.urls, model, inputs.texts[0][0])
        runner = _Runner(inputs, options, stand, alone, plans)
        told = {line: _simulate(inputs, cluster, options, line, plan) for line, plan in plans.items()}

        def rows(measured: list[tuple[str, list[Row]]]) -> Iterator[Row]:
            against = dict(measured).get(lines[-1], [])
            for line, runs in measured:
                yield line_row(line, runs, against, simulated=told.get(line))

        in_rounds(made, lines, options.rounds, runner.run, rows, on_progress)
        if options.shift and plans:
            line = list(plans)[-1]
            for moves in (True, False):
                made.add(**line_row(line, [runner.shift(line, moves)], [], shift=True))
    return made


class _Runner:
    """Runs lines on running servers."""

    def __init__(
        self,
        inputs: BenchInputs,
        options: ClusterBenchOptions,
        stand: EdgeTestbed | None,
        alone: Any,
        plans: dict[str, PlacementPlan],
    ) -> None:
        self._inputs, self._options, self._stand, self._alone, self._plans = inputs, options, stand, alone, plans
        self._texts: dict[tuple[int, int], str] = {}  # first answer to each prompt, by (task, prompt)

    def run(self, line: str, number: int) -> Row:
        """Run one line in one round; values as of `line_row`."""
        rng = np.random.default_rng([self._options.seed, number])
        coming = draw(self._options.requests, self._options.gap_s, [len(texts) for texts in self._inputs.texts], rng)
        if line in self._plans:
            moves = self._options.migrate and line not in STATIC
            return self._placed(line, coming, moves)
        urls = [self._alone.call(n, "url") for n in range(len(self._alone))]
        return self._note(self._drive(urls, coming, redirect=line == REDIRECTED))

    def _drive(
        self, urls: Sequence[str], coming: Sequence[ScheduledRequest], redirect: bool = False
    ) -> list[FinishedRequest]:
        inputs = self._inputs
        return drive(urls, coming, inputs.texts, self._options.new_tokens, model=inputs.model, redirect=redirect)

    def shift(self, line: str, moves: bool) -> Row:
        """Run with tasks that change servers after half of the requests: each to the previous server."""
        counts = [len(texts) for texts in self._inputs.texts]
        rng = np.random.default_rng([self._options.seed, 10**6])
        gap_s = self._options.gap_s
        before = draw(self._options.requests, gap_s, counts, rng)
        task_of = [(n + 1) % len(counts) for n in range(len(counts))]
        after = draw(self._options.requests, gap_s, counts, rng, task_of)
        start_s = before[-1].at_s
        late = [replace(one, at_s=start_s + one.at_s) for one in after]
        return {**self._placed(line, [*before, *late], moves), "changed_s": start_s}

    def _placed(self, line: str, coming: Sequence[ScheduledRequest], moves: bool) -> Row:
        assert self._stand is not None
        plan, interval_s = self._plans[line], self._options.interval_s
        self._stand.arrange(plan)
        options = SchedulerOptions(
            interval_s=interval_s,
            poll_s=interval_s / _POLLS,
            half_life_s=2 * interval_s,
            planner=line,
            decide="eq4" if moves else "never",
            seed=self._options.seed,
        )
        with self._stand.watched(plan, options) as scheduler:
            answered = self._drive(self._stand.urls, coming)
        made = self._note(answered)
        seen = scheduler.history.to_json()
        made |= {
            "local": seen["local"],
            "windows": seen["windows"],
            "began_s": seen["began_s"],
            "sent_bytes": float(np.sum(seen["bytes"])),
            "call_s": scheduler.statistics.call_s,
            "decisions": seen["decisions"],
        }
        if all(one.task == one.server for one in coming):
            drawn = [[one.prompt for one in coming if one.server == n] for n in range(len(self._inputs.tasks))]
            made["expected_local"] = self._inputs.expected_local(plan, drawn)
        return made

    def _note(self, answered: Sequence[FinishedRequest]) -> Row:
        other = 0
        for one in answered:
            if one.text is not None:
                at = one.coming.task, one.coming.prompt
                other += self._texts.setdefault(at, one.text) != one.text
        by_server = [
            [one for one in answered if one.coming.server == n and one.text is not None]
            for n in range(len(self._inputs.tasks))
        ]
        return {
            "latencies": [[one.seconds for one in mine] for mine in by_server],
            "arrived_s": [[one.coming.at_s for one in mine] for mine in by_server],
            "failed": sum(one.text is None for one in answered),
            "redirected": sum(one.went_to != one.coming.server for one in answered),
            "other_texts": other,
            "windows": [],
            "decisions": [],
        }


def _simulate(
    inputs: BenchInputs, cluster: Cluster, options: ClusterBenchOptions, line: str, plan: PlacementPlan
) -> Row:
    """Simulate a line with the same traces, placement, profile and arrival process."""
    from moetool.simulation.simulate import ModeInputs, SimulationInputs, simulate
    from moetool.simulation.simulation_options import SimulationOptions
    from moetool.simulation.workload import read_source

    sources = {
        n: read_source(trace, lambda place: True, decode_tokens=max(1, options.new_tokens - 1))
        for n, trace in enumerate(inputs.served.values())
    }
    world = SimulationInputs(
        spec=inputs.spec,
        cluster=cluster,
        sources=sources,
        history=read_demand(inputs.planned, cluster),
        history_sources=sources,
    )
    found = simulate(
        world,
        line,
        f"poisson:{options.gap_s}s",
        options.requests * len(inputs.tasks),
        SimulationOptions(
            seed=options.seed,
            split=1.0,
            decode_tokens=max(1, options.new_tokens - 1),
            replan_s=options.interval_s if options.migrate and line not in STATIC else 0.0,
            seats=4,
            value_bytes=DTYPES[inputs.dtype].itemsize,
            window_s=options.interval_s,
        ),
        costs=inputs.profile,
        inputs=ModeInputs(plan=plan),
    )
    return {"mean_s": found.mean_s, "by_server": found.mean_by_server, "local": found.local}
