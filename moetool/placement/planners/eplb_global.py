"""EPLB's global form: copies for the busiest experts of the whole cluster, whatever the router's groups and servers."""

from dataclasses import dataclass

import numpy as np

from moetool.placement.planner import Problem
from moetool.placement.planners import eplb


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of EPLB's global and hierarchical forms.

    Attributes:
        slots_per_gpu: physical experts of a layer on each GPU (0: as memory allows).
    """

    slots_per_gpu: int = 0


def place(problem: Problem, options: Options) -> np.ndarray:
    """Place by EPLB with one group of experts and one server; by its heterogeneous form where GPUs are unequal.

    Shapes: placed_GLE bool.

    Source: github.com/deepseek-ai/EPLB, `rebalance_experts` with the global policy, as vLLM and SGLang run it for
    models without groups. `moetool.placement.planners.eplb` names the deviations.

    Raises:
        CapacityError: as `eplb`.
    """
    form = "heterogeneous" if eplb.unmet(problem, 1) else "global"
    return eplb.place(problem, eplb.Options(num_groups=1, slots_per_gpu=options.slots_per_gpu, form=form))
