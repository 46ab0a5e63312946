"""Clients in turn, and a client's requests in turn."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetool.serving.fair_queue import FairQueue


def test_a_large_request_does_not_hold_up_small_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(5):
        queue.push("a", "large", f"large {i}")
    queue.push("a", "small", "small")
    queue.push("b", "other", "other")
    assert [queue.pop() for _ in range(len(queue))] == [
        *("large 0", "other", "small"),
        *(f"large {i}" for i in range(1, 5)),
    ]
    with pytest.raises(IndexError):
        queue.pop()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_everybody_gets_an_equal_share(pushed: list[tuple[int, int]]) -> None:
    queue: FairQueue[tuple[int, int, int]] = FairQueue()
    for i, (client, request) in enumerate(pushed):
        queue.push(client, request, (client, request, i))
    popped = [queue.pop() for _ in range(len(pushed))]
    assert sorted(i for *_, i in popped) == list(range(len(pushed)))
    for request in set(pushed):  # its items keep their order
        mine = [i for client, of, i in popped if (client, of) == request]
        assert mine == sorted(mine)
    left = Counter(client for client, _ in pushed)
    served: Counter[int] = Counter()
    for client, *_ in popped:
        served[client] += 1
        left[client] -= 1
        # Nobody who still waits is more than one turn behind.
        assert all(served[client] <= served[other] + 1 for other in left if left[other])


def test_what_is_taken_back_is_gone() -> None:
    queue: FairQueue[int] = FairQueue()
    for request in range(3):
        for item in range(2):
            queue.push("a", request, 10 * request + item)
    assert queue.remove("a", 1) == [10, 11] and queue.remove("a", 1) == [] and queue.remove("b", 0) == []
    assert len(queue) == 4 and [queue.pop() for _ in range(4)] == [0, 20, 1, 21]


def test_the_client_with_the_least_load_is_next() -> None:
    queue: FairQueue[str] = FairQueue()
    for client in "abc":
        for number in range(2):
            queue.push(client, number, f"{client}{number}")
    load = {"a": 2, "b": 0, "c": 0}
    assert [queue.pop(load.__getitem__) for _ in range(6)] == ["b0", "c0", "b1", "c1", "a0", "a1"]
