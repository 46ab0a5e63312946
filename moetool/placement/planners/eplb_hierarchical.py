"""EPLB's hierarchical form: groups of experts to servers first, then copies within each server."""

import numpy as np

from moetool.placement.planner import Problem
from moetool.placement.planners import eplb
from moetool.placement.planners.eplb_global import Options as Options


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place by EPLB with the router's groups, or each expert as a group where these do not divide among the servers.

    Shapes: placed_GLE bool.

    Source: github.com/deepseek-ai/EPLB, `rebalance_experts` with the hierarchical policy, as SGLang runs it for
    DeepSeek-V3's prefill. `moetool.placement.planners.eplb` names the deviations. Groups of one expert are moetool's.

    Raises:
        UsageError, CapacityError: as `eplb`.
    """
    groups, servers = problem.spec.num_groups, len(problem.cluster.servers)
    if groups % servers:
        groups = problem.spec.num_experts
    return eplb.place(problem, eplb.Options(num_groups=groups, slots_per_gpu=options.slots_per_gpu))
