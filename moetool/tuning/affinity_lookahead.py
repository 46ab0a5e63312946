"""Estimate of the gain of prefetching in an LRU pool, by affinity between layers, the cheapest predictor.

Affinity is counted on some requests and predicts a layer's experts from those of the previous layer on others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.types import GateEvent, ModelSpec
from moetool.caching.residency import Step, StepKind
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, decisions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookahead:
    """Loads covered by prefetching by affinity, over forwards of one new token.

    Attributes:
        tokens: number of tokens in those forwards.
        missed: needed experts that were not resident.
        predicted: missed experts that affinity predicted, one layer ahead.
        wasted: predicted experts that were neither resident nor needed.
    """

    tokens: int
    missed: int
    predicted: int
    wasted: int

    @property
    def recall(self) -> float:
        """Return the share of predicted misses; 0 without misses."""
        return self.predicted / self.missed if self.missed else 0.0

    def seconds(self, expert_bytes: int, bytes_s: float, compute_s: float) -> tuple[float, float]:
        """Return the time per token on demand, and with prefetching, whose loads overlap with compute.

        Wasted prefetches occupy the link too; compute waits for a miss that was not predicted.
        """
        each = expert_bytes / bytes_s / max(self.tokens, 1)
        moved = (self.predicted + self.wasted) * each
        return compute_s + self.missed * each, max(compute_s, moved) + (self.missed - self.predicted) * each


class AffinityCounts:
    """Share of expert i's uses followed by expert j of the next layer, [L - 1] arrays of [E, E].

    Source: DuoServe-MoE, Eqs. 2 and 3; a layer's score is the sum of the rows of the experts chosen.
    """

    def __init__(self, trace: Trace, requests: frozenset[int]) -> None:
        self._spec = spec = trace.spec
        widths = list(zip(spec.num_experts_L, spec.num_experts_L[1:], strict=False))
        counts = [np.zeros(now * then) for now, then in widths]
        starts = np.concatenate([[0], np.cumsum(spec.top_k_L)])
        wanted = np.array(sorted(requests))
        for batch in trace.batches():
            experts_TS = batch.experts_TS[np.isin(batch.request_T, wanted)].astype(np.int64)
            for layer, (_, then) in enumerate(widths):
                now_TK = experts_TS[:, starts[layer] : starts[layer + 1]]
                then_TK = experts_TS[:, starts[layer + 1] : starts[layer + 2]]
                keys = (now_TK[:, :, None] * then + then_TK[:, None, :]).ravel()
                counts[layer] += np.bincount(keys, minlength=len(counts[layer]))
        self._rows = []
        for (now, then), found in zip(widths, counts, strict=True):
            rows_EE = found.reshape(now, then)
            self._rows.append(rows_EE / np.maximum(rows_EE.sum(axis=1, keepdims=True), 1.0))

    def predict(self, layer: int, experts: tuple[int, ...]) -> set[int]:
        """Return the k likeliest experts of the layer after `layer`; ties go to lower numbers."""
        scores_E = self._rows[layer][list(experts)].sum(axis=0)
        return set(np.argsort(-scores_E, kind="stable")[: self._spec.top_k_L[layer + 1]].tolist())


def look_ahead(
    trace: Trace, affinity: AffinityCounts, budget_bytes: int, requests: frozenset[int], *, sequential: bool
) -> Lookahead | None:
    """Simulate an LRU pool over some requests; None where no forward has a single new token."""
    spec = trace.spec
    setup = ReplaySetup(requests=requests, sequential=sequential)
    steps = _EventSteps(decisions(trace, "lru", budget_bytes, setup))
    resident: set[int] = set()
    tokens = missed = predicted = wasted = 0
    for info, events in trace.forwards(sequential=sequential, requests=requests):
        single = len(info.request_T) == 1 and not info.prefill
        tokens += single
        for event in events:
            program = steps.get(info.forward_id, event.layer)
            loads = [step for step in program if step.kind is StepKind.LOAD]
            if single and event.layer:
                likely = affinity.predict(event.layer - 1, events[event.layer - 1].experts_TK[0])
                missing = {step.key % spec.num_experts for step in loads}
                missed += len(missing)
                predicted += len(missing & likely)
                wasted += _unneeded(spec, event, likely, resident)
            elif single:
                missed += len(loads)
            for step in loads:
                resident.discard(step.evicted)
                resident.add(step.key)
    return Lookahead(tokens=tokens, missed=missed, predicted=predicted, wasted=wasted) if tokens else None


def _unneeded(spec: ModelSpec, event: GateEvent, predicted: set[int], resident: set[int]) -> int:
    base = spec.expert_key(event.layer, 0)
    return sum(expert not in event.needed and base + expert not in resident for expert in predicted)


class _EventSteps:
    """The steps of one event at a time, from an ordered stream of (forward, layer, step)."""

    def __init__(self, stream: Iterator[tuple[int, int, Step]]) -> None:
        self._stream = stream
        self._next: Any = next(stream, None)

    def get(self, forward: int, layer: int) -> list[Step]:
        found = []
        while self._next is not None and self._next[:2] <= (forward, layer):
            if self._next[:2] == (forward, layer):
                found.append(self._next[2])
            self._next = next(self._stream, None)
        return found
