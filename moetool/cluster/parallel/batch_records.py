"""Measured record of a batch over all ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moetool.base.types import Cluster


@dataclass(slots=True, kw_only=True)
class BatchRecord:
    """A finished batch.

    Attributes:
        number: number from 0.
        seconds: wall time at the head, from start to end.
        ready_s: part of these spent waiting for experts.
        waited_s: waits of all-to-alls for parts of experts, maximum over ranks.
        steps: forwards in lockstep.
        hottest: rows on the busiest GPU, summed over steps and layers.
        rows: rows of all GPUs.
        sent_GG: bytes of rows from GPU to GPU.
        moved_bytes: bytes of experts that arrived while it ran, or after the previous batch.
        moved_experts: completed copies of experts in that time.
        moved_during_exchange: part of the bytes in an all-to-all.
        from_disk: experts read from the checkpoint because their source had ended.
        held: most experts that a rank held in this generation, including arrivals before a switch.
        version: version of the placement at its end.
        tokens_GLE: uses of experts by each GPU's own tokens.
        expert_s, dense_s, exchange_s: seconds, means over the ranks (`DispatchTally`).
        byte_s: seconds per byte of rows in an all-to-all, without its fixed cost; 0 if unknown.
        decided_s: seconds that the batch waited for its decision.
        moved_s: transfer seconds of these experts, on the rank with the most.
    """

    number: int
    requests: int
    seconds: float
    ready_s: float
    waited_s: float
    steps: int
    hottest: int
    rows: int
    sent_GG: np.ndarray
    moved_bytes: int
    moved_experts: int
    moved_during_exchange: int
    from_disk: int
    held: int
    version: int
    tokens_GLE: np.ndarray
    expert_s: float
    dense_s: float
    exchange_s: float
    byte_s: float = 0.0
    decided_s: float = 0.0
    moved_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all fields but `tokens_GLE`."""
        values = {name: value for name, value in asdict(self).items() if name != "tokens_GLE"}
        return {**values, "sent_GG": self.sent_GG.tolist()}


def record_of(
    number: int,
    requests: int,
    seconds: float,
    done: Mapping[int, Mapping[str, Any]],
    cluster: Cluster,
    *,
    decided_s: float = 0.0,
) -> BatchRecord:
    """Combine the ranks' reports of a batch.

    Args:
        done: each rank's message, by GPU.
    """
    tallies = {gpu: message["tally"] for gpu, message in done.items()}
    rows_GSL = np.array([tally["rows_SL"] for tally in tallies.values()], np.int64)
    num_gpus = len(cluster.gpus)
    shape = np.array(next(iter(tallies.values()))["tokens_LE"]).shape
    sent_GG, tokens_GLE = np.zeros((num_gpus, num_gpus), np.int64), np.zeros((num_gpus, *shape), np.int64)
    for gpu, tally in tallies.items():
        sent_GG[gpu] = tally["sent"]
        tokens_GLE[gpu] = tally["tokens_LE"]
    return BatchRecord(
        number=number,
        requests=requests,
        seconds=seconds,
        ready_s=max(message["ready_s"] for message in done.values()),
        waited_s=max(message["waited_s"] for message in done.values()),
        steps=max(tally["steps"] for tally in tallies.values()),
        hottest=int(rows_GSL.max(axis=0).sum()) if rows_GSL.size else 0,
        rows=int(rows_GSL.sum()),
        sent_GG=sent_GG,
        moved_bytes=sum(message["moved"]["bytes"] for message in done.values()),
        moved_experts=sum(message["moved"]["experts"] for message in done.values()),
        moved_during_exchange=sum(message["moved"]["during_exchange"] for message in done.values()),
        from_disk=sum(message["moved"]["from_disk"] for message in done.values()),
        held=max(message["held"] for message in done.values()),
        version=max(message["version"] for message in done.values()),
        tokens_GLE=tokens_GLE,
        expert_s=float(np.mean([tally["expert_s"] for tally in tallies.values()])),
        dense_s=float(np.mean([tally["dense_s"] for tally in tallies.values()])),
        exchange_s=float(np.mean([tally["exchange_s"] for tally in tallies.values()])),
        byte_s=slope(np.sum([tally["wire"] for tally in tallies.values()], axis=0)),
        decided_s=decided_s,
        moved_s=max(message["moved"]["seconds"] for message in done.values()),
    )


def slope(sums: np.ndarray) -> float:
    """Seconds per byte, by least squares; 0 if nothing varies.

    Args:
        sums: see `Tally.wire`.
    """
    count, x, y, xx, xy = np.asarray(sums, np.float64)
    spread = count * xx - x * x
    return float(max(0.0, (count * xy - x * y) / spread)) if count > 1 and spread > 1e-9 * count * xx else 0.0
