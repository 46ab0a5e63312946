"""DIRECTOR: a linear relaxation of each layer, rounded, then improved by moves, swaps and copies."""

import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from moetool.base.child_process import end_with_parent
from moetool.base.config import MOST_THREADS, Span, require_within
from moetool.base.errors import CapacityError
from moetool.placement.expert_copies import CopySearch
from moetool.placement.local_search import Descent, Layer, improve
from moetool.placement.planner import Problem, filled, layer_slots
from moetool.placement.planners import eplb, prism_exact
from moetool.placement.planners.smartmoe import balance
from moetool.placement.relaxation import relax
from moetool.placement.rounding import round_layer

_BISECTIONS = 20
_WIDE = 16384
"""Experts times GPUs beyond which a step tries only swaps of the slowest GPUs, with fewer kicks."""
_QUICK_KICKS, _QUICK_RELAXATION = 1, 256
_QUICK, _SMALL = 262144, 4096
"""Experts times GPUs of all layers from which `quick` is the default, without and with room for copies."""
_LARGE = 1024
"""Experts times GPUs from which `quick` starts from the current placement only."""
_LARGE_STEPS, _LARGE_SWAPS, _LARGE_COPIES = 12, 256, 2
"""Limits of that search per layer: steps; scored swaps per step; copies, and experts and GPUs tried per copy. Layers of
up to 2,048 experts times GPUs have two to four times as many steps and copies."""
QUICK = {"quick": True}
"""Options for re-placement while serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of DIRECTOR.

    Attributes:
        c_max: maximum experts of a layer on a GPU (0: as memory allows).
        relaxation: limit of variables (experts times GPUs) up to which a layer also starts from the rounded relaxation,
            in addition to the balanced placement. Larger relaxations take seconds per layer. 0 skips the relaxation:
            faster and slightly worse (`tests/bench/test_placement_reach.py`).
        binary_search: find the relaxed optimum by the paper's bisection over the budget, instead of minimising
            directly.
        kicks: number of perturbations of each layer's best placement; proportionally fewer, with fewer swaps, for
            layers of more than 16,384 variables.
        replicas: use free slots for copies of experts while they help.
        processes: number of processes that share the layers, without effect on the placement.
        quick: limit the work, for placement before each batch: at most one kick, and a relaxation of at most 256
            variables. From 1,024 variables on, the search starts from the current placement, else from EPLB's, with at
            most 12 steps, and adds two copies per layer; up to 2,048 variables, two to four times as many
            (`tests/bench/test_placement_reach.py`). A layer starts from its current copies where they cost no more than
            the new placement before its copies. Without a current placement and with room for copies in each layer, it
            improves the better of EPLB's and the one with the fewest remote calls, by swaps; otherwise it takes that
            where it is better than the search. None: if all layers have more than 4,096 variables together with room
            for copies, or 262,144 without.
        seconds: time limit of the search, after which the best placement so far is taken (0: none). Layers get equal
            shares, half of them for copies. The placement then depends on the machine's speed.

    Raises:
        UsageError: one is out of range.
    """

    c_max: int = 0
    relaxation: int = 4096
    binary_search: bool = False
    kicks: int = 8
    replicas: bool = True
    processes: int = 1
    quick: bool | None = None
    seconds: float = 120.0

    def __post_init__(self) -> None:
        zero = Span(0)
        spans = {"kicks": zero, "relaxation": zero, "seconds": zero, "processes": Span(1, MOST_THREADS)}
        require_within(self, "director: ", **spans)


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place each layer by itself.

    Shapes: placed_GLE bool.

    Source: DIRECTOR § VI, Algorithm 1. Repairs and deviations:
        - The objective is a sum over layers, and memory is a limit per layer (C_max). So each layer is a small
          programme that is minimised directly. `binary_search` runs the printed loop on each and ends at the same
          optimum.
        - The relaxation's repairs are in `moetool.placement.relaxation.relax`, those of the rounding in
          `moetool.placement.rounding.round_layer`.
        - Local search over swaps and moves follows, then over copies; the paper has none.
        - Without `c_max`, C_max is a GPU's slots shared among the layers, and may differ between GPUs and layers.
        - A token whose expert has copies goes to the nearest (`moetool.placement.latency.flows`).
        - The paper places each batch anew and has no copies. With `quick`, large layers continue from the current
          placement.

    Raises:
        CapacityError: `c_max` does not cover every expert.
    """
    ends = _after(options.seconds)
    room_GL = layer_slots(problem, options.c_max)
    copied = options.replicas and problem.start_GLE is None and (room_GL.sum(axis=0) > problem.spec.num_experts_L).all()
    size = problem.demand.tokens_GLE.size
    if copied and (options.quick or (options.quick is None and size > _SMALL)):
        return _improved(problem, _packed(problem, room_GL), room_GL, ends)
    if options.quick or (options.quick is None and size > _QUICK):
        options = replace(
            options,
            quick=True,
            kicks=min(options.kicks, _QUICK_KICKS),
            relaxation=min(options.relaxation, _QUICK_RELAXATION),
        )
        if problem.start_GLE is None and options.replicas:
            problem = replace(problem, start_GLE=_packed(problem, room_GL)[0])
    tasks = []
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_GE = np.ascontiguousarray(problem.demand.tokens_GLE[:, layer, :num_experts])
        start_E = _start(problem, layer, tokens_GE, room_GL[:, layer])
        tasks.append((Layer(tokens_GE=tokens_GE, room_G=room_GL[:, layer], latency=problem.latency), layer, start_E))
    # Time that copies do not need stays unused, and experts' unused time goes to copies.
    share_s = options.seconds * min(options.processes, len(tasks)) / len(tasks) / (2 if options.replicas else 1)
    work = partial(place_layer, replace(options, seconds=share_s), problem.seed)
    total = len(tasks) * (2 if options.replicas else 1)
    gpus = run_layers(work, tasks, options.processes, lambda done: problem.on_progress(done, total))
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for layer, gpu_E in enumerate(gpus):
        placed_GLE[gpu_E, layer, np.arange(len(gpu_E))] = True
        if options.replicas and room_GL[:, layer].sum() > len(gpu_E):
            size = tasks[layer][0].tokens_GE.size
            most = _LARGE_COPIES * _scale(size) if options.quick and size >= _LARGE else 0
            now = time.perf_counter()
            until = now + (ends - now) / (len(gpus) - layer)
            search = CopySearch(problem, layer, placed_GLE[:, layer], room_GL[:, layer])
            if most and (kept_GE := _with_copies(problem, layer, room_GL[:, layer])) is not None:
                search = min(CopySearch(problem, layer, kept_GE, room_GL[:, layer]), search, key=lambda one: one.cost)
            search.run(most, until)
            placed_GLE[:, layer] = search.placed_GE
        problem.on_progress(len(tasks) + layer + 1 if options.replicas else total, total)
    if copied and time.perf_counter() < ends:
        quick = replace(problem, on_progress=lambda done, total: None)
        improved_GLE = _improved(quick, _packed(problem, room_GL), room_GL, ends)
        if slots := problem.equal_slots:  # compared as the engine holds them: further copies change the loads
            placed_GLE, improved_GLE = (filled(problem, one, slots, "director") for one in (placed_GLE, improved_GLE))
        for layer in range(problem.spec.num_layers):
            both = (placed_GLE[:, layer].copy(), improved_GLE[:, layer].copy())
            searches = [CopySearch(problem, layer, one_GE, room_GL[:, layer]) for one_GE in both]
            placed_GLE[:, layer] = min(searches, key=lambda one: one.cost).placed_GE
    return placed_GLE


def _packed(problem: Problem, room_GL: np.ndarray) -> list[np.ndarray]:
    """Return placements by EPLB's global form and, where GPUs have equal slots of each layer, with the fewest calls."""
    slots, most = int(room_GL.min()), int(room_GL.max())
    form = "heterogeneous" if slots < most or eplb.unmet(problem, 1) else "global"
    packed = [eplb.place(problem, eplb.Options(num_groups=1, slots_per_gpu=most, form=form))]
    if len(problem.cluster.servers) > 1 and slots == most:
        equal = replace(problem, equal_slots=slots)
        with contextlib.suppress(CapacityError):
            packed.append(prism_exact.place(equal, prism_exact.Options()))
    return packed


def _improved(problem: Problem, packed: Sequence[np.ndarray], room_GL: np.ndarray, ends: float) -> np.ndarray:
    """Return the best placement of each layer, improved by a few swaps, and by copies into free slots."""
    placed_GLE = np.zeros_like(packed[0])
    for layer in range(problem.spec.num_layers):
        room_G = room_GL[:, layer]
        starts = [CopySearch(problem, layer, one_GLE[:, layer].copy(), room_G) for one_GLE in packed]
        search = min(starts, key=lambda one: one.cost)
        if (search.placed_GE.sum(axis=1) < room_G).any():
            search.run(_LARGE_COPIES, ends)
        search.swap(_LARGE_STEPS, ends)
        placed_GLE[:, layer] = search.placed_GE
        problem.on_progress(layer + 1, problem.spec.num_layers)
    return placed_GLE


def _after(seconds: float) -> float:
    """Return the time in `seconds`, or infinity for 0."""
    return time.perf_counter() + seconds if seconds else math.inf


def _start(problem: Problem, layer: int, tokens_GE: np.ndarray, room_G: np.ndarray) -> np.ndarray | None:
    """Return the GPU of each expert in the current placement; of its copies, that with the most tokens for it.

    None without a current placement, or if it no longer fits.
    """
    if problem.start_GLE is None:
        return None
    held_GE = problem.start_GLE[:, layer, : tokens_GE.shape[1]]
    gpu_E: np.ndarray = np.where(held_GE, tokens_GE, -1.0).argmax(axis=0)
    fits = held_GE.any(axis=0).all() and (np.bincount(gpu_E, minlength=len(room_G)) <= room_G).all()
    return gpu_E if fits else None


def _with_copies(problem: Problem, layer: int, room_G: np.ndarray) -> np.ndarray | None:
    """Return the current placement [G, E] of a layer; None if it has no copies or no longer fits."""
    if problem.start_GLE is None:
        return None
    held_GE = problem.start_GLE[:, layer].copy()
    num_experts = problem.spec.num_experts_L[layer]
    fits = held_GE[:, :num_experts].any(axis=0).all() and (held_GE.sum(axis=1) <= room_G).all()
    return held_GE if fits and held_GE.sum() > num_experts else None


def _scale(size: int) -> int:
    """Return the factor of `_LARGE_STEPS` and `_LARGE_COPIES` for a layer of `size` experts times GPUs."""
    return max(1, 4 * _LARGE // size)


def place_layer(options: Options, seed: int, task: tuple[Layer, int, np.ndarray | None]) -> np.ndarray:
    """Return the GPU of each expert of a layer, without copies; `task` is the layer, its number and its start."""
    layer, number, start_E = task
    rng = np.random.default_rng([seed, number])
    until = _after(options.seconds)
    if options.quick and start_E is not None and layer.tokens_GE.size >= _LARGE:
        descent = Descent(layer, start_E, wide=False, most=_LARGE_SWAPS)
        descent.run(_LARGE_STEPS * _scale(layer.tokens_GE.size), until)
        return descent.place()
    speed_G = np.array(layer.latency.speed_G)
    starts = [balance(layer.tokens_GE.sum(axis=0), layer.room_G, speed_G)]
    if start_E is not None:
        starts.append(start_E)
    if layer.tokens_GE.size <= options.relaxation:
        with contextlib.suppress(TimeoutError):
            starts.append(round_layer(layer, _relaxed(layer, options.binary_search, starts[0], until), rng))
    size = layer.tokens_GE.size
    kicks = options.kicks if size <= _WIDE else min(options.kicks, max(1, options.kicks * _WIDE // size))
    return improve(layer, starts, rng, kicks, wide=size <= _WIDE, until=until)[1]


def round_relaxation(layer: Layer, rng: np.random.Generator) -> np.ndarray:
    """Return the GPU of each expert by the printed algorithm alone, int64 [E]."""
    start = balance(layer.tokens_GE.sum(axis=0), layer.room_G, np.array(layer.latency.speed_G))
    return round_layer(layer, _relaxed(layer, True, start), rng)


def _relaxed(layer: Layer, binary_search: bool, start: np.ndarray, until: float = math.inf) -> np.ndarray:
    if not binary_search:
        relaxed = relax(layer, until=until)
        assert relaxed is not None, "without a budget the relaxation has a solution: the start is one"
        return relaxed.x_EG
    low, high = 0.0, layer.cost(start)
    x_EG = (start[:, None] == np.arange(len(layer.room_G))).astype(np.float64)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = relax(layer, middle, until)
        if found is None:
            low = middle
        else:
            high, x_EG = middle, found.x_EG
    return x_EG


def run_layers(
    work: Callable[[Any], Any], tasks: Sequence[Any], processes: int, on_done: Callable[[int], None]
) -> list[Any]:
    """Return the results in the order of the tasks; `on_done` is called with their number after each."""
    chunk = max(1, len(tasks) // (2 * processes))
    results = []
    for result in map(work, tasks) if processes == 1 else _pool(processes).map(work, tasks, chunksize=chunk):
        results.append(result)
        on_done(len(results))
    return results


@cache
def _pool(processes: int) -> ProcessPoolExecutor:
    """Return persistent workers, since starting them takes longer than placing; they end with this process."""
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent)
