"""Measure expert parallelism: placement modes, predictors, planners and migration modes, on the same batches.

Source: DIRECTOR § VIII, Figures 6, 7, 8, 10 and 11 in miniature. Expert and link times are emulated (`RankOptions`):
ranks sleep in proportion to the rows computed and the bytes sent, because several ranks on few cores hide imbalance.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import durable
from moetool.base.config import Span, require_within
from moetool.base.errors import MoetoolError, UsageError, unknown_name
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.bench.bench_result import BenchResult, Row, in_rounds, recorded
from moetool.cluster.parallel.batch_placement import BatchCosts, BatchReplacement, RoutingPredictor, measured_latency
from moetool.cluster.parallel.members import Launcher
from moetool.cluster.parallel.rank_head import RankHead
from moetool.cluster.parallel.rank_options import RankOptions
from moetool.cluster.parallel.startup import ParallelOptions, open_head, open_predictors, uniform, with_buffer
from moetool.costing.costs import CostProfile
from moetool.models.checkpoint import Checkpoint
from moetool.placement import planner
from moetool.placement.demand import Demand, held_out, loads, numbers, planned_share
from moetool.placement.plan import bare_plan
from moetool.placement.planner import Problem
from moetool.prompts import gather
from moetool.runtime.request import Output, SamplingParams
from moetool.trace.reader import Trace
from moetool.training.fit_options import FitOptions

_SUMMED = ("hottest", "rows", "ready_s", "waited_s", "decided_s", "moved_bytes")
QUICK = {"batches": 2, "rounds": 1, "prompts": 6, "seats": 1, "prompt_tokens": 12, "new_tokens": 2, "epochs": 1}
"""Options of a smoke test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBenchOptions:
    """Options of the bench.

    Attributes:
        data: prompt sets; each is a task.
        prompts: prompts per set; every other one is history.
        prompt_tokens: longest prompt; longer ones are truncated.
        new_tokens: decoded tokens per request.
        ranks: GPUs, all of one server.
        seats: requests per batch on each rank.
        batches: batches per run; the first has no prediction and is not counted.
        tasks: tasks per batch, drawn anew for each, so that hot experts change between batches.
        room: capacity of the GPUs, as a multiple of the model's experts.
        rounds: every variant runs once per round, in rotating order.
        epochs: training epochs of the cascade.
        replica: whether to make and measure the 4-bit replica too.
        profile: file of a cost profile, for decisions before the first measurement.
        expert_token_s: emulated seconds per row of an expert.
        link_bytes_s: emulated rate of each rank's outgoing link.
        seed: seed of batches and planners.
    """

    data: tuple[str, ...] = ("all",)
    prompts: int = 24
    prompt_tokens: int = 48
    new_tokens: int = 4
    ranks: int = 4
    seats: int = 4
    batches: int = 6
    tasks: int = 2
    room: float = 1.5
    rounds: int = 3
    epochs: int = 12
    replica: bool = False
    profile: str = ""
    expert_token_s: float = 1e-4
    link_bytes_s: float = 20e6
    seed: int = 0

    def __post_init__(self) -> None:
        one, two = Span(1), Span(2)
        require_within(self, "bench ", prompts=Span(4), prompt_tokens=two, new_tokens=one, ranks=two, seats=one)
        require_within(self, "bench ", batches=two, tasks=one, rounds=one, epochs=one, room=Span(1.05))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A compared variant.

    Attributes:
        name: name in tables.
        placement: see `BatchReplacement`.
        predictors: names of its predictors.
        planner: planner for re-placement.
        migrate: migration mode.
        always: whether experts move whatever the expected cost.
        figures: the paper's figures that show it.
    """

    name: str
    placement: str
    predictors: tuple[str, ...] = ()
    planner: str = "director"
    migrate: str = "overlap"
    always: bool = False
    figures: tuple[int, ...] = (7, 8)


def variants(replica: bool) -> list[Variant]:
    """The compared variants, with the replica's if it exists."""
    found = [
        Variant(name="vanilla", placement="vanilla"),
        Variant(name="offline", placement="offline", figures=(7, 8, 11)),
        Variant(name="reactive", placement="reactive"),
        Variant(name="proactive", placement="proactive", predictors=("cascade",), figures=(7, 8, 10, 11)),
        Variant(name="oracle", placement="proactive", predictors=("oracle",), figures=(10,)),
        Variant(name="annealing", placement="proactive", predictors=("cascade",), planner="annealing", figures=(11,)),
    ]
    if replica:
        found += [
            Variant(name="replica", placement="proactive", predictors=("replica",), figures=(10,)),
            Variant(name="both", placement="proactive", predictors=("cascade", "replica"), figures=(10,)),
        ]
    found.append(Variant(name="reactive-always", placement="reactive", always=True, figures=()))
    moving = Variant(name="", placement="proactive", predictors=("cascade",), always=True, figures=(6,))
    return found + [replace(moving, name=how, migrate=how) for how in ("stop", "pipelined", "overlap")]


def bench_parallel(
    model: str,
    options: RankBenchOptions,
    launcher: Launcher,
    work: Path,
    *,
    only: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda done: None,
    file: Path | None = None,
) -> BenchResult:
    """Measure every variant once per round.

    A row is a variant, with the values of `_run` by round. Facts: `costs` measured by the ranks'
    head so far (`Costs.to_json`), and by predictor `token_s`, seconds per prompt token in each round.

    Args:
        launcher: starts the ranks.
        work: folder for trace, cascade and replica; results of a run with the same options are reused.
        only: names of variants (default: all).
        on_progress: called with the percentage done.
        file: see `BenchResult`.

    Raises:
        UsageError: an unknown variant, or too few prompts.
    """
    known = {one.name: one for one in variants(options.replica)}
    if unknown := next((name for name in only if name not in known), None):
        raise unknown_name("--variant", unknown, known)
    chosen = [one for one in known.values() if not only or one.name in only]
    spec = Checkpoint.open(model).spec
    cluster = _cluster(spec, options)
    subject = _Subject(model, spec, cluster, options, work)
    needed = {name for one in chosen for name in one.predictors}
    predictors = subject.predictors(needed)
    on_progress(10)
    room = with_buffer(cluster, spec)
    offline_GLE = subject.offline(room)
    ranks = RankOptions(
        seats=options.seats,
        kv_tokens=options.seats * (options.prompt_tokens + options.new_tokens + 16) + 64,
        threads=1,
        expert_token_s=options.expert_token_s,
        link_bytes_s=options.link_bytes_s,
        timeout_s=60.0,
    )
    head = open_head(
        model,
        replace(bare_plan(spec, cluster, offline_GLE, "director"), costs="emulated"),
        launcher,
        ParallelOptions(gather_s=5.0, patience_s=60.0),
        ranks,
        profile=CostProfile.load(Path(options.profile)) if options.profile else None,
    )
    token_s: dict[str, list[float]] = {}
    with recorded("cluster-ep", options, file) as made:
        try:
            head.start()
            requests = subject.batches(head.tokenizer, head.vocab_size)
            on_progress(20)
            _run(head, requests[: options.ranks * options.seats], options)  # warms up

            def run(one: Variant, number: int) -> Row:
                control = BatchReplacement(
                    one.placement,
                    spec,
                    room,
                    planner_name=one.planner,
                    predictors=[RoutingPredictor(name, predictors[name]) for name in one.predictors],
                    always=one.always,
                    seed=options.seed,
                )
                for predictor in control.predictors:
                    predictor.measure(requests[0])
                start_GLE = uniform(spec, room) if one.placement == "vanilla" else offline_GLE
                head.use(control, start_GLE, one.migrate)
                found = _run(head, requests, options)
                for predictor in control.predictors:
                    token_s.setdefault(predictor.name, []).append(predictor.token_s)
                made.facts = {"costs": head.stats()["costs"], "token_s": token_s}
                return found

            def rows(measured: list[tuple[Variant, list[Row]]]) -> Iterator[Row]:
                for one, runs in measured:
                    yield {**asdict(one), "rounds": runs}

            in_rounds(made, chosen, options.rounds, run, rows, lambda done: on_progress(20 + 80 * done // 100))
        finally:
            head.close()
    return made


def _run(head: RankHead, requests: Sequence[list[int]], options: RankBenchOptions) -> Row:
    """Submit all requests at once, in the order of their batches; nothing else runs.

    Returns:
        Sums and means over the batches but the first: `batch_s`, seconds of each; `latency_s`, mean over requests from
        submission to the last token; `hottest`, rows on the busiest GPU, summed over steps and layers; `rows` of all
        GPUs; `sent_GG`, bytes of rows from GPU to GPU; seconds that batches waited for migrations (`ready_s`) and
        decisions (`decided_s`), and that all-to-alls waited for parts of experts (`waited_s`); `moved_bytes` of
        migrated experts, and those sent during an all-to-all (`during_exchange`); `asked`, decisions by predictor;
        `placed`, changes of the placement; `predict_s`, `plan_s`, mean seconds per decision.
    """
    ended: list[float] = []
    failed: list[str] = []
    over = threading.Event()

    def sink(output: Output) -> None:
        if output.finish is not None:
            if output.finish == "error":
                failed.append(output.error or "")
            ended.append(time.perf_counter())
            if len(ended) == len(requests):
                over.set()

    began = time.perf_counter()
    params = SamplingParams(max_tokens=options.new_tokens, ignore_eos=True)
    for prompt in requests:
        head.submit(prompt, params, sink)
    while not over.wait(1.0):
        if head.state != "ready":
            raise MoetoolError(f"the ranks have ended: the engine is {head.state}")
    head.wait_idle()
    if failed:
        raise MoetoolError(f"{len(failed)} requests failed: {failed[0]}")
    counted = head.batches[1:] or head.batches
    return {
        "batch_s": [record.seconds for record in counted],
        "latency_s": float(np.mean(ended) - began),
        "sent_GG": np.sum([record.sent_GG for record in counted], axis=0).tolist(),
        **{name: sum(getattr(record, name) for record in counted) for name in _SUMMED},
        "during_exchange": sum(record.moved_during_exchange for record in counted),
        "asked": dict(Counter(decision.saw for decision in head.decisions)),
        "placed": sum(decision.made for decision in head.decisions),
        "predict_s": float(np.mean([d.predict_s for d in head.decisions])) if head.decisions else 0.0,
        "plan_s": float(np.mean([d.plan_s for d in head.decisions])) if head.decisions else 0.0,
    }


class _Subject:
    """The requests, their routes, and placements and predictors from the history."""

    def __init__(self, model: str, spec: ModelSpec, cluster: Cluster, options: RankBenchOptions, work: Path) -> None:
        self._model, self._spec, self._cluster, self._options, self._work = model, spec, cluster, options, work
        found = gather.load(list(options.data))
        self._prompts: list[gather.Prompt] = []
        for dataset in dict.fromkeys(prompt.dataset for prompt in found):
            of = [prompt for prompt in found if prompt.dataset == dataset][: options.prompts]
            self._prompts += [replace(prompt, input_tokens=options.prompt_tokens) for prompt in of]
        served = held_out(planned_share(0.5))
        self._served = [prompt for place, prompt in enumerate(self._prompts) if served("", place)]
        known = {(prompt.dataset, prompt.prompt_id) for prompt in self._served}
        self._texts = [prompt for prompt in found if (prompt.dataset, prompt.prompt_id) not in known]
        past = [prompt for place, prompt in enumerate(self._prompts) if not served("", place)]
        self._history, self._coming = self._capture("history", past), self._capture("served", self._served)

    def batches(self, tokenizer: Any, vocab_size: int) -> list[list[int]]:
        """The prompts of all batches in order, held out of the history."""
        rng = np.random.default_rng(self._options.seed)
        by_task: dict[str, list[list[int]]] = {}
        for prompt in self._served:
            ids = prompt.token_ids(tokenizer, vocab_size, prompt.input_tokens)
            by_task.setdefault(prompt.dataset, []).append(ids)
        size = self._options.ranks * self._options.seats
        chosen: list[list[int]] = []
        for _ in range(self._options.batches):
            tasks = rng.choice(sorted(by_task), min(self._options.tasks, len(by_task)), replace=False).tolist()
            pool = [ids for task in tasks for ids in by_task[task]]
            picked = rng.choice(len(pool), size, replace=len(pool) < size)
            chosen += [pool[place] for place in picked]
        return chosen

    def offline(self, room: Cluster) -> np.ndarray:
        """DIRECTOR's placement for the history."""
        past = numbers(self._history)
        tokens_GLE = np.zeros((len(room.gpus), self._spec.num_layers, self._spec.num_experts))
        gpu = {request: place % len(room.gpus) for place, request in enumerate(past)}
        for request, tokens_LE in loads(self._history, set(past)):
            tokens_GLE[gpu[request]] += tokens_LE
        demand = Demand(spec=self._spec, cluster=room, tokens_GLE=tokens_GLE)
        row_s, byte_s = self._options.expert_token_s, 1.0 / self._options.link_bytes_s
        latency = measured_latency(
            room, self._spec, tokens_GLE, BatchCosts(row_s=row_s, byte_s_GG=byte_s, move_bytes_s=1.0)
        )
        problem = Problem(demand=demand, latency=latency, seed=self._options.seed)
        return planner.place("director", problem, planner.quick_options("director"))

    def predictors(self, names: set[str]) -> Mapping[str, Callable[[Sequence[int], int], np.ndarray]]:
        """The named predictors, trained or made now if missing."""
        found: dict[str, Callable[[Sequence[int], int], np.ndarray]] = {}
        if "oracle" in names:
            found["oracle"] = self._oracle()
        for name in names - {"oracle"}:
            folder = self._work / name
            if not folder.is_dir():
                self._make(name, folder)
            (opened,) = open_predictors([str(folder)], self._spec)
            found[name] = opened.predict
        return found

    def _capture(self, name: str, prompts: Sequence[gather.Prompt]) -> Trace:
        from moetool.capture.run import CaptureOptions, capture

        folder = self._work / name
        if not folder.is_dir():
            made = CaptureOptions(
                max_new_tokens=self._options.new_tokens, batch_size=8, keep=("topk",), dtype="float32"
            )
            capture(self._model, prompts, folder, made)
        trace = Trace(folder)
        if len(trace.requests) != len(prompts):
            raise UsageError(
                f"{folder} is from other prompts; give another directory with --set bench.work, or remove it"
            )
        return trace

    def _make(self, name: str, folder: Path) -> None:
        """Train or make a predictor on prompts that are not served."""
        if name == "cascade":
            from moetool.training.training import train

            fit = FitOptions(max_epochs=self._options.epochs)
            train("cascade", self._work / "history", folder, fit=fit, seed=self._options.seed)
        else:
            from moetool.base import plugins

            text = self._work / "history.jsonl"
            rows = [{"prompt": one.text, "task": one.task, "id": one.prompt_id} for one in self._texts]
            durable.write_text(text, "".join(json.dumps(row) + "\n" for row in rows))
            plugins.load("predictor", "awq_replica").make(self._model, [str(text)], folder, {})

    def _oracle(self) -> Callable[[Sequence[int], int], np.ndarray]:
        """The routes that were recorded, by the prompt's text."""
        checkpoint = Checkpoint.open(self._model)
        places = {
            (row["dataset"], row["prompt_id"]): row["request"]
            for row in self._coming.requests.select(["dataset", "prompt_id", "request"]).to_pylist()
        }
        whole: dict[int, np.ndarray] = {}
        for request, tokens_LE in loads(self._coming, set(numbers(self._coming))):
            whole[request] = whole.get(request, 0) + tokens_LE
        known = {
            tuple(prompt.token_ids(checkpoint.tokenizer, checkpoint.vocab_size, prompt.input_tokens)): whole[
                places[prompt.dataset, prompt.prompt_id]
            ]
            for prompt in self._served
        }
        return lambda prompt, new_tokens: known[tuple(prompt)]


def _cluster(spec: ModelSpec, options: RankBenchOptions) -> Cluster:
    slots = int(np.ceil(spec.total_experts * options.room / options.ranks))
    gpu = Gpu(memory_bytes=slots * spec.slot_bytes)
    server = Server(name="node", gpus=(gpu,) * options.ranks, gpu_link_bytes_s=options.link_bytes_s)
    return Cluster(servers=(server,), link_bytes_s=options.link_bytes_s)
