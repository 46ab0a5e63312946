"""Prism: expert counts per layer and server by entropy of use, then the experts by frequency."""

from dataclasses import dataclass

import numpy as np

from moetool.placement.demand import per_server
from moetool.placement.gpus import pack_servers
from moetool.placement.planner import Problem, apportion

OBJECTIVE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of Prism.

    Attributes:
        fill: use the slots left by the printed floors and the cap of E experts per layer. False leaves them empty, as
            printed, unless an expert would be unplaced.
    """

    fill: bool = True


def place(problem: Problem, options: Options) -> np.ndarray:
    """Run Algorithms 1 and 2, then pack each server's experts onto its GPUs.

    Shapes: placed_GLE bool.

    Source: Prism § III-C, Algorithms 1 and 2. Repairs, without which they lose slots or do not terminate:
        - Algorithm 1, line 6 can give a layer more than its E experts: capped, the rest goes to the server's other
          layers by their entropy.
        - Its floors lose slots: largest remainder instead.
        - Its loop never ends if all slots together are fewer than L * E: `Problem` refuses that with the shortfall. It
          borrows only from layers above E (the printed one may take from a layer below E): from this server's layer
          with the highest total.
        - A server with zero entropy in every layer, such as an idle one, counts as uniform.
        - Algorithm 2 skips servers without a duplicate, updates unassigned experts and copies at once, and uses an
          expert's frequency on its new server.
    """
    return pack_servers(problem, assign(problem, allocate(problem, options)))


def allocate(problem: Problem, options: Options) -> np.ndarray:
    """Run Algorithm 1: the number of experts [N, L] of each layer on each server."""
    experts_L = np.array(problem.spec.num_experts_L)
    slots_N = per_server(problem.cluster, problem.slots_G).astype(np.int64)
    entropy_NL = entropy(problem.demand.frequency_NLE)
    count_NL = np.zeros(entropy_NL.shape, np.int64)
    for n, slots in enumerate(np.minimum(slots_N, experts_L.sum()).tolist()):
        weight_L = entropy_NL[n] if entropy_NL[n].any() else experts_L.astype(np.float64)
        if not options.fill:
            count_NL[n] = np.minimum(np.floor(slots * weight_L / weight_L.sum()), experts_L)
            continue
        while (free := slots - int(count_NL[n].sum())) > 0:
            open_L = count_NL[n] < experts_L
            share_L = np.where(open_L, weight_L, 0.0)
            if not share_L.any():
                share_L = np.where(open_L, 1.0, 0.0)
            count_NL[n] = np.minimum(count_NL[n] + apportion(free, share_L), experts_L)

    total_L = count_NL.sum(axis=0)
    by_memory = np.argsort(-slots_N, kind="stable").tolist()
    for layer, num_experts in enumerate(experts_L.tolist()):
        while total_L[layer] < num_experts:
            for n in by_memory:
                surplus_L = np.where(count_NL[n] > 0, total_L - experts_L, 0)
                lender = int(surplus_L.argmax())
                empty = slots_N[n] > count_NL[n].sum() and not (total_L > experts_L).any()
                if count_NL[n, layer] >= num_experts or (surplus_L[lender] <= 0 and not empty):
                    continue
                if not empty:
                    count_NL[n, lender] -= 1
                    total_L[lender] -= 1
                count_NL[n, layer] += 1
                total_L[layer] += 1
                if total_L[layer] == num_experts:
                    break
    return count_NL


def entropy(frequency_NLE: np.ndarray) -> np.ndarray:
    """Return v of each server and layer in bits (§ III-C1)."""
    p_NLE = frequency_NLE / frequency_NLE.sum(axis=2, keepdims=True)
    return -(p_NLE * np.log2(np.where(p_NLE > 0, p_NLE, 1.0))).sum(axis=2)


def assign(problem: Problem, count_NL: np.ndarray) -> np.ndarray:
    """Run Algorithm 2: the experts [N, L, E] of each server."""
    frequency_NLE = problem.demand.frequency_NLE
    placed_NLE = np.zeros(frequency_NLE.shape, bool)
    for layer, num_experts in enumerate(problem.spec.num_experts_L):
        frequency_NE, placed_NE = frequency_NLE[:, layer, :num_experts], placed_NLE[:, layer, :num_experts]
        for n, count in enumerate(count_NL[:, layer].tolist()):
            placed_NE[n, np.argsort(-frequency_NE[n], kind="stable")[:count]] = True
        copies_E = placed_NE.sum(axis=0)
        while not copies_E.all():
            duplicates_N = (placed_NE & (copies_E > 1)).sum(axis=1)
            for n in np.argsort(duplicates_N, kind="stable").tolist():
                twice_E = placed_NE[n] & (copies_E > 1)
                if copies_E.all() or not twice_E.any():
                    continue
                wanted = int(np.where(copies_E == 0, frequency_NE[n], -1.0).argmax())
                given_up = int(np.where(twice_E, frequency_NE[n], np.inf).argmin())
                for expert, held in ((given_up, False), (wanted, True)):
                    placed_NE[n, expert] = held
                    copies_E[expert] += 1 if held else -1
    return placed_NLE
