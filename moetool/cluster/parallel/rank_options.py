"""Options of expert-parallel ranks and their head."""

from collections.abc import Callable
from dataclasses import dataclass

from moetool.base.config import Span, require_within
from moetool.base.errors import unknown_name
from moetool.cluster.parallel.compute_windows import MIGRATIONS
from moetool.placement.request_ranks import RankAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Options of the head's batches.

    Attributes:
        seating: deals requests to the ranks (None: in turn).
        host: this machine's address, as the ranks reach it.
        gather_s: seconds that an incomplete batch waits for more requests.
        patience_s: seconds that a batch waits for its pending decision.
        names: names of the ranks, by GPU.
        narrate: called with a line about a rank that ends or returns.
    """

    seating: RankAssignment | None = None
    host: str = "127.0.0.1"
    gather_s: float = 0.01
    patience_s: float = 1.0
    names: tuple[str, ...] = ()
    narrate: Callable[[str], object] = lambda line: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options of each rank.

    Attributes:
        device: `cpu` or `cuda`. With `cuda` rows travel over NCCL, and each rank needs its own GPU.
        dtype: data type of all weights except the experts, which keep the checkpoint's form; empty: as `served_dtype`.
        kv_tokens: tokens in a rank's KV cache; also the longest context of one request.
        seats: requests that run at once on each rank.
        max_prompt_wait_s: time limit of a step with prompt tokens while the rank's other requests decode; prompt chunks
            shrink after a longer step (0: no limit).
        threads: compute threads of a rank (0: automatic).
        timeout_s: time limit of a collective; must exceed the slowest rank's forward. A rank that hangs is noticed
            after it, one that has ended at once.
        micro_batches: parts of the rows of a long step; with 2, one is exchanged while the other is computed. 0: 2
            among CPUs of several machines and with emulated links, else 1. On the CPU of one machine no core is idle
            during an exchange; over NCCL, 2 has not been run yet.
        migrate: `overlap`, `pipelined` or `stop` (`moetool.cluster.parallel.compute_windows.MIGRATIONS`, DIRECTOR's
            Figure 6).
        link_bytes_s: emulated rate of each rank's outgoing link, with a queue (0: not emulated).
    """

    device: str = "cpu"
    dtype: str = ""
    kv_tokens: int = 4096
    seats: int = 4
    max_prompt_wait_s: float = 0.25
    threads: int = 0
    timeout_s: float = 5.0
    micro_batches: int = 0
    migrate: str = "overlap"
    link_bytes_s: float = 0.0

    def __post_init__(self) -> None:
        if self.migrate not in MIGRATIONS:
            raise unknown_name("--set migrate", self.migrate, MIGRATIONS)
        amount, time = Span(0), Span(0, above=True)
        require_within(self, seats=Span(1), kv_tokens=Span(16), threads=amount, timeout_s=time)
        require_within(self, max_prompt_wait_s=amount, micro_batches=Span(0, 2), link_bytes_s=amount)

    def in_halves(self, on_one_machine: bool) -> bool:
        """Whether steps with many rows use two micro-batches."""
        waits = self.device == "cpu" and (self.link_bytes_s > 0 or not on_one_machine)
        return (self.micro_batches or 1 + waits) == 2
