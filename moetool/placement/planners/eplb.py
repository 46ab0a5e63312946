"""EPLB, DeepSeek's load balancer: copies for the busiest experts, packed so that GPUs are equally busy."""

import heapq
from dataclasses import dataclass

import numpy as np

from moetool.base.errors import CapacityError, UsageError, unknown_name
from moetool.placement.gpus import replicate
from moetool.placement.planner import Problem, filled, layer_slots

FORMS = ("auto", "published", "global", "heterogeneous")
_OF_EQUAL_GPUS = ("published", "global")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of EPLB.

    Attributes:
        num_groups: groups of experts that stay together on a server (0: the model's).
        slots_per_gpu: physical experts of a layer on each GPU (0: as memory allows); a maximum on unequal GPUs.
        form: `published` (equal GPUs only): hierarchical if the groups divide evenly among the servers, else global;
            `global`: the same on one group and one server (planner `eplb_global`); `heterogeneous` (Prism's
            re-implementation), or `auto`: `published` if the cluster allows it and equal slots on every GPU hold all
            experts.
    """

    num_groups: int = 0
    slots_per_gpu: int = 0
    form: str = "auto"


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place by EPLB, as a set: a GPU that gets an expert twice keeps one copy.

    Shapes: placed_GLE bool.

    Source: github.com/deepseek-ai/EPLB, `rebalance_experts`. For unequal GPUs, Prism § IV-A names a re-implementation
    without details. Deviations:
        - The published packing may put two copies of an expert on one GPU. One is dropped. Its slot goes to the expert
          that the GPU lacks and that has the most load per copy.
        - The heterogeneous form replicates over all slots, no expert more often than there are GPUs. It packs the
          heaviest copy first. Of the GPUs with room and without that expert, it takes the one that finishes first.

    Raises:
        UsageError: the form is unknown, or the published one does not fit the cluster.
        CapacityError: a GPU of equal ones holds fewer than `slots_per_gpu`, or the slots do not hold every expert.
    """
    if options.form not in FORMS:
        raise unknown_name("form of eplb", options.form, FORMS)
    slots_GL = layer_slots(problem, options.slots_per_gpu, "slots_per_gpu")
    unequal = unmet(problem, options.num_groups or problem.spec.num_groups)
    if options.form in _OF_EQUAL_GPUS and unequal:
        raise UsageError(f"the published eplb needs {unequal}; use --set form=heterogeneous")
    if options.form != "heterogeneous" and not unequal and options.slots_per_gpu > slots_GL.min():
        raise CapacityError(
            f"slots_per_gpu is {options.slots_per_gpu}, but a GPU holds {slots_GL.min()} experts of each layer; lower "
            f"slots_per_gpu or give the GPUs more memory"
        )
    enough = int(slots_GL.min()) * len(slots_GL) >= problem.spec.num_experts
    if options.form in _OF_EQUAL_GPUS or (options.form == "auto" and not unequal and enough):
        return _published(problem, options, int(slots_GL.min()))
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    speed_G = np.array([gpu.speed for gpu in problem.cluster.gpus])
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_E = problem.demand.tokens_LE[layer, :num_experts]
        placed_GLE[:, layer, :num_experts] = pack_unequal(tokens_E, slots_GL[:, layer], speed_G)
    return placed_GLE


def unmet(problem: Problem, num_groups: int) -> str:
    """Return the unmet requirement of the published algorithm; empty if there is none."""
    spec, cluster = problem.spec, problem.cluster
    if len(set(problem.slots_G.tolist())) > 1 or len({len(server.gpus) for server in cluster.servers}) > 1:
        return "GPUs of one size, with equal numbers per server"
    if len({gpu.speed for gpu in cluster.gpus}) > 1:
        return "GPUs of one speed"
    if len(set(spec.num_experts_L)) > 1:
        return "equal numbers of experts in every layer"
    if num_groups < 1 or spec.num_experts % num_groups:
        return f"a number of groups that divides {spec.num_experts} experts, not {num_groups}"
    return ""


def _published(problem: Problem, options: Options, per_gpu: int) -> np.ndarray:
    num_gpus, num_experts = len(problem.slots_G), problem.spec.num_experts
    groups, nodes = options.num_groups or problem.spec.num_groups, len(problem.cluster.servers)
    if options.form == "global":
        groups = nodes = 1
    if per_gpu * num_gpus < num_experts:
        raise CapacityError(
            f"the published eplb with {per_gpu} slots of a layer on every GPU has {per_gpu * num_gpus} for "
            f"{num_experts} experts; use --set form=heterogeneous"
        )
    tokens_LE = problem.demand.tokens_LE
    logical_LP = rebalance_experts(tokens_LE, per_gpu * num_gpus, groups, nodes, num_gpus)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for layer, logical_GS in enumerate(logical_LP.reshape(len(logical_LP), num_gpus, -1)):
        placed_GLE[np.arange(num_gpus)[:, None], layer, logical_GS] = True
    return filled(problem, placed_GLE, min(per_gpu, num_experts), "eplb")


def rebalance_experts(
    tokens_LE: np.ndarray, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int
) -> np.ndarray:
    """Return the expert in each physical slot [L, P]: GPU g has the slots g * P/G to (g + 1) * P/G.

    If groups divide evenly among nodes: groups to nodes, then copies within each node, then copies to its GPUs
    (hierarchical). Otherwise all count as one group on one node (global).

    Source: github.com/deepseek-ai/EPLB, re-implemented; equal to it unless two loads tie.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    logical_LP = np.empty((len(tokens_LE), num_slots), np.int64)
    for layer, tokens_E in enumerate(tokens_LE.astype(np.float64)):
        members_QX = np.arange(len(tokens_E)).reshape(num_groups, -1)
        groups_of = pack_evenly(tokens_E[members_QX].sum(axis=1), num_nodes)
        slots: list[int] = []
        for groups in groups_of:
            experts = members_QX[groups].ravel()
            copies = replicate(tokens_E[experts], num_slots // num_nodes)
            count = np.bincount(copies, minlength=len(experts))
            load = (tokens_E[experts] / count)[copies]
            for pack in pack_evenly(load, num_gpus // num_nodes):
                slots += experts[copies[pack]].tolist()
        logical_LP[layer] = slots
    return logical_LP


def pack_evenly(load_X: np.ndarray, num_packs: int) -> list[list[int]]:
    """Pack items into packs of equal size: the heaviest goes to the lightest pack with room, ties to the first."""
    room = len(load_X) // num_packs
    if room == 1:
        return [[item] for item in range(len(load_X))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    lightest = [(0.0, pack) for pack in range(num_packs)]
    loads = load_X.tolist()
    for item in np.argsort(-load_X, kind="stable").tolist():
        total, pack = lightest[0]
        packs[pack].append(item)
        if len(packs[pack]) < room:
            heapq.heapreplace(lightest, (total + loads[item], pack))
        else:
            heapq.heappop(lightest)
    return packs


def pack_unequal(tokens_E: np.ndarray, slots_G: np.ndarray, speed_G: np.ndarray) -> np.ndarray:
    """Pack copies of a layer's experts on GPUs of unequal size and speed, the heaviest first: placed_GE bool."""
    num_gpus = len(slots_G)
    copies = replicate(tokens_E, int(slots_G.sum()), num_gpus)
    count_E = np.bincount(copies, minlength=len(tokens_E))
    load_E = tokens_E / count_E
    placed_GE = np.zeros((num_gpus, len(tokens_E)), bool)
    time_G, room_G = np.zeros(num_gpus), slots_G.copy()
    # An expert's first copy always has room: there are no more copies than slots. A later one without room is left out.
    for expert in copies[np.lexsort((copies, -load_E[copies]))].tolist():
        after_G = np.where((room_G > 0) & ~placed_GE[:, expert], time_G + load_E[expert] / speed_G, np.inf)
        gpu = int(after_G.argmin())
        if np.isfinite(after_G[gpu]):
            placed_GE[gpu, expert] = True
            time_G[gpu] = after_G[gpu]
            room_G[gpu] -= 1
    return placed_GE
