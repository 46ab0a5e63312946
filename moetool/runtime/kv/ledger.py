"""The ledger of pages: which request has which, and which earlier prompt's can be used again.

Source: block managers of vLLM and nano-vllm.

Deviations:
- A page that no request uses is kept under the hash of its tokens and of all tokens before it, until room is needed.
  Pages leave one at a time, the least recently used first; a request's last page leaves before its first.
- The ledger may begin small and grow on demand, in sixteenths of its full size. Kept pages leave before it grows. If a
  prompt needs pages again that have left, it grows by as many; half of this growth is undone every eight
  `IDLE_FORWARDS`. Otherwise it shrinks to what running requests needed in the last `IDLE_FORWARDS` forwards.
"""

import heapq
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import groupby

import numpy as np

from moetool.runtime.decoding import PAGE_TOKENS

IDLE_FORWARDS = 256
"""Forwards without use by running requests after which pages are returned."""
_KEPT_PERIODS = 8
_STEPS = 16


class PageTable:
    """The pages of one request.

    Args:
        num_tokens: most tokens that it may have.

    Attributes:
        pages: in order of its tokens.
        rows: row of each token, as far as there are pages, int64.
        hashes: of its first pages, as far as they are known.
        registered: number of its first pages that later prompts may find.
    """

    __slots__ = ("hashes", "pages", "registered", "rows")

    def __init__(self, num_tokens: int) -> None:
        self.pages: list[int] = []
        self.hashes: list[bytes] = []
        self.registered = 0
        self.rows = np.empty(-(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS, np.int64)

    def append(self, pages: Sequence[int]) -> None:
        """Add pages after the last one."""
        begin = len(self.pages) * PAGE_TOKENS
        rows_NP = np.array(pages, np.int64)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        self.rows[begin : begin + rows_NP.size] = rows_NP.ravel()
        self.pages += pages

    def hash_pages(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Hashes of the first `count` pages."""
        while len(self.hashes) < count:
            begin = len(self.hashes) * PAGE_TOKENS
            own = array("q", tokens[begin : begin + PAGE_TOKENS]).tobytes()
            self.hashes.append(blake2b((self.hashes[-1] if begin else b"") + own, digest_size=16).digest())
        return self.hashes[:count]


class PageLedger:
    """Pages 1 to `num_pages` and their use.

    Args:
        sharing: keep pages for later prompts that begin with the same tokens.
        first_pages: pages at first; 0: all.
        release: called with the first and the end of a range of pages that are given up.

    Attributes:
        limit: pages at present.
        evicted: kept pages that had to leave so far.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        sharing: bool = False,
        first_pages: int = 0,
        release: Callable[[int, int], None] = lambda first, end: None,
    ) -> None:
        self.num_pages, self.sharing = num_pages, sharing
        self.first = self.limit = min(num_pages, first_pages or num_pages)
        self.evicted = 0
        self._release_memory = release
        self._step = max(1, -(-(num_pages - self.first) // _STEPS))
        self._free = list(range(1, self.limit + 1))  # a heap: low pages first, so that high ones can be given up
        self._held = list(range(num_pages, self.limit, -1))  # given up, or not used yet
        self._uses = [0] * (num_pages + 1)
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._kept: dict[int, None] = {}  # pages that no request uses, the least recently used first
        self._gone: dict[bytes, None] = {}  # hashes of evicted pages, the oldest first; at most as many as pages
        self._forwards = self._most_used = 0
        self._wanted = 0  # steps of growth for evicted prefixes

    @property
    def available(self) -> int:
        """Pages that requests can get without growth."""
        return len(self._free) + len(self._kept)

    @property
    def free_share(self) -> float:
        """Share of all pages that requests can get."""
        return (self.available + self.num_pages - self.limit) / self.num_pages

    @property
    def kept(self) -> dict[bytes, int]:
        """Hashes and pages that no request uses, the least recently used first."""
        return {self._hash_of[page]: page for page in self._kept}

    def restore(self, hashes: Sequence[bytes]) -> None:
        """Keep pages 1, 2, ... of a new ledger for these hashes, the least recently used first."""
        for one in hashes:
            page = heapq.heappop(self._free)
            self._by_hash[one], self._hash_of[page], self._kept[page] = page, one, None

    def begin_forward(self) -> None:
        """Shrink, between two forwards, if running requests have needed less for some time."""
        self._most_used = max(self._most_used, self.limit - self.available)
        self._forwards += 1
        if self._forwards % (_KEPT_PERIODS * IDLE_FORWARDS) == 0:
            self._wanted //= 2
        if self._forwards % IDLE_FORWARDS == 0:
            self._shrink(max(self._steps(self._most_used), self._wanted))
            self._most_used = 0

    def match(self, table: PageTable, tokens: Sequence[int]) -> int:
        """Give a new request the kept or shared pages that its tokens begin with, never that of the last token.

        Returns:
            Number of tokens that the pages hold.
        """
        hashes = table.hash_pages(tokens, (len(tokens) - 1) // PAGE_TOKENS) if self.sharing else []
        found: list[int] = []
        lost = 0
        for one in hashes:
            page = self._by_hash.get(one)
            if page is None and one not in self._gone:
                break
            if page is None:
                del self._gone[one]
                lost += 1
            elif not lost:
                found.append(page)
        for page in found:
            self._uses[page] += 1
            self._kept.pop(page, None)
        table.append(found)
        table.registered = len(found)
        if lost:
            self._wanted = self._steps(min(self.num_pages, self.limit + lost))
            while self._steps(self.limit) < self._wanted:
                self._grow()
        return len(found) * PAGE_TOKENS

    def reserve(self, table: PageTable, num_tokens: int) -> bool:
        """Give a request the pages for this number of tokens; returns whether there are enough."""
        count = -(-num_tokens // PAGE_TOKENS) - len(table.pages)
        if count <= 0:
            return True
        if count > self.available + self.num_pages - self.limit:
            return False
        while count > self.available:
            self._grow()
        self._evict(count - len(self._free))
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._uses[page] = 1
        table.append(pages)
        return True

    def register(self, table: PageTable, tokens: Sequence[int], num_tokens: int) -> None:
        """Offer the full pages of a request's first tokens, which have been computed, to later prompts."""
        full = num_tokens // PAGE_TOKENS
        if not self.sharing or full == table.registered:
            return
        table.hash_pages(tokens, full)
        for page, one in zip(table.pages[table.registered : full], table.hashes[table.registered : full], strict=True):
            if self._by_hash.setdefault(one, page) == page:
                self._hash_of[page] = one
        table.registered = full

    def release(self, table: PageTable, *, keep: bool = True) -> None:
        """Take back a request's pages.

        Args:
            keep: keep those that were registered; False: their values may be wrong.
        """
        for page in reversed(table.pages):
            self._uses[page] -= 1
            if self._uses[page]:
                continue
            if keep and page in self._hash_of:
                self._kept[page] = None
            else:
                self._by_hash.pop(self._hash_of.pop(page, b""), None)
                heapq.heappush(self._free, page)
        table.pages.clear()
        table.registered = 0

    def _evict(self, count: int) -> None:
        """Drop this number of kept pages, the least recently used first."""
        for _ in range(count):
            page = next(iter(self._kept))
            del self._kept[page]
            gone = self._hash_of.pop(page)
            del self._by_hash[gone]
            self._gone[gone] = None
            if len(self._gone) > self.num_pages:
                del self._gone[next(iter(self._gone))]
            self.evicted += 1
            heapq.heappush(self._free, page)

    def _grow(self) -> None:
        for _ in range(min(self._step, len(self._held))):
            heapq.heappush(self._free, self._held.pop())
            self.limit += 1

    def _steps(self, pages: int) -> int:
        """Steps of growth that give at least this number of pages."""
        return -(-max(0, pages - self.first) // self._step)

    def _shrink(self, steps: int) -> None:
        """Give up pages that no running request uses, until those beyond `first` are this number of steps."""
        count = min(self.limit - self.first - steps * self._step, self.available)
        if count <= 0:
            return
        self._evict(count - len(self._free))
        free = sorted(self._free)
        self._free, held = free[:-count], free[-count:]
        self._held = sorted(self._held + held, reverse=True)
        self.limit -= count
        for _, run in groupby(enumerate(held), lambda place: place[1] - place[0]):
            pages = [page for _, page in run]
            self._release_memory(pages[0], pages[-1] + 1)
