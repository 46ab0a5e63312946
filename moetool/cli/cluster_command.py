"""Arguments of `moetool serve --cluster`, before its mode is known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.base.errors import UsageError, shortened

if TYPE_CHECKING:
    from moetool.base.types import Cluster
    from moetool.cluster.launch import ClusterAddress
    from moetool.placement.plan import PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCommand:
    """Arguments of a cluster command.

    Attributes:
        values: values of `--set`, by name.
        refused: options without effect here, and whether they were given.
        predictor: predictor for proactive placement in expert parallelism.
        profile: costs for its decisions.
    """

    model: str
    plan: Path | None
    cluster: str
    mode: str
    host: str
    port: int
    api_key: str | None = field(repr=False)
    values: Mapping[str, Any]
    refused: Mapping[str, bool]
    predictor: Path | None = None
    profile: Path | None = None

    def plan_for(
        self, where: "ClusterAddress", processes: str, names_of: "Callable[[Cluster], Sequence[str]]"
    ) -> "PlacementPlan":
        """The placement plan. Raises: UsageError: `where` starts another number of processes than the plan names."""
        from moetool.placement.plan import PlacementPlan

        assert self.plan is not None
        plan = PlacementPlan.load(self.plan)
        names = names_of(plan.cluster)
        if where.count not in (None, len(names)):
            raise UsageError(
                f"--cluster {self.cluster} starts {where.count} {processes}, and the plan is for {len(names)}: "
                f"{shortened(', '.join(names))}; write local:{len(names)}, or plan for another cluster"
            )
        return plan
