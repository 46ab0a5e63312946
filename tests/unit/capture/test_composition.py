"""Batches of prompts."""

import json

from moetool.base.errors import UsageError
from moetool.capture.composition import MOST_TOGETHER, Composition, compose, stored_composition
from tests.refusals import refused


def test_batches_fill_the_cache_and_are_of_about_equal_size() -> None:
    made = compose([(10, 12)] * 10, batch_size=None, kv_tokens=60, chunk_tokens=1000)
    assert made.sizes == (4, 4, 2)
    assert made.kv_tokens == 60  # 48 tokens, and a sixth stays free
    assert made.chunk_tokens == 40  # the longest pass over prompts
    assert sum(made.sizes) == 10 and next(made.bounds()) == (0, made.sizes[0])


def test_a_prompt_longer_than_the_cache_has_a_batch_of_its_own() -> None:
    made = compose([(4, 4), (100, 100), (4, 4)], batch_size=None, kv_tokens=16, chunk_tokens=8)
    assert made.sizes == (1, 1, 1)
    assert (made.kv_tokens, made.chunk_tokens) == (120, 8)


def test_batches_are_bounded_and_may_be_given() -> None:
    assert compose([(1, 2)] * 1000, batch_size=None, kv_tokens=10**9, chunk_tokens=9).most <= MOST_TOGETHER
    assert compose([(1, 2)] * 5, batch_size=2, kv_tokens=1, chunk_tokens=9).sizes == (2, 2, 1)


def test_a_stored_composition_is_the_same() -> None:
    made = compose([(3, 5)] * 7, batch_size=None, kv_tokens=16, chunk_tokens=9, slots=4)
    stored = {"composition": json.loads(json.dumps(made.to_json()))}
    assert stored_composition(stored, 7) == made
    assert stored["composition"] == made.to_json()  # compared by resume
    assert stored_composition(stored, 8) is None and stored_composition({}, 7) is None
    with refused(UsageError, "chunk_tokens"):
        stored_composition({"composition": {**stored["composition"], "chunk_tokens": "x"}}, 7)
    with refused(UsageError, "kv_tokens"):
        Composition(sizes=(1,), kv_tokens=0, chunk_tokens=1)
