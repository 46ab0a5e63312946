"""Simulated annealing over swaps: DIRECTOR's heuristic baseline."""

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from moetool.base.errors import UsageError
from moetool.placement.local_search import Layer
from moetool.placement.planner import Problem, layer_slots
from moetool.placement.planners.uniform import even_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the annealing.

    Attributes:
        c_max: maximum experts of a layer on a GPU (0: as memory allows).
        steps: swaps tried in each layer.
        hot: initial temperature, as a share of the cost.
        cold: final temperature.
        seconds: time limit, shared equally by the layers (0: none). The placement then depends on the machine's speed.
    """

    c_max: int = 0
    steps: int = 4000
    hot: float = 0.02
    cold: float = 1e-5
    seconds: float = 120.0


def place(problem: Problem, options: Options) -> np.ndarray:
    """Anneal each layer from the uniform placement; return the best placement found.

    A proposal swaps two random experts, or moves one into a free slot. A worse placement is accepted with probability
    exp(-increase / temperature); the temperature falls geometrically.

    Shapes: placed_GLE bool.

    Source: DIRECTOR § VIII-D names simulated annealing "for sufficient iterations". The schedule is moetool's.

    Raises:
        UsageError: a temperature is not above 0, or steps or seconds are negative.
    """
    if min(options.steps, options.seconds) < 0 or not 0 < options.cold <= options.hot:
        raise UsageError("annealing needs steps and seconds >= 0, and 0 < cold <= hot")
    room_GL = layer_slots(problem, options.c_max)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for number, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_GE = problem.demand.tokens_GLE[:, number, :num_experts]
        layer = Layer(tokens_GE=tokens_GE, room_G=room_GL[:, number], latency=problem.latency)
        start = np.repeat(np.arange(len(room_GL)), even_shares(num_experts, room_GL[:, number]))
        rng = np.random.default_rng([problem.seed, number])
        gpu_E = anneal(layer, start, replace(options, seconds=options.seconds / len(problem.spec.num_experts_L)), rng)
        placed_GLE[gpu_E, number, np.arange(num_experts)] = True
    return placed_GLE


def anneal(layer: Layer, start: np.ndarray, options: Options, rng: np.random.Generator) -> np.ndarray:
    """Return the best placement found from a start: gpu_E."""
    latency, tokens_GE, num_experts = layer.latency, layer.tokens_GE, layer.num_experts
    gpu_E, flow_GG = start.copy(), layer.flow(start)
    free_G = layer.room_G - np.bincount(start, minlength=len(layer.room_G))
    cost = sum(latency.layer(flow_GG))
    best, found = cost, gpu_E.copy()
    fall = (options.cold / options.hot) ** (1 / max(1, options.steps))
    temperature = options.hot * cost
    slots = np.arange(num_experts + len(free_G))
    until = time.perf_counter() + options.seconds if options.seconds else math.inf
    for _ in range(options.steps):
        if time.perf_counter() >= until:
            break
        temperature *= fall
        here, there = int(rng.integers(num_experts)), int(rng.integers(len(slots)))
        g = int(gpu_E[here])
        h = int(gpu_E[there]) if there < num_experts else there - num_experts
        if g == h or (there >= num_experts and free_G[h] <= 0):
            continue
        more_G = -tokens_GE[:, here]
        if there < num_experts:
            more_G = more_G + tokens_GE[:, there]
        flow_GG[:, g] += more_G
        flow_GG[:, h] -= more_G
        after = sum(latency.layer(flow_GG))
        if after > cost and rng.random() >= math.exp((cost - after) / max(temperature, 1e-300)):
            flow_GG[:, g] -= more_G
            flow_GG[:, h] += more_G
            continue
        gpu_E[here] = h
        if there < num_experts:
            gpu_E[there] = g
        else:
            free_G[g] += 1
            free_G[h] -= 1
        cost = after
        if cost < best:
            best, found = cost, gpu_E.copy()
    return found
