"""Prefix caching over the paged KV cache: pages of earlier prompts and answers, with LRU eviction.

transformers shares pages whose tokens, and all tokens before them, are equal. It keeps unused pages until memory runs
short and then drops all of them; here it drops only as many as needed.
"""

import heapq
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger, compute_block_hash


class PrefixPages:
    """Makes a paged cache of transformers evict unused pages one at a time.

    Args:
        cache: made with `allow_block_sharing`.
        may_reuse: whether a request, by its name, may reuse cached pages.

    Attributes:
        active: whether the cache shares pages: only if every layer attends to the whole context.
        evicted: pages evicted so far.
        lost: evicted pages that later prompts needed again; as many are remembered as the cache holds.
    """

    def __init__(self, cache: Any, may_reuse: Callable[[str], bool]) -> None:
        self.active = bool(cache.use_prefix_sharing)
        self.evicted = self.lost = 0
        self._may_reuse = may_reuse
        self._cache = cache
        if not self.active:
            return
        (self._allocator,) = cache.cache_allocators.values()
        self._ledger = _Ledger(cache.num_sectors * self._allocator.blocks_per_sector)
        self._allocator.ledger = self._ledger
        self._store, self._free_share = cache.can_store_request_tokens, cache.compute_free_capacity
        self._match = cache.search_prefix_match
        cache.search_prefix_match = self._search
        cache.can_store_request_tokens = self._make_room
        cache.compute_free_capacity = self._free_capacity

    @property
    def unused(self) -> int:
        """Number of unused pages, kept for later prompts."""
        return len(self._ledger.cached_blocks) if self.active else 0

    def begin_forward(self) -> None:
        """Advance the LRU clock."""
        if self.active:
            self._ledger.clock += 1

    def forget(self, request: str) -> None:
        """Drop the pages of a request with possibly wrong values, except those that others use."""
        if self.active:
            self._cache.free_blocks(request, no_cache=True)

    def evict(self, count: int) -> None:
        """Drop up to this number of unused pages, the least recently used first."""
        if self.active and (victims := self._ledger.evict(min(count, self.unused))):
            self.evicted += len(victims)
            self._cache.pool.free_blocks(self._allocator.index, victims)

    def _search(self, request: str, prompt: list[int]) -> int:
        """Replacement of `PagedAttentionCache.search_prefix_match` that asks `may_reuse`."""
        if not self._may_reuse(request):
            return 0
        matched: int = self._match(request, prompt)
        self.lost += self._ledger.recognized(prompt, self._allocator.tokens_per_page)
        return matched

    def _make_room(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Replacement of `PagedAttentionCache.can_store_request_tokens` that may evict."""
        if self._store(state, request_len, dry_run):
            return True
        pool, index = self._cache.pool, self._allocator.index
        free = pool.count_free_blocks(index) + pool.num_free_sectors * self._allocator.blocks_per_sector
        missing = self._allocator.needs_new_blocks(state.request_id, state.current_len(), request_len) - free
        if dry_run or missing > self.unused:
            return False
        victims = self._ledger.evict(missing)
        self.evicted += len(victims)
        pool.free_blocks(index, victims)
        stored: bool = self._store(state, request_len)
        return stored

    def _free_capacity(self, relative: bool = True) -> float:
        """Replacement of `PagedAttentionCache.compute_free_capacity` that includes evictable pages."""
        unused_bytes = self.unused * self._allocator.bytes_per_block
        total_bytes = self._cache.num_sectors * self._cache.bytes_per_sector
        return float(self._free_share(relative) + unused_bytes / (total_bytes if relative else 1))


class _Ledger(BlockLedger):
    """transformers' page ledger, with the LRU order of unused pages and the hashes of up to `most` evicted ones."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.clock = 0
        self._order: dict[int, tuple[int, int]] = {}
        self._released = 0
        self._gone: dict[int, None] = {}  # hashes of evicted pages, the oldest first

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        freed: bool = super().release(block_id, no_cache)
        self._released += 1
        if block_id in self.cached_blocks:
            # A request releases its pages from first to last; the last is useless without those before it.
            self._order[block_id] = (self.clock, -self._released)
        return freed

    def evict(self, count: int) -> list[int]:
        """Drop this number of unused pages."""
        victims = heapq.nsmallest(count, self.cached_blocks, key=self._order.__getitem__)
        for block in victims:
            del self.cached_blocks[block], self._order[block]
            gone = self.block_to_hash.pop(block)
            del self.hash_to_block[gone]
            self._gone[gone] = None
        while len(self._gone) > self._most:
            del self._gone[next(iter(self._gone))]
        return victims

    def recognized(self, prompt: list[int], page: int) -> int:
        """Count evicted pages of `page` tokens that continue the prompt's cached pages, each page once."""
        found, last = 0, None
        for start in range(0, len(prompt) - page, page):
            last = compute_block_hash(last, prompt[start : start + page])
            if last in self._gone:
                del self._gone[last]
                found += 1
            elif last not in self.hash_to_block:
                break
        return found
