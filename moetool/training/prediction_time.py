"""Prediction time of a decode step and of a prompt, on the CPU, on a trace's tokens."""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.trace.events import to_events
from moetool.trace.reader import Trace
from moetool.training.predictor import Predictor

_STEPS, _PROMPTS = 20, 4


def step_time(predictor: Predictor, trace: Trace, requests: frozenset[int]) -> float:
    """Return the median seconds of a predictor in a decode step: observe each layer, score the next.

    The first of the timed steps warms up. The predictor stays unchanged.
    """
    predictor = copy.deepcopy(predictor)
    wanted = np.array(sorted(requests))
    pieces = (
        (rows, embedding_TD, mine)
        for rows, embedding_TD in trace.token_rows(predictor.needs - {"experts"})
        if len(mine := np.flatnonzero(np.isin(rows.request_T, wanted)))
    )
    rows, embedding_TD, mine = next(pieces)
    seconds = []
    for step in range(_STEPS + 1):
        token = mine[[step % len(mine)]]
        one_1D = None if embedding_TD is None else embedding_TD[token]
        row = replace(rows.select(token), phase_T=np.array([Phase.DECODE], np.uint8))
        _, events = to_events(trace.spec, row, step, embedding_TD=one_1D)
        seconds.append(_seconds(lambda events=events: _follow(predictor, events)))  # type: ignore[misc]
    return statistics.median(seconds[1:])


def prompt_time(predictor: Predictor, trace: Trace, requests: frozenset[int]) -> tuple[float, float]:
    """Return the median seconds of predicting a prompt, or else of observing it, and the median prompt length.

    The first of several warms up. The predictor stays unchanged.
    """
    predictor = copy.deepcopy(predictor)
    seconds, lengths = [], []
    for info, events in itertools.islice(_prompts(predictor, trace, requests), _PROMPTS + 1):
        assert info.token_id_T is not None
        ids = info.token_id_T
        lengths.append(len(ids))
        if predictor.predicts_prompts:
            seconds.append(_seconds(lambda ids=ids: predictor.workload(ids)))  # type: ignore[misc]
        else:
            seconds.append(_seconds(lambda events=events: _follow(predictor, events)))  # type: ignore[misc]
    if len(seconds) > 1:
        del seconds[0], lengths[0]
    return statistics.median(seconds), statistics.median(lengths)


def _prompts(
    predictor: Predictor, trace: Trace, requests: frozenset[int]
) -> Iterator[tuple[ForwardInfo, list[GateEvent]]]:
    """Yield the first forward of each request."""
    seen: set[int] = set()
    for info, events in trace.forwards(sequential=True, columns=predictor.needs - {"experts"}, requests=requests):
        if info.request_T[0] not in seen:
            seen.add(info.request_T[0])
            yield info, events


def _follow(predictor: Predictor, events: Sequence[GateEvent]) -> None:
    for event in events[:-1]:
        predictor.observe(event)
        predictor.scores(event.layer + 1)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
