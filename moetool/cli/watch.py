"""Scheduler and cluster page of `moetool serve --cluster --mode edge`."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.base.config import parse

if TYPE_CHECKING:
    from moetool.cluster.edge.worker import WorkerSettings
    from moetool.placement.plan import PlacementPlan


class SchedulerWithPage:
    """The scheduler of a cluster and its page.

    Args:
        values: values of `--set`; those of `scheduler` and `dashboard` are removed.
        state: file of the scheduler's state (default for `values`).
        narrate: called with messages for the user.

    Effects: `open` serves the page; `close` ends it and saves the scheduler's state.

    Raises:
        UsageError: an unknown or invalid option.
        MismatchError: the scheduler's state is of another model or cluster.
    """

    def __init__(
        self, values: dict[str, Any], plan: "PlacementPlan", narrate: Callable[[str], object], state: Path
    ) -> None:
        from moetool.cluster.edge import dashboard
        from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions

        given = values.pop("scheduler", {})
        if plan.planner == "whole_layers" and isinstance(given, dict) and "planner" not in given:
            # The default planner would trade messages for remote calls.
            own = given.get("options", {})
            options_of_plan = {**plan.options, **own} if isinstance(own, dict) else own
            given = {**given, "planner": plan.planner, "options": options_of_plan}
        options = parse(SchedulerOptions, given, "--set scheduler")
        if not options.state:
            options = replace(options, state=str(state))
        self._page_options = parse(dashboard.DashboardOptions, values.pop("dashboard", {}), "--set dashboard")
        self._narrate = narrate
        self._page: dashboard.Dashboard | None = None
        self.scheduler = Scheduler(plan.spec, plan.cluster, options, narrate=narrate)

    def with_saved_placement(self, settings: "list[WorkerSettings]") -> "list[WorkerSettings]":
        """Return the workers' settings with the saved placement, if any, instead of the plan's."""
        held = self.scheduler.in_force
        if held is None or any(len(places) > one.capacity for places, one in zip(held, settings, strict=True)):
            return settings
        self._narrate(f"resuming from {self.scheduler.options.state}: its placement replaces the plan's")
        return [replace(one, held=tuple(sorted(places))) for one, places in zip(settings, held, strict=True)]

    def open(self, allowed_hosts: Iterable[str]) -> None:
        """Serve the page, also under these host names, unless it is disabled. Raises: UsageError: the port is taken."""
        from moetool.cluster.edge.dashboard import Dashboard

        host, port = self._page_options.host, self._page_options.port
        if port is None or port >= 0:
            self._page = Dashboard(self.scheduler.snapshot, host, port, allowed_hosts=allowed_hosts)
            self._narrate(f"cluster page: {self._page.url}")

    def close(self) -> None:
        """End the page, and save the state."""
        if self._page is not None:
            self._page.close()
        self.scheduler.save()
