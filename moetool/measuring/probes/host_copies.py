"""Timings of expert copies from host memory to a GPU."""

import time
from functools import partial

import torch

from moetool.costing.costs import LoadCosts
from moetool.measuring.probes.repeat import Timings, repeat

_SHARES = (16, 4, 2, 1)  # sizes to copy, as parts of an expert
_BUFFERS = 8


def copy_costs(expert_bytes: int, seconds: float) -> tuple[LoadCosts, ...]:
    """Return load costs of pinned and pageable host memory to the first GPU, for copies up to an expert's size."""
    sizes = sorted({max(1, expert_bytes // share) for share in _SHARES})
    target = torch.empty(expert_bytes, dtype=torch.uint8, device="cuda")
    timings = {"pinned": Timings(), "pageable": Timings()}
    sources = {
        tier: [torch.ones(expert_bytes, dtype=torch.uint8, pin_memory=tier == "pinned") for _ in range(_BUFFERS)]
        for tier in timings
    }

    def measure(tier: str, num_bytes: int) -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for source in sources[tier]:
            target[:num_bytes].copy_(source[:num_bytes], non_blocking=True)
        torch.cuda.synchronize()
        timings[tier].add(num_bytes, (time.perf_counter() - began) / _BUFFERS)

    repeat([partial(measure, tier, num_bytes) for num_bytes in sizes for tier in timings], seconds)
    return tuple(LoadCosts(tier=tier, threads=1, direct=True, seconds=t.curve()) for tier, t in timings.items())
