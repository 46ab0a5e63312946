"""Costs of computing, sending and moving while ranks serve: as given, as measured, or from a profile."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.cluster.parallel.batch_placement import BatchCosts
from moetool.cluster.parallel.batch_records import BatchRecord
from moetool.costing.costs import CostProfile, Curve
from moetool.placement._latency import profiled_latency
from moetool.types import Cluster, ModelSpec

_NEWEST = 0.5
"""Weight of the newest batch in a measured cost."""
_STILL = 0.9
"""Share of the expected cost of moving that is left after each batch in which nothing moved."""
_UNKNOWN_ROW_S = 1e-6
_LINK_BYTES = (1e5, 1e6)  # between which a measured link's rate is taken from its curve


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """Given costs; 0 means that a cost is measured.

    Attributes:
        row_s: seconds that an expert takes for a row.
        link_bytes_s: of rows, out of each GPU.
        move_bytes_s: at which experts come to a GPU.
    """

    row_s: float = 0.0
    link_bytes_s: float = 0.0
    move_bytes_s: float = 0.0


class Costs:
    """Costs of ranks, by which new placements are decided.

    Each is, in this order: as given; as measured in the batches so far; from the profile; for links from the plan's
    cluster; for an expert's row, a microsecond.

    - A row: all seconds of experts over all rows. By the profile it depends on how many rows an expert gets at once:
      those of one source, as ranks compute them.
    - A byte of rows: the slope of the seconds of an all-to-all against the bytes that a rank sent in it, over the
      layers and steps of a batch. Where links differ, all are slower or faster by one factor than the plan's.
    - A byte of experts: bytes that came over the seconds that pieces of them were on their way; and what the batches
      that they came in have waited for them, before they began and in all-to-alls. That is forgotten by a tenth with
      each batch in which nothing moved, so that moving is tried again some time.

    Args:
        device, dtype: of the ranks.
        row_bytes: of a row.

    Raises:
        MismatchError: the profile is of another kind of layer, or lacks the device or the data type.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        *,
        said: GivenCosts | None = None,
        profile: CostProfile | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        row_bytes: float = 0.0,
    ) -> None:
        self._said = said or GivenCosts()
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
        self._row_s = self._byte_s = self._move_bytes_s = 0.0  # until they are measured
        self._waited_s = self._moved_bytes = 0.0  # of the newest batches in which experts moved, the older the less
        self._seconds: deque[tuple[float, float]] = deque(maxlen=8)

    def note(self, record: BatchRecord, moved_s: float, num_ranks: int) -> None:
        """Measure by a batch that has ended.

        Args:
            moved_s: that its experts were on their way, summed over the ranks.
        """
        self._seconds.append((record.seconds, record.dense_s + record.expert_s))
        if record.rows:
            self._row_s = _newer(self._row_s, record.expert_s * num_ranks / record.rows)
        if record.byte_s > 0:
            self._byte_s = _newer(self._byte_s, record.byte_s)
        if record.moved_bytes and moved_s:
            self._move_bytes_s = _newer(self._move_bytes_s, record.moved_bytes / moved_s)
            self._moved_bytes = _NEWEST * self._moved_bytes + record.moved_bytes
            self._waited_s = _NEWEST * self._waited_s + record.ready_s + record.waited_s
        else:
            self._waited_s *= _STILL

    def forget_moving(self) -> None:
        """Experts move in another way from now on."""
        self._waited_s = self._moved_bytes = 0.0

    def expected(self, elapsed_s: float | None, within_s: float, *, overlaps: bool) -> BatchCosts:
        """Costs for a decision.

        Args:
            elapsed_s: since the batch that runs began, if one does.
            within_s: a decision is waited for when that has ended.
            overlaps: whether experts move while it runs; then moving costs nothing in what is left of its compute
                phases.
        """
        left_s = free_s = 0.0
        if elapsed_s is not None and self._seconds:
            whole_s, computing_s = np.mean(self._seconds, axis=0).tolist()
            left_s = max(0.0, whole_s - elapsed_s)
            free_s = left_s * computing_s / whole_s if overlaps and whole_s else 0.0
        byte_s_GG = self._links()
        away = byte_s_GG[byte_s_GG > 0]
        rate = 1.0 / float(away.mean()) if away.size else float("inf")
        return BatchCosts(
            row_s=self._said.row_s or self._row_s or (0.0 if self._expert is not None else _UNKNOWN_ROW_S),
            expert=self._expert,
            byte_s_GG=byte_s_GG,
            row_bytes=self._row_bytes,
            move_bytes_s=self._said.move_bytes_s or self._move_bytes_s or rate,
            added_byte_s=self._added_byte_s,
            free_s=free_s,
            within_s=left_s + within_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Measured costs; 0 where there are none yet."""
        rate = 1.0 / self._byte_s if self._byte_s else 0.0
        return {
            "row_s": self._row_s,
            "link_bytes_s": rate,
            "move_bytes_s": self._move_bytes_s,
            "added_byte_s": self._added_byte_s,
        }

    @property
    def _added_byte_s(self) -> float:
        return self._waited_s / self._moved_bytes if self._moved_bytes else 0.0

    def _links(self) -> np.ndarray:
        away_GG = ~np.eye(len(self._byte_s_GG), dtype=bool)
        if self._said.link_bytes_s:
            return away_GG / self._said.link_bytes_s
        planned = self._byte_s_GG[away_GG]
        if not self._byte_s or not planned.size or not planned.mean():
            return self._byte_s_GG
        return self._byte_s_GG * (self._byte_s / planned.mean())


def _newer(before: float, now: float) -> float:
    return before + _NEWEST * (now - before) if before else now
