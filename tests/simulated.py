"""Parts of simulations for tests."""

import numpy as np

from moetool.base.types import Cluster, ModelSpec
from moetool.placement.decide import InForce, ReplacementCosts, Replanner
from moetool.placement.latency import unit_latency
from moetool.simulation.placement_control import PlacementDecisions
from moetool.simulation.simulation_options import SimulationOptions


def static(spec: ModelSpec, cluster: Cluster, placed_GLE: np.ndarray) -> PlacementDecisions:
    """A placement that stays."""
    return PlacementDecisions(
        "nothing",
        InForce(spec=spec, cluster=cluster, placed_GLE=placed_GLE),
        ReplacementCosts(latency=unit_latency(cluster)),
        Replanner(planner="uniform"),
        SimulationOptions(),
    )
