"""The current placement, the pending decision about the next one, and measured costs."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moetool.base.errors import first_line
from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.parallel.batch_placement import BatchReplacement, Waiting
from moetool.cluster.parallel.batch_records import BatchRecord
from moetool.cluster.parallel.rank_costs import Costs
from moetool.cluster.parallel.staged_migration import plan_stages
from moetool.placement.decide import Decision
from moetool.placement.replica_routing import holders_of, without

_LOG = logging.getLogger(__name__)

_KEPT = 1000
"""Number of decisions kept."""


class PlacementState:
    """Runs decisions in the background and turns them into migration stages; for the head's thread.

    Args:
        placed_GLE: the initial placement, also of every generation with all ranks.
        migrate: how experts move (`moetool.cluster.parallel.compute_windows.MIGRATIONS`).
        costs: costs that every batch updates.
        patience_s: seconds that a batch waits for its decision.
        post: puts an event for `decided` into the head's queue.

    Attributes:
        control: makes decisions.
        costs: measured costs for decisions.
        decisions: the last thousand decisions.
        late: number of decisions dropped because their batch had begun.
        error: the last failure of the control; serving goes on without its decision.
        placed_GLE: the placement after the newest stage.
        version: version of that stage.
        slots_G: expert slots of each GPU, all layers together.
        used_GLE: uses of experts by each GPU's own tokens since the start.
        loaded_GLE: experts that each GPU received in migrations since the start.
        deciding: start time of the pending decision, or None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        control: BatchReplacement,
        placed_GLE: np.ndarray,
        migrate: str,
        *,
        costs: Costs,
        patience_s: float,
        post: Callable[[str, Any], None],
    ) -> None:
        self.decisions: list[Decision] = []
        self.late = 0
        self.error = ""
        self.version = 0
        self.deciding: float | None = None
        self._cluster, self._post = cluster, post
        self.slots_G = cluster.slots_G(spec.slot_bytes)
        self._exists_LE = np.arange(spec.num_experts) < np.array(spec.num_experts_L)[:, None]
        self._epoch = 0
        self._asked_for = -1  # the newest batch with a decision
        self._next: Decision | None = None  # to be carried out after the batch
        self.costs, self._patience_s = costs, patience_s
        self.control: BatchReplacement
        self.placed_GLE: np.ndarray
        self.used_GLE, self.loaded_GLE = np.zeros((2, *placed_GLE.shape), np.int64)
        self.use(control, placed_GLE, migrate)

    def use(self, control: BatchReplacement, placed_GLE: np.ndarray, migrate: str) -> None:
        """Start over; keep measured costs, except those of migration."""
        self.costs.forget_moving()
        self.control, self._planned_GLE, self.placed_GLE = control, placed_GLE, placed_GLE
        self._migrate = migrate
        self.decisions = []

    def order(self, there: Sequence[int]) -> dict[str, Any]:
        """Return the order for a new generation of these GPUs. A pending decision is dropped."""
        self._epoch += 1
        self._next = None
        self._asked_for = -1
        self.version += 1
        whole = len(there) == len(self._cluster.gpus)
        placed_GLE = self._planned_GLE if whole else without(self._planned_GLE, self._exists_LE, there)
        self.placed_GLE = placed_GLE.copy()
        return {"version": self.version, "holders": holders_of(placed_GLE), "migrate": self._migrate}

    def asked_for(self, batch: int) -> bool:
        """Whether a decision about a batch was begun."""
        return self._asked_for == batch

    def ask(self, batch: int, waiting: Sequence[Waiting], elapsed_s: float | None) -> None:
        """Start a decision for the next batch in its own thread.

        Args:
            elapsed_s: seconds since the running batch began; None if none runs.
        """
        self._asked_for, self.deciding = batch, time.monotonic()
        control, placed_GLE, epoch = self.control, self.placed_GLE, self._epoch
        costs = self.costs.expected(elapsed_s, self._patience_s, overlaps=self._migrate != "stop")

        def decide() -> None:
            try:
                found: Any = control.decide(waiting, placed_GLE, costs)
            except Exception as error:
                found = first_line(error)
            self._post("decided", (epoch, batch, found))

        threading.Thread(target=decide, name="control", daemon=True).start()

    def decided(self, epoch: int, batch: int, found: "Decision | str | None", running: int) -> list[dict[str, Any]]:
        """Accept a decision; return the stages to send now.

        Args:
            running: the last batch that has begun.
        """
        self.deciding = None
        if isinstance(found, str):
            self.error = found
            _LOG.warning("no decision about batch %d: %s", batch, found)
        elif found is not None and epoch == self._epoch:
            _LOG.info(
                "batch %d, planned by %s: %.4g s gained against %.4g s: %s, %d copies",
                *(batch, found.saw, found.gain_s, found.cost_s, found.reason, found.copies),
            )
            if running >= batch:
                _LOG.info("the decision for batch %d was late", batch)
                self.late += 1
                return []
            self.decisions = [*self.decisions, found][-_KEPT:]
            if found.made:
                self._next = found
                if self._migrate != "stop":
                    return self.stages()
        return []

    def stages(self) -> list[dict[str, Any]]:
        """Return the stages toward the decided placement that have not been sent."""
        decision, self._next = self._next, None
        if decision is None:
            return []
        made = plan_stages(
            self.placed_GLE,
            decision.placed_GLE,
            self.slots_G,
            version=self.version + 1,
            server_G=self._cluster.server_G,
        )
        self.version += len(made)
        self.loaded_GLE += decision.placed_GLE & ~self.placed_GLE
        self.placed_GLE = decision.placed_GLE
        return [asdict(stage) for stage in made]

    def note(self, record: BatchRecord, moved_s: float, num_ranks: int) -> None:
        """Record a finished batch; arguments as for `Costs.note`."""
        self.used_GLE += record.tokens_GLE
        self.control.saw(record.tokens_GLE)
        self.costs.note(record, moved_s, num_ranks)
