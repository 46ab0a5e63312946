"""Times of a run on the timeline by phase, with the bounds set by its work and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time breakdown of forwards: seconds = compute_s + prediction_s + stall_s + host_wait_s.

    Attributes:
        seconds: from the beginning of each forward to its end.
        compute_s: the device's arithmetic.
        prediction_s: predicting.
        stall_s: the compute stream waited for experts.
        host_s: experts computed on the host beside the device.
        host_wait_s: the device had to wait for those.
        io_s: by tier, how long its transfers kept it busy until the last of the forwards ended.
        read_bytes: of the transfers that began.
        late: prefetched experts that were waited for.
        promoted: those among them that had not begun and went ahead of everything then.
        dropped: prefetches never begun, since their slot was given away first.
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
        """Share of the time that the compute stream waited for experts (0 for no time)."""
        return self.stall_s / self.seconds if self.seconds else 0.0

    @property
    def overlap_bound_s(self) -> float:
        """The least that the same work and bytes take: the longest of compute, the host's share and each tier."""
        return max(self.compute_s, self.host_s, *self.io_s.values(), 0.0)

    @property
    def serial_bound_s(self) -> float:
        """Compute and all transfers in sequence: the bound without prefetching."""
        return self.compute_s + sum(self.io_s.values())

    def __add__(self, other: "Spent") -> "Spent":
        tiers = dict.fromkeys([*self.io_s, *other.io_s])
        return Spent(
            seconds=self.seconds + other.seconds,
            compute_s=self.compute_s + other.compute_s,
            prediction_s=self.prediction_s + other.prediction_s,
            stall_s=self.stall_s + other.stall_s,
            host_s=self.host_s + other.host_s,
            host_wait_s=self.host_wait_s + other.host_wait_s,
            io_s={tier: self.io_s.get(tier, 0.0) + other.io_s.get(tier, 0.0) for tier in tiers},
            read_bytes=self.read_bytes + other.read_bytes,
            late=self.late + other.late,
            promoted=self.promoted + other.promoted,
            dropped=self.dropped + other.dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one run.

    Attributes:
        prefill: of the forwards with prompt tokens.
        decode: of the forwards without.
        decode_forwards: how many those are.
        ttft_p50_s: time to first token, half of the requests are below; None without prompts.
        ttft_p95_s: the same for 95 % of them.
        tpot_p50_s: time per output token, of the forwards without prompt tokens; None without such forwards.
        tpot_p95_s: the same for 95 % of them.
        request_s: by request, of the forwards with prompt tokens that it took part in, and of those without.
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
        """Prefill and decode together."""
        return self.prefill + self.decode

    @property
    def tpot_mean_s(self) -> float | None:
        """Mean time per output token."""
        return self.decode.seconds / self.decode_forwards if self.decode_forwards else None

    def to_json(self) -> dict[str, Any]:
        """Flat, to go into the row of a table; what is of decoding alone says so."""
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
    """The 50th and the 95th percentile, between neighbours where they fall between two; None of nothing."""
    if not seconds:
        return None, None
    p50, p95 = np.percentile(seconds, (50, 95)).tolist()
    return p50, p95
