"""A paged KV cache that begins small and grows on demand, in sixteenths of its full size."""

from typing import Any

from moetool.runtime.kv.prefix_pages import PrefixPages
from moetool.runtime.returned_memory import release_pages

IDLE_FORWARDS = 256
"""Forwards without use by running requests after which pages are returned."""
_KEPT_PERIODS = 8
"""Times `IDLE_FORWARDS` after which half of the growth for evicted prefixes goes back."""
_STEPS = 16


class GrowingPages:
    """Holds back sectors of transformers' paged cache until requests need them; its address space covers all.

    Pages of earlier prompts are evicted before the cache grows. If a prompt needs evicted pages again, the cache grows
    by as many; half of this growth is undone every eight `IDLE_FORWARDS`. Otherwise it shrinks to what running requests
    needed in the last `IDLE_FORWARDS` forwards. The system has the memory of held-back sectors.

    Args:
        cache: paged cache on a CPU, with one kind of layers.
        pages: pages of that cache.
        first_tokens: initial tokens of the cache.
    """

    def __init__(self, cache: Any, pages: PrefixPages, first_tokens: int) -> None:
        self._cache, self._pages, self._pool = cache, pages, cache.pool
        (self._allocator,) = cache.cache_allocators.values()
        self._first = min(cache.num_sectors, -(-first_tokens // cache.tokens_per_sector))
        self._step = max(1, -(-(cache.num_sectors - self._first) // _STEPS))
        self._held: list[int] = []
        self._forwards = self._most_used = 0
        self._wanted = 0  # steps of growth for evicted prefixes
        self._lost = pages.lost
        self._store, self._free_share = cache.can_store_request_tokens, cache.compute_free_capacity
        cache.can_store_request_tokens = self._make_room
        cache.compute_free_capacity = self._free_capacity
        self._hold(cache.num_sectors - self._first)

    @property
    def borrowed_tokens(self) -> int:
        """Tokens of KV cache beyond the first."""
        return (self._sectors - self._first) * int(self._cache.tokens_per_sector)

    @property
    def held_bytes(self) -> int:
        """Bytes of the sectors that are held back."""
        return len(self._held) * int(self._cache.bytes_per_sector)

    def begin_forward(self) -> None:
        """Shrink, between two forwards, if running requests have needed less for some time."""
        self._most_used = max(self._most_used, self._used)
        self._forwards += 1
        if self._forwards % (_KEPT_PERIODS * IDLE_FORWARDS) == 0:
            self._wanted //= 2
        if self._forwards % IDLE_FORWARDS == 0:
            steps = max(self._steps(self._most_used), self._wanted)
            self._hold(self._sectors - self._first - steps * self._step)
            self._most_used = 0

    @property
    def _sectors(self) -> int:
        return int(self._cache.num_sectors) - len(self._held)

    @property
    def _used(self) -> int:
        """Sectors that the pages of running requests take."""
        per_sector, index = self._allocator.blocks_per_sector, self._allocator.index
        taken = (self._sectors - self._pool.num_free_sectors) * per_sector - self._pool.count_free_blocks(index)
        return -(-(taken - self._pages.unused) // per_sector)

    def _steps(self, sectors: int) -> int:
        """Steps of growth that give at least this number of sectors."""
        return -(-max(0, sectors - self._first) // self._step)

    def _hold(self, count: int) -> None:
        """Hold back up to this number of sectors, only ones that no running request uses."""
        if count <= 0:
            return
        self._pool.try_to_free_sectors()
        if (missing := count - self._pool.num_free_sectors) > 0:
            self._pages.evict(missing * self._allocator.blocks_per_sector)
            self._pool.try_to_free_sectors()
        free = sorted(self._pool.free_sectors)
        newly = free[len(free) - min(count, len(free)) :]
        self._pool.free_sectors = free[: len(free) - len(newly)]
        self._held += newly
        size, memory = self._cache.bytes_per_sector, self._cache.cache_tensor
        for first, end in _runs(newly):
            release_pages(memory[first * size : end * size])

    def _make_room(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Replacement of `PagedAttentionCache.can_store_request_tokens` that may grow the cache."""
        if self._pages.lost > self._lost and not dry_run:
            pages, self._lost = self._pages.lost - self._lost, self._pages.lost
            wanted = self._sectors + -(-pages // self._allocator.blocks_per_sector)
            while self._held and self._sectors < wanted:
                self._grow()
            self._wanted = self._steps(wanted)
        while not self._store(state, request_len, dry_run):
            if dry_run or not self._held:
                return False
            self._grow()
        return True

    def _grow(self) -> None:
        kept = max(0, len(self._held) - self._step)
        self._pool.free_sectors += self._held[kept:]
        del self._held[kept:]

    def _free_capacity(self, relative: bool = True) -> float:
        """Replacement of `PagedAttentionCache.compute_free_capacity` that includes held-back sectors."""
        total_bytes = self._cache.num_sectors * self._cache.bytes_per_sector
        return float(self._free_share(relative) + self.held_bytes / (total_bytes if relative else 1))


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """First and end of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
