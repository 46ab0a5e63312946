"""Scores of placements for a stream of batches: DIRECTOR's Figures 3 and 11."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from moetool.base.types import Cluster, Gpu, Server
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.placement.demand import Demand, held_out, planned_share, read_batches
from moetool.placement.latency import Latency, linear_latency, unit_latency
from moetool.placement.modes import Batch, modes
from moetool.trace.reader import Trace

LINKS = DESCRIBES_COSTS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, mixed; the given trace replaces them.
        gpus: GPUs of one node.
        room: capacity of all GPUs, as a multiple of the experts; 1 leaves no capacity for replicas.
        planners: lines by name, each with the options of its planner: the line's name, or `planner`.
        experts: experts per layer; higher ids count as `expert % experts` (0: all), so that an exhaustive search ends.
        layers: indices of the MoE layers (empty: all).
        batches: most batches per seed.
        reported: the compared modes.
    """

    data: tuple[str, ...]
    gpus: int = 8
    room: float = 1.0
    planners: Mapping[str, Mapping[str, Any]]
    experts: int = 0
    layers: tuple[int, ...] = ()
    batches: int = 8
    tokens: int = 64
    reported: tuple[str, ...] = ("vanilla", "offline", "reactive", "proactive")


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """T_comp + T_comm of every mode (`moetool.placement.modes`) and planner, with another trace per seed.

    Source: DIRECTOR § III and § VIII-D. Computing a token costs 1, as does sending one over a link at its usual rate.
    """
    samples = Samples(bench)
    for seed in bench.seeds:
        trace, learned = bench.trace(options.data, fold=seed), bench.others(options.data, seed)
        samples.use(trace)
        history, coming = _batches(trace, learned, options, seed)
        latency = _latency(coming[0][0].cluster, bench.machine.links)
        for name, given in options.planners.items():
            own = {option: value for option, value in given.items() if option != "planner"}
            for mode in modes(coming, history, given.get("planner", name), own, latency, seed=seed):
                if mode.mode in options.reported:
                    label = mode.mode if len(options.planners) == 1 else f"{name}, {mode.mode}"
                    samples.add(label, mode.latency)
    on = f"{options.gpus} GPUs of one node, T_comp + T_comm per layer"
    return samples.found("cost of a batch, T_comp + T_comm, mean over layers", "tokens", on)


def _latency(cluster: Cluster, links: float) -> Latency:
    unit = unit_latency(cluster)
    made = linear_latency(cluster, 1.0, 1.0 / links, unit.token_bytes, unit.name)
    return replace(made, unit=unit.unit, sides=unit.sides)


def _batches(trace: Trace, learned: Trace | None, options: Options, seed: int) -> tuple[list[Demand], list[Batch]]:
    """History from one trace and batches from another, or every other request of a single trace."""
    spec, size = trace.spec, options.gpus
    experts = (options.experts or spec.num_experts) * (len(options.layers) or spec.num_layers)
    slots = int(np.ceil(options.room * experts / size))
    gpu = Gpu(memory_bytes=slots * spec.slot_bytes)
    node = Cluster(servers=(Server(name="node", gpus=(replace(gpu, memory_bytes=spec.all_experts_bytes),) * size),))
    cluster = replace(node, servers=(Server(name="node", gpus=(gpu,) * size),))
    uses = planned_share(0.5 if learned is None else 1.0)

    def read(one: Trace, wanted: Callable[[str, int], bool]) -> Iterator[Batch]:
        for demand, parts in read_batches([one], node, options.tokens, seed, wanted):
            yield _folded(demand, cluster, options), parts

    history = [demand for demand, _ in read(learned or trace, uses)]
    coming = list(islice(read(trace, held_out(uses) if learned is None else uses), options.batches))
    if len(coming) < 2:
        raise CannotTestError(
            f"{trace.path} makes {len(coming)} batch of {size} requests of {options.tokens} tokens, not two"
        )
    return history, coming


def _folded(demand: Demand, cluster: Cluster, options: Options) -> Demand:
    """Demand restricted to some layers, with several experts merged into one."""
    spec, tokens_GLE, experts = demand.spec, demand.tokens_GLE, options.experts
    if options.layers:
        chosen = options.layers
        spec = replace(
            spec,
            layer_ids_L=tuple(spec.layer_ids_L[layer] for layer in chosen),
            num_experts_L=tuple(spec.num_experts_L[layer] for layer in chosen),
            top_k_L=tuple(spec.top_k_L[layer] for layer in chosen),
            has_logits_L=tuple(spec.has_logits_L[layer] for layer in chosen),
            expert_bytes_L=tuple(spec.expert_bytes_L[layer] for layer in chosen),
        )
        tokens_GLE = tokens_GLE[:, list(chosen)]
    if experts and experts < spec.num_experts:
        folded_GLE = np.zeros((*tokens_GLE.shape[:2], experts))
        for expert in range(spec.num_experts):
            folded_GLE[:, :, expert % experts] += tokens_GLE[:, :, expert]
        spec, tokens_GLE = replace(spec, num_experts_L=(experts,) * spec.num_layers), folded_GLE
    return replace(demand, spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)
