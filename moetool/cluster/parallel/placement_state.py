"""The current placement, the pending decision about the next one, and measured costs."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moetool.base.errors import first_line
from moetool.base.tables import count, numbered
from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.parallel.batch_placement import BatchReplacement, Waiting
from moetool.cluster.parallel.batch_records import BatchRecord
from moetool.cluster.parallel.rank_costs import Costs
from moetool.cluster.parallel.staged_migration import plan_stages
from moetool.placement.decide import Decision
from moetool.placement.replica_routing import holders_of, without

_LOG = logging.getLogger(__name__)

_KEPT, _SHOWN = 1000, 200
"""Number of decisions kept, and of their entries in the history."""
_LINE_S = 10.0
"""Seconds between two lines about migrations."""


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
        history: the last two hundred as JSON objects, with the batch that each is for and, if experts move, the
            expected and measured transfer seconds of the busiest rank, and how many copies have arrived.
        late: number of decisions dropped because their batch had begun.
        error: the last failure of the control; serving goes on without its decision.
        placed_GLE: the placement after the newest stage.
        version: version of that stage.
        slots_G: expert slots of each GPU, all layers together.
        used_GLE: uses of experts by each GPU's own tokens since the start.
        loaded_GLE: experts that each GPU received in migrations since the start.
        deciding: start time of the pending decision, or None.
        narrate: called with a line about migrations.
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
        self.history: deque[dict[str, Any]] = deque(maxlen=_SHOWN)
        self.narrate: Callable[[str], object] = lambda line: None
        self._moving: deque[dict[str, Any]] = deque()  # entries of migrations under way, oldest first
        self._told_s, self._untold = -math.inf, (0, 0)  # time of the last line; migrations and bytes since then
        self._expert_bytes_L = np.array(spec.expert_bytes_L)
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
        self.history.clear()

    def order(self, there: Sequence[int]) -> dict[str, Any]:
        """Return the order for a new generation of these GPUs. A pending decision is dropped."""
        self._epoch += 1
        self._next = None
        self._moving.clear()
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
            self._remember(batch, found)
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
        self._moving[-1]["version"] = self.version
        return [asdict(stage) for stage in made]

    def note(self, record: BatchRecord, moved_s: float, num_ranks: int) -> None:
        """Record a finished batch; its seconds go to the migrations under way, oldest first, by experts that arrived.

        Seconds are of the busiest rank, experts of all ranks: none says which migration a piece is of. Arguments as for
        `Costs.note`.
        """
        self.used_GLE += record.tokens_GLE
        self.control.saw(record.tokens_GLE)
        self.costs.note(record, moved_s, num_ranks)
        under_way = [entry for entry in self._moving if entry["version"] is not None]
        left, left_s = record.moved_experts, record.moved_s
        for entry in under_way:
            came = min(left, entry["copies"] - entry["arrived"])
            seconds = left_s if came == left or entry is under_way[-1] else record.moved_s * came / record.moved_experts
            entry["arrived"] += came
            entry["taken_s"] += seconds
            left, left_s = left - came, left_s - seconds
            if record.version >= entry["version"]:
                self._tell(self._moving.popleft())

    def _remember(self, batch: int, decision: Decision) -> None:
        """Add a decision to the history; a migration that it makes is then under way."""
        entry = {"batch": batch, **decision.to_json()}
        if decision.made:
            copies_GL = (decision.placed_GLE & ~self.placed_GLE).sum(axis=2)
            expected_s = float((copies_GL @ self._expert_bytes_L).max()) / self.costs.move_bytes_s
            entry |= {"version": None, "expected_s": expected_s, "taken_s": 0.0, "arrived": 0}
            self._moving.append(entry)
        self.history.append(entry)

    def _tell(self, entry: Mapping[str, Any]) -> None:
        """Narrate a finished migration, or count it for the next line."""
        more, more_bytes = self._untold
        if time.monotonic() - self._told_s < _LINE_S:
            self._untold = more + 1, more_bytes + entry["bytes"]
            return
        since = f"; {numbered(more, 'more migration')} of {count(more_bytes, 'B')} before it" if more else ""
        self.narrate(
            f"batch {entry['batch']}: {numbered(entry['copies'], 'expert')} moved, {count(entry['bytes'], 'B')} in "
            f"{entry['taken_s']:.2g} s ({entry['expected_s']:.2g} s expected), planned by {entry['saw']} to save "
            f"{entry['gain_s']:.2g} s{since}"
        )
        self._told_s, self._untold = time.monotonic(), (0, 0)
