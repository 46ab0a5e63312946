"""DIRECTOR: a linear relaxation of each layer, rounded, then improved by moves, swaps and copies."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from moetool.errors import UsageError
from moetool.placement._latency import flows
from moetool.placement._local_search import Layer, improve
from moetool.placement._planner import Problem, layer_slots
from moetool.placement._relaxation import relax
from moetool.placement._rounding import round_layer
from moetool.placement.smartmoe import balance

_BISECTIONS = 20
_QUICK_KICKS, _QUICK_RELAXATION = 1, 256
QUICK = {"quick": True}
"""Options for placing anew while serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of DIRECTOR.

    Attributes:
        c_max: the most experts of a layer on a GPU (0: as memory allows).
        relaxation: layers of up to so many variables (experts times GPUs) start from the rounded relaxation as well
            as from the balanced placement; larger ones, whose relaxation takes seconds a layer, from that alone. With
            0 none does: planning takes a third of the time and is a little worse.
        binary_search: find the relaxed optimum by the paper's bisection over the budget instead of minimising it.
        kicks: how often each layer's best placement is disturbed and improved again.
        replicas: use slots that are left for copies of experts, as long as they help.
        processes: that share the layers. The placement does not depend on it.
        quick: for placing before a batch: at most one kick, and a relaxation of at most 256 variables. At 64 experts
            on 8 GPUs that takes a quarter of the time.
    """

    c_max: int = 0
    relaxation: int = 4096
    binary_search: bool = False
    kicks: int = 8
    replicas: bool = True
    processes: int = 1
    quick: bool = False


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place each layer by itself.

    Shapes: placed_GLE bool.

    Source: DIRECTOR § VI, Algorithm 1. Repairs and deviations:
        - The objective is a sum over layers and memory is a limit a layer (C_max), so each layer is a small programme
          that is minimised directly; `binary_search` runs the printed loop on each and ends at the same optimum.
        - The relaxation's repairs are at `moetool.placement._relaxation.relax`, those of the rounding at
          `moetool.placement._rounding.round_layer`.
        - Local search follows, over swaps and moves, then over copies; the paper has none.
        - C_max as memory allows is a GPU's slots shared among the layers, and may differ between GPUs and layers.
        - A token whose expert has copies goes to the nearest (`moetool.placement._latency.flows`).

    Raises:
        UsageError: a negative number, or no process.
        CapacityError: `c_max` does not cover every expert.
    """
    if min(options.kicks, options.relaxation) < 0 or options.processes < 1:
        raise UsageError("director needs kicks and relaxation >= 0, and processes >= 1")
    if options.quick:
        options = replace(
            options,
            kicks=min(options.kicks, _QUICK_KICKS),
            relaxation=min(options.relaxation, _QUICK_RELAXATION),
        )
    room_GL = layer_slots(problem, options.c_max)
    tasks = []
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_GE = np.ascontiguousarray(problem.demand.tokens_GLE[:, layer, :num_experts])
        tasks.append((Layer(tokens_GE=tokens_GE, room_G=room_GL[:, layer], latency=problem.latency), layer))
    gpus = run_layers(partial(place_layer, options, problem.seed), tasks, options.processes)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for layer, gpu_E in enumerate(gpus):
        placed_GLE[gpu_E, layer, np.arange(len(gpu_E))] = True
        if options.replicas and room_GL[:, layer].sum() > len(gpu_E):
            copy_experts(problem, layer, placed_GLE[:, layer], room_GL[:, layer])
    return placed_GLE


def place_layer(options: Options, seed: int, task: tuple[Layer, int]) -> np.ndarray:
    layer, number = task
    rng = np.random.default_rng([seed, number])
    speed_G = np.array(layer.latency.speed_G)
    starts = [balance(layer.tokens_GE.sum(axis=0), layer.room_G, speed_G)]
    if layer.tokens_GE.size <= options.relaxation:
        starts.append(round_layer(layer, _relaxed(layer, options.binary_search, starts[0]), rng))
    return improve(layer, starts, rng, options.kicks)[1]


def round_relaxation(layer: Layer, rng: np.random.Generator) -> np.ndarray:
    """The GPU of each expert by the printed algorithm alone, int64 [E]."""
    start = balance(layer.tokens_GE.sum(axis=0), layer.room_G, np.array(layer.latency.speed_G))
    return round_layer(layer, _relaxed(layer, True, start), rng)


def _relaxed(layer: Layer, binary_search: bool, start: np.ndarray) -> np.ndarray:
    if not binary_search:
        relaxed = relax(layer)
        assert relaxed is not None, "without a budget the relaxation has a solution: the start is one"
        return relaxed.x_EG
    low, high = 0.0, layer.cost(start)
    x_EG = (start[:, None] == np.arange(len(layer.room_G))).astype(np.float64)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = relax(layer, middle)
        if found is None:
            low = middle
        else:
            high, x_EG = middle, found.x_EG
    return x_EG


def copy_experts(problem: Problem, layer: int, placed_GE: np.ndarray, room_G: np.ndarray) -> None:
    """Add copies of the stragglers' experts in place, the most helpful first, until none helps or memory is full.

    Where a GPU has no room for a copy, its coldest expert makes way: to the free GPU with the least work, or for good
    if it has another copy.
    """
    cluster, latency = problem.cluster, problem.latency
    tokens_GE = problem.demand.tokens_GLE[:, layer]
    total_E = tokens_GE.sum(axis=0)
    flow_GG = flows(cluster, tokens_GE, placed_GE)
    cost = sum(latency.layer(flow_GG))
    while True:
        free_G = placed_GE.sum(axis=1) < room_G
        comm_GG = latency.comm_s(flow_GG)
        computing = int(latency.comp_s(flow_GG.sum(axis=0)).argmax())
        talking = int(np.maximum(comm_GG.sum(axis=1), comm_GG.sum(axis=0)).argmax())
        busiest = np.argsort(-np.where(placed_GE[computing], total_E, -1.0), kind="stable")[:4].tolist()
        wanted = np.argsort(-np.where(placed_GE[talking], -1.0, tokens_GE[talking]), kind="stable")[:4].tolist()
        candidates = {(g, e) for e in busiest for g in range(len(room_G))} | {(talking, e) for e in wanted}
        best, chosen, after_GG = cost * (1 - 1e-9), placed_GE, flow_GG
        for g, expert in sorted(candidates):
            with_GE = _with_copy(placed_GE, g, expert, free_G, total_E, flow_GG.sum(axis=0))
            if with_GE is None:
                continue
            changed = np.flatnonzero((with_GE != placed_GE).any(axis=0))
            some_GE = tokens_GE[:, changed]
            trial_GG = flow_GG + flows(cluster, some_GE, with_GE[:, changed])
            trial_GG -= flows(cluster, some_GE, placed_GE[:, changed])
            tried = sum(latency.layer(trial_GG))
            if tried < best:
                best, chosen, after_GG = tried, with_GE, trial_GG
        if chosen is placed_GE:
            return
        placed_GE[:] = chosen
        cost, flow_GG = best, np.maximum(after_GG, 0.0)


def _with_copy(
    placed_GE: np.ndarray, g: int, expert: int, free_G: np.ndarray, total_E: np.ndarray, load_G: np.ndarray
) -> np.ndarray | None:
    """The placement with one copy more, or None where the GPU has it, or has no room and cannot make any."""
    if placed_GE[g, expert]:
        return None
    with_GE = placed_GE.copy()
    with_GE[g, expert] = True
    if not free_G[g]:
        coldest = int(np.where(placed_GE[g], total_E, np.inf).argmin())
        targets_G = free_G & ~placed_GE[:, coldest]
        if not placed_GE[g, coldest]:
            return None
        with_GE[g, coldest] = False
        if placed_GE[:, coldest].sum() == 1:
            if not targets_G.any():
                return None
            with_GE[int(np.where(targets_G, load_G, np.inf).argmin()), coldest] = True
    return with_GE


def run_layers(work: Callable[[Any], Any], tasks: Sequence[Any], processes: int) -> list[Any]:
    """The results in the order of the tasks."""
    if processes == 1:
        return [work(task) for task in tasks]
    return list(_pool(processes).map(work, tasks, chunksize=max(1, len(tasks) // (2 * processes))))


@cache
def _pool(processes: int) -> ProcessPoolExecutor:
    """Workers that stay, since starting them takes longer than placing; they end with this process."""
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("forkserver"))
