"""Costs of compute, communication and migration for expert-parallel ranks: measured, or from a profile."""

from collections import deque
from typing import Any

import numpy as np

from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.parallel.batch_placement import BatchCosts
from moetool.cluster.parallel.batch_records import BatchRecord
from moetool.costing.costs import CostProfile, Curve
from moetool.placement.latency import profiled_latency

_NEWEST = 0.5
"""Weight of the newest batch in a measured cost."""
_STILL = 0.9
"""Share of the expected migration delay that remains after each batch without migration."""
_UNKNOWN_ROW_S = 1e-6
_LINK_BYTES = (1e5, 1e6)  # sizes between which a link's measured rate is the slope of its curve


class Costs:
    """Costs of ranks for placement decisions.

    Sources in order of precedence: measured in past batches; the profile; for links the plan's cluster; for a row 1 µs.

    - Row: expert seconds over rows. With a profile it depends on how many rows an expert gets at once: those of one
      source, as ranks compute them.
    - Byte of rows: slope of all-to-all seconds against the bytes that a rank sent, over the layers and steps of a
      batch. Where links differ, all are scaled by one factor.
    - Byte of experts: received bytes over the transfer time, of the last batches with migration together, so that one
      with few bytes counts little; before the first by the links. Plus the time that batches waited for experts, before
      they began and in all-to-alls. That delay decays by a tenth with each batch without migration, so that migration
      is tried again.

    Args:
        profile: measured costs to begin with.
        device, dtype: device and data type of the ranks, to choose from the profile.
        row_bytes: bytes of a row (default: float32 of the hidden size).

    Raises:
        MismatchError: the profile is of another kind of layer, or lacks the device or the data type.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        *,
        profile: CostProfile | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        row_bytes: float = 0.0,
    ) -> None:
        self._row_bytes = row_bytes or 4.0 * spec.hidden_size
        self._expert: Curve | None = None
        links = [[cluster.link(a, b)[0] for b in cluster.server_G] for a in cluster.server_G]
        self._byte_s_GG = 1.0 / np.array(links, np.float64)
        if profile is not None:
            self._expert = profile.on(device, dtype).expert
            latency = profiled_latency(cluster, spec, profile)
            low, high = _LINK_BYTES
            slopes = [(curve(high) - curve(low)) / (high - low) for curve in latency.links]
            self._byte_s_GG = np.array([*slopes, 0.0])[latency.link_GG]
        np.fill_diagonal(self._byte_s_GG, 0.0)
        self._row_s = self._byte_s = 0.0  # until measured
        self._waited_s = self._moved_bytes = self._moved_s = 0.0  # decaying sums over batches with migration
        self._seconds: deque[tuple[float, float]] = deque(maxlen=8)

    def note(self, record: BatchRecord, moved_s: float, num_ranks: int) -> None:
        """Update the costs by a finished batch.

        Args:
            moved_s: transfer seconds of its experts, summed over the ranks.
            num_ranks: ranks that served it.
        """
        self._seconds.append((record.seconds, record.dense_s + record.expert_s))
        if record.rows:
            self._row_s = _newer(self._row_s, record.expert_s * num_ranks / record.rows)
        if record.byte_s > 0:
            self._byte_s = _newer(self._byte_s, record.byte_s)
        if record.moved_bytes and moved_s:
            self._moved_bytes = _NEWEST * self._moved_bytes + record.moved_bytes
            self._moved_s = _NEWEST * self._moved_s + moved_s
            self._waited_s = _NEWEST * self._waited_s + record.ready_s + record.waited_s
        else:
            self._waited_s *= _STILL

    def forget_moving(self) -> None:
        """Forget transfers and their delay, after a change of the migration mode."""
        self._waited_s = self._moved_bytes = self._moved_s = 0.0

    def expected(self, elapsed_s: float | None, within_s: float, *, overlaps: bool) -> BatchCosts:
        """Return the costs for a decision.

        Args:
            elapsed_s: seconds since the running batch began; None if none runs.
            within_s: longest wait for a decision after the running batch ends.
            overlaps: whether experts move while the batch runs; moving is then free within the rest of its compute
                phases.
        """
        left_s = free_s = 0.0
        if elapsed_s is not None and self._seconds:
            whole_s, computing_s = np.mean(self._seconds, axis=0).tolist()
            left_s = max(0.0, whole_s - elapsed_s)
            free_s = left_s * computing_s / whole_s if overlaps and whole_s else 0.0
        return BatchCosts(
            row_s=self._row_s or (0.0 if self._expert is not None else _UNKNOWN_ROW_S),
            expert=self._expert,
            byte_s_GG=self._links(),
            row_bytes=self._row_bytes,
            move_bytes_s=self.move_bytes_s,
            added_byte_s=self._added_byte_s,
            free_s=free_s,
            within_s=left_s + within_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Return measured costs; 0 where nothing has been measured."""
        rate = 1.0 / self._byte_s if self._byte_s else 0.0
        return {
            "row_s": self._row_s,
            "link_bytes_s": rate,
            "move_bytes_s": self._moved_bytes / self._moved_s if self._moved_s else 0.0,
            "added_byte_s": self._added_byte_s,
        }

    @property
    def move_bytes_s(self) -> float:
        """Rate of experts to a rank: measured, else by the plan's or the profile's links.

        Rows are no measure of it: in an all-to-all a rank also waits for the others, the longer the busier they are.
        """
        if self._moved_s:
            return self._moved_bytes / self._moved_s
        away = self._byte_s_GG[self._byte_s_GG > 0]
        return 1.0 / float(away.mean()) if away.size else float("inf")

    @property
    def _added_byte_s(self) -> float:
        return self._waited_s / self._moved_bytes if self._moved_bytes else 0.0

    def _links(self) -> np.ndarray:
        planned = self._byte_s_GG[~np.eye(len(self._byte_s_GG), dtype=bool)]
        if not self._byte_s or not planned.size or not planned.mean():
            return self._byte_s_GG
        return self._byte_s_GG * (self._byte_s / planned.mean())


def _newer(before: float, now: float) -> float:
    return before + _NEWEST * (now - before) if before else now
