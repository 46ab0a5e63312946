"""Batches of prompts."""

import json
from dataclasses import replace

from moetool.base.errors import UsageError
from moetool.capture.composition import MOST_PROMPTS, Composition, compose, stored_composition
from tests.refusals import refused


def test_as_many_run_together_as_the_cache_holds_and_a_few_times_as_many_form_a_batch() -> None:
    made = compose([(10, 12)] * 50, batch_size=None, kv_tokens=60, chunk_tokens=1000)
    assert made.sizes == (16, 16, 16, 2)
    assert (made.together, made.most) == (4, 4)
    assert (made.kv_tokens, made.room_tokens) == (60, 50)  # 48 tokens, and a sixth stays free
    assert made.chunk_tokens == 40  # the longest pass over prompts
    assert next(made.bounds()) == (0, made.sizes[0])


def test_those_that_run_together_divide_the_prompts_about_equally() -> None:
    made = compose([(10, 12)] * 9, batch_size=None, kv_tokens=60, chunk_tokens=1000)
    assert (made.sizes, made.together) == ((9,), 3)  # not 4, 4 and 1


def test_a_prompt_longer_than_the_cache_enlarges_it() -> None:
    made = compose([(4, 4), (100, 100), (4, 4)], batch_size=None, kv_tokens=16, chunk_tokens=8)
    assert (made.sizes, made.together) == ((3,), 1)
    assert (made.kv_tokens, made.room_tokens, made.chunk_tokens) == (120, 100, 8)


def test_batches_are_bounded_and_may_be_given() -> None:
    assert compose([(1, 2)] * 1000, batch_size=None, kv_tokens=10**9, chunk_tokens=9).most <= MOST_PROMPTS
    assert compose([(1, 2)] * 8, batch_size=None, kv_tokens=99, chunk_tokens=9, most_prompts=4).sizes == (4, 4)
    made = compose([(1, 2)] * 5, batch_size=2, kv_tokens=1, chunk_tokens=9)
    assert (made.sizes, made.most) == ((2, 2, 1), 2)
    assert made.room_tokens >= 2 * 4  # pages of both


def test_a_stored_composition_is_the_same() -> None:
    made = replace(compose([(3, 5)] * 7, batch_size=None, kv_tokens=16, chunk_tokens=9), slots=4)
    stored = {"composition": json.loads(json.dumps(made.to_json()))}
    assert stored_composition(stored, 7) == made
    assert stored["composition"] == made.to_json()  # compared by resume
    assert stored_composition(stored, 8) is None and stored_composition({}, 7) is None
    with refused(UsageError, "chunk_tokens"):
        stored_composition({"composition": {**stored["composition"], "chunk_tokens": "x"}}, 7)
    with refused(UsageError, "kv_tokens"):
        Composition(sizes=(1,), kv_tokens=0, chunk_tokens=1)
