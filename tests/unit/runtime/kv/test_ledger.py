"""Pages by request: sharing, eviction, growth."""

import random

import pytest

from moetool.runtime.decoding import PAGE_TOKENS
from moetool.runtime.kv import ledger
from moetool.runtime.kv.ledger import PageLedger, PageTable


def _run(pages: PageLedger, tokens: list[int], most: int = 64) -> PageTable:
    """A request that has forwarded all its tokens."""
    table = PageTable(most)
    pages.match(table, tokens)
    assert pages.reserve(table, len(tokens))
    pages.register(table, tokens, len(tokens))
    return table


def test_rows_are_those_of_the_pages_in_order() -> None:
    pages = PageLedger(6)
    first, second = PageTable(9), PageTable(9)
    assert pages.reserve(first, 5) and pages.reserve(second, 1) and pages.reserve(first, 9)
    assert first.pages == [1, 2, 4] and second.pages == [3]
    assert first.rows[:9].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 16]
    assert not pages.reserve(second, 3 * PAGE_TOKENS + 1) and second.pages == [3]
    pages.release(first)
    assert pages.available == 5


def test_a_prompt_gets_the_pages_of_equal_beginnings_but_never_that_of_its_last_token() -> None:
    pages = PageLedger(20, sharing=True)
    earlier = _run(pages, list(range(10)))
    found = PageTable(64)
    assert pages.match(found, list(range(8))) == 4 and found.pages == earlier.pages[:1]
    assert pages.match(longer := PageTable(64), [*range(9), 77, 78]) == 8
    assert longer.pages == earlier.pages[:2] and longer.rows[:8].tolist() == list(range(4, 12))
    assert pages.match(PageTable(64), [5, *range(1, 10)]) == 0
    pages.release(earlier)
    assert pages.match(PageTable(64), list(range(9))) == 8  # others still use them
    assert PageLedger(20).match(PageTable(64), list(range(9))) == 0


def test_the_least_recently_used_page_leaves_first_and_a_last_page_before_a_first() -> None:
    pages = PageLedger(5, sharing=True)
    for tokens in ([1] * 8, [2] * 8):
        pages.release(_run(pages, tokens))
    pages.release(_run(pages, [1] * 8))  # its first page is used again
    newest = PageTable(64)
    assert pages.reserve(newest, 3 * PAGE_TOKENS) and pages.evicted == 2
    assert [pages.match(PageTable(64), [number] * 9) for number in (1, 2)] == [4, 4]


def test_wrong_pages_are_not_kept_unless_another_request_has_them() -> None:
    pages = PageLedger(10, sharing=True)
    broken = _run(pages, [1] * 8)
    other = PageTable(64)
    assert pages.match(other, [1] * 6) == 4
    pages.release(broken, keep=False)
    assert pages.match(PageTable(64), [1] * 9) == 4
    pages.release(other)
    assert pages.available == 9


def test_a_small_ledger_evicts_then_grows_and_shrinks_when_little_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "IDLE_FORWARDS", 4)
    given_up: list[tuple[int, int]] = []
    pages = PageLedger(36, sharing=True, first_pages=4, release=lambda first, end: given_up.append((first, end)))
    pages.release(_run(pages, [1] * 16))
    assert (pages.limit, pages.available, pages.evicted) == (4, 4, 0)
    long = _run(pages, [2] * 40)
    assert (pages.limit, pages.evicted) == (10, 4)  # in steps of two pages
    pages.release(long)
    again = PageTable(64)
    assert pages.match(again, [1] * 17) == 0  # it needed what has left
    assert pages.limit == 14
    for _ in range(200):
        pages.begin_forward()
    assert pages.limit == 4 and given_up[0][1] == 15 and given_up[-1][0] == 5
    pages.release(again)
    low, high = PageTable(200), PageTable(200)
    assert pages.reserve(low, 20 * PAGE_TOKENS) and pages.reserve(high, 1)
    pages.release(low)
    given_up.clear()
    for _ in range(40):  # a page in use stays, wherever it is
        pages.begin_forward()
    assert pages.limit == 4 and high.pages == [21] and given_up == [(4, 21), (22, 23)]
    pages.release(high)
    assert pages.reserve(PageTable(200), 36 * PAGE_TOKENS) and pages.limit == 36


@pytest.mark.parametrize("first_pages", [0, 8])
def test_pages_are_never_lost_nor_given_twice(first_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "IDLE_FORWARDS", 3)
    draw = random.Random(5)
    pages = PageLedger(40, sharing=True, first_pages=first_pages)
    running: list[tuple[PageTable, list[int]]] = []
    for _ in range(3000):
        pages.begin_forward()
        if draw.random() < 0.4:
            tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 40))]
            table = PageTable(80)
            held = pages.match(table, tokens)
            assert held < len(tokens) and held % PAGE_TOKENS == 0
            if not pages.reserve(table, len(tokens)):
                pages.release(table)
                continue
            pages.register(table, tokens, len(tokens))
            running.append((table, tokens))
        elif running:
            table, tokens = running[draw.randrange(len(running))]
            if len(tokens) < 80 and draw.random() < 0.7 and pages.reserve(table, len(tokens) + 1):
                tokens.append(draw.randrange(2))
                pages.register(table, tokens, len(tokens))
            else:
                running = [one for one in running if one[0] is not table]
                pages.release(table, keep=draw.random() < 0.8)
        used = {page for table, _ in running for page in table.pages}
        assert len(used) + pages.available == pages.limit
        by_page: dict[int, list[int]] = {}
        for table, tokens in running:  # a shared page holds the same tokens, after the same tokens
            for i, page in enumerate(table.pages):
                held_tokens = tokens[: (i + 1) * PAGE_TOKENS]
                if len(held_tokens) == (i + 1) * PAGE_TOKENS or page in by_page:
                    assert by_page.setdefault(page, held_tokens) == held_tokens
