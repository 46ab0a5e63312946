"""MoETuner: an integer programme clusters the experts of each layer by load, a second one places the clusters."""

from dataclasses import dataclass

import numpy as np

from moetool.base.config import Span, require_within
from moetool.placement.planner import MOST_COUNT, Problem, layer_slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the first programme.

    Attributes:
        tolerance: gap to the bound at which its search ends, as a share of the layer's tokens.
        nodes: most nodes of the search; then the best clusters so far count.

    Raises:
        UsageError: one is out of range.
    """

    tolerance: float = 0.025
    nodes: int = 200

    def __post_init__(self) -> None:
        require_within(self, "moetuner: ", tolerance=Span(0), nodes=Span(1, MOST_COUNT))


def place(problem: Problem, options: Options) -> np.ndarray:
    """Cluster the experts of each layer, then place the clusters, without replicas.

    Shapes: placed_GLE bool.

    Source: MoETuner, arXiv 2502.06643, as summaries describe it; the paper's text was not available. Its first
    programme minimises the sum over clusters of |tokens - mean tokens|; its second one the largest of the transfers
    between two GPUs, in tokens over bandwidth. Deviations:
        - A cluster holds no more experts than its GPU has slots of the layer; the paper equalizes the sum over layers.
          So the second programme is a bottleneck assignment in each layer, solved exactly.
        - Transfers are those of moetool's ranks, from the GPU where a request starts. The paper's go from the experts
          of a layer to those of the next, which a demand does not count.
        - HiGHS replaces Gurobi, whose tolerance is 0.025 too. Here it is relative to the layer's tokens, since the
          optimum may be 0.
        - The search ends at `nodes`: 256 experts on 64 GPUs were left with a deviation of 8.3 %. If it has found no
          clusters by then, the heaviest experts are dealt out first.
    """
    room_GL = layer_slots(problem)
    placed_GLE = np.zeros(problem.demand.tokens_GLE.shape, bool)
    for number, num_experts in enumerate(problem.spec.num_experts_L):
        tokens_GE, room_G = problem.demand.tokens_GLE[:, number, :num_experts], room_GL[:, number]
        chosen_CE = clusters(tokens_GE.sum(axis=0), room_G, options)
        transfer_CGG = problem.latency.comm_s((chosen_CE @ tokens_GE.T)[:, :, None])
        fits_CG = chosen_CE.sum(axis=1)[:, None] <= room_G
        gpu_C = _bottleneck_assignment(np.where(fits_CG, transfer_CGG.max(axis=1), np.inf))
        placed_GLE[gpu_C, number, :num_experts] = chosen_CE
        problem.on_progress(number + 1, len(problem.spec.num_experts_L))
    return placed_GLE


def clusters(tokens_E: np.ndarray, room_C: np.ndarray, options: Options) -> np.ndarray:
    """Return the experts of each cluster, chosen_CE bool: the first programme.

    Args:
        room_C: most experts of each cluster, enough for all; none is empty if it has room and the experts suffice.
    """
    from scipy import sparse  # half a second, which other planners do not need
    from scipy.optimize import Bounds, LinearConstraint, milp

    num, experts = len(room_C), len(tokens_E)
    one, each = sparse.identity(experts), sparse.identity(num)
    share = sparse.kron(each, tokens_E[None] / (tokens_E.sum() or 1.0))
    # Columns: expert e in cluster c; then the mean share plus the cluster's deviation, so that the objective is 1 more.
    matrix = sparse.bmat(
        [
            [sparse.kron(np.ones((1, num)), one), None],
            [sparse.kron(each, np.ones((1, experts))), None],
            [share, -each],
            [share, each],
        ],
        format="csr",
    )
    none_C, least_C = np.full(num, np.inf), np.minimum(room_C, experts >= num)
    lower = np.concatenate([np.ones(experts), least_C, -none_C, np.full(num, 2 / num)])
    upper = np.concatenate([np.ones(experts), room_C, np.zeros(num), none_C])
    is_choice = np.repeat([1, 0], [num * experts, num])
    found = milp(
        1 - is_choice,
        integrality=is_choice,
        bounds=Bounds(0, np.where(is_choice, 1, np.inf)),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"mip_rel_gap": options.tolerance, "node_limit": options.nodes},
    )
    if found.x is None:
        return _heaviest_first(tokens_E, room_C)
    return np.asarray(found.x[: num * experts].reshape(num, experts) > 0.5)


def _heaviest_first(tokens_E: np.ndarray, room_C: np.ndarray) -> np.ndarray:
    """Return clusters, chosen_CE bool: each expert joins an empty cluster, else the least loaded one with room."""
    chosen_CE = np.zeros((len(room_C), len(tokens_E)), bool)
    for expert in np.argsort(-tokens_E, kind="stable"):
        size_C = chosen_CE.sum(axis=1)
        chosen_CE[np.lexsort((chosen_CE @ tokens_E, size_C > 0, size_C >= room_C))[0], expert] = True
    return chosen_CE


def _bottleneck_assignment(cost_CG: np.ndarray) -> np.ndarray:
    """Return the GPU of each cluster whose largest cost is least, and then the sum of costs."""
    from scipy.optimize import linear_sum_assignment

    levels = np.unique(cost_CG[np.isfinite(cost_CG)])
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        worse_CG = cost_CG > levels[middle]
        cluster_C, gpu_C = linear_sum_assignment(worse_CG)
        low, high = (middle + 1, high) if worse_CG[cluster_C, gpu_C].any() else (low, middle)
    dear = 1.0 + len(cost_CG) * levels[high]
    return np.asarray(linear_sum_assignment(np.where(cost_CG <= levels[high], cost_CG, dear))[1])
