"""Times of a run on the timeline by phase, with the bounds set by its work and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time breakdown of forwards: seconds = compute_s + prediction_s + stall_s + host_wait_s.

    Attributes:
        seconds: sum over the forwards, each from its beginning to its end.
        compute_s: compute on the device.
        stall_s: waits of the compute stream for experts.
        host_s: experts computed on the host.
        host_wait_s: waits of the device for the host.
        io_s: busy time of each tier until the end of the last forward.
        read_bytes: bytes of the transfers that began.
        late: prefetched experts that the compute stream waited for.
        promoted: late prefetches that had not begun and were started at once.
        dropped: prefetches that never began, since their slot was reused.
    """

    seconds: float
    compute_s: float
    prediction_s: float
    stall_s: float
    host_s: float
    host_wait_s: float
    io_s: Mapping[str, float]
    read_bytes: int
    late: int
    promoted: int
    dropped: int

    @property
    def stall_share(self) -> float:
        """Return the share of time in which the compute stream waits for experts (0 for no time)."""
        return self.stall_s / self.seconds if self.seconds else 0.0

    @property
    def overlap_bound_s(self) -> float:
        """Return the lower bound for the same work and bytes: the longest of compute, host and each tier."""
        return max(self.compute_s, self.host_s, *self.io_s.values(), 0.0)

    @property
    def serial_bound_s(self) -> float:
        """Return the time of compute and all transfers in sequence: the bound without prefetching."""
        return self.compute_s + sum(self.io_s.values())

    def __add__(self, other: "Spent") -> "Spent":
        names = [f.name for f in fields(self) if f.name != "io_s"]
        tiers = dict.fromkeys([*self.io_s, *other.io_s])
        return Spent(
            io_s={tier: self.io_s.get(tier, 0.0) + other.io_s.get(tier, 0.0) for tier in tiers},
            **{name: getattr(self, name) + getattr(other, name) for name in names},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one run.

    Attributes:
        prefill: times of the forwards with prompt tokens.
        decode: times of the forwards without prompt tokens.
        decode_forwards: number of forwards without prompt tokens.
        ttft_p50_s: median time to first token; None without prompts.
        ttft_p95_s: 95th percentile of the time to first token.
        tpot_p50_s: median time per output token; None without forwards that decode only.
        tpot_p95_s: 95th percentile of the time per output token.
        request_s: by request, the seconds of its forwards with prompt tokens and of those without.
    """

    prefill: Spent
    decode: Spent
    decode_forwards: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    tpot_p95_s: float | None
    request_s: Mapping[int, tuple[float, float]]

    @property
    def total(self) -> Spent:
        """Return the sum of prefill and decode."""
        return self.prefill + self.decode

    @property
    def tpot_mean_s(self) -> float | None:
        """Return the mean time per output token."""
        return self.decode.seconds / self.decode_forwards if self.decode_forwards else None

    def to_json(self) -> dict[str, Any]:
        """Return a flat table row; names of decode-only values say so."""
        total, forwards = self.total, self.decode_forwards
        return {
            "ttft_p50_s": self.ttft_p50_s,
            "ttft_p95_s": self.ttft_p95_s,
            "tpot_mean_s": self.tpot_mean_s,
            "tpot_p50_s": self.tpot_p50_s,
            "tpot_p95_s": self.tpot_p95_s,
            "tpot_overlap_bound_s": self.decode.overlap_bound_s / forwards if forwards else None,
            "tpot_serial_bound_s": self.decode.serial_bound_s / forwards if forwards else None,
            "seconds": total.seconds,
            "compute_s": total.compute_s,
            "prediction_s": total.prediction_s,
            "stall_s": total.stall_s,
            "stall_share": total.stall_share,
            "stall_share_decode": self.decode.stall_share,
            "host_s": total.host_s,
            "host_wait_s": total.host_wait_s,
            "io_s": dict(total.io_s),
            "overlap_bound_s": total.overlap_bound_s,
            "serial_bound_s": total.serial_bound_s,
            "read_bytes": total.read_bytes,
            "promoted": total.promoted,
            "dropped": total.dropped,
        }


def percentiles(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 50th and the 95th percentile, interpolated linearly; None for no values."""
    if not seconds:
        return None, None
    p50, p95 = np.percentile(seconds, (50, 95)).tolist()
    return p50, p95
