"""Batches of a replay: all rows once, those that share experts together, and a bound on waiting."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.base.types import Phase
from moetool.trace.rows import TokenBatch
from moetool.tuning.batches import Batching, batched_forwards
from moetool.tuning.replay import SERVED, ReplaySetup, replay
from tests.refusals import refused
from tests.synthetic import make_spec, write_trace

SPEC = make_spec(layers=2, experts=8, top_k=2)


def request(number: int, experts: tuple[int, int], new: int, prompt: int = 3) -> TokenBatch:
    """A request whose tokens all use the same two experts in both layers."""
    rows = prompt + new
    return TokenBatch(
        request_T=np.full(rows, number, np.int32),
        forward_T=np.arange(rows, dtype=np.int32),
        phase_T=np.array([Phase.PREFILL] * prompt + [Phase.DECODE] * new, np.uint8),
        iteration_T=np.zeros(rows, np.int32),
        position_T=np.arange(rows, dtype=np.int32),
        token_id_T=np.arange(rows, dtype=np.int32),
        experts_TS=np.tile(np.array(experts, np.uint16), (rows, 2)),
    )


def alternating() -> Iterator[TokenBatch]:
    """Eight requests of two kinds, by turns."""
    return (request(i, ((0, 1), (6, 7))[i % 2], new=4) for i in range(8))


def decoded(batching: Batching, requests: Iterator[TokenBatch]) -> list[tuple[int, ...]]:
    """The requests of each forward with new tokens."""
    return [info.request_T for info, _ in batched_forwards(SPEC, requests, batching) if not info.prefill]


def test_each_row_runs_once_in_order_after_its_prompt() -> None:
    for order in ("arrival", "experts"):
        seen: dict[int, list[int]] = {i: [] for i in range(8)}
        batching = Batching(order=order, batch=3, queue=4, shuffle=1)
        for number, (info, rows) in enumerate(batched_forwards(SPEC, alternating(), batching)):
            assert info.forward_id == number and info.recorded_id == number
            assert info.prefill == (len(set(info.request_T)) == 1 and seen[info.request_T[0]] == [])
            assert len(set(info.request_T)) <= 3
            for one, position in zip(rows.request_T.tolist(), rows.position_T.tolist(), strict=True):
                seen[one].append(position)
        assert all(positions == list(range(7)) for positions in seen.values())


def test_requests_with_the_same_experts_run_together() -> None:
    mixed = decoded(Batching(batch=2, queue=4), alternating())
    assert {tuple(i % 2 for i in batch) for batch in mixed} == {(0, 1)}
    alike = decoded(Batching(order="experts", batch=2, queue=4), alternating())
    assert {tuple(i % 2 for i in batch) for batch in alike} == {(0, 0), (1, 1)}


def test_no_request_is_passed_over_more_often_than_allowed() -> None:
    def requests() -> Iterator[TokenBatch]:
        yield request(0, (0, 1), new=3)  # so that one always runs when the next joins
        yield request(1, (6, 7), new=2)
        yield from (request(i, (0, 1), new=2) for i in range(2, 20))

    for passed in (0, 3, 100):
        batches = decoded(Batching(order="experts", batch=2, queue=3, passed=passed), requests())
        before = {one for batch in batches[: next(i for i, b in enumerate(batches) if 1 in b)] for one in batch}
        assert len(before - {0}) <= passed + 1 and (passed < 100 or len(before) > 10)


def test_half_of_the_rows_stand_for_a_prompt_that_was_not_recorded() -> None:
    with refused(MismatchError, "request 5", "batching.known=half"):
        list(batched_forwards(SPEC, iter([request(5, (0, 1), new=4, prompt=0)]), Batching()))
    forwards = list(batched_forwards(SPEC, iter([request(5, (0, 1), new=5, prompt=0)]), Batching(known="half")))
    assert [(info.prefill, len(rows)) for info, rows in forwards] == [(True, 3), (False, 1), (False, 1)]


def test_a_replay_in_batches_needs_what_the_batches_need(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", make_spec(), num_requests=6)
    setup = ReplaySetup(batching=Batching(order="experts", batch=3, queue=4))
    (row,) = replay(trace, ["lru"], [9000], setup)
    (recorded,) = replay(trace, ["lru"], [9000])
    assert row.decode_tokens == recorded.decode_tokens and row.decode.needed < recorded.decode.needed
    assert row.prefill.needed == recorded.prefill.needed
    assert row == replay(trace, ["belady", "lru"], [9000], setup)[1]
    with pytest.raises(UsageError):
        replay(trace, [SERVED], [9000], setup)
    with refused(UsageError, "embeddings", "batching"):
        replay(trace, ["finemoe"], [9000], setup)


def test_invalid_settings_are_refused() -> None:
    for bad in ({"order": "size"}, {"known": "all"}, {"batch": 0}, {"queue": 0}, {"passed": -1}, {"shuffle": -1}):
        with refused(MoetoolError, f"batching.{next(iter(bad))}"):
            Batching(**bad)  # type: ignore[arg-type]
