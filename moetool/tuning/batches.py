"""Batches that a replay forms itself: which waiting requests decode together.

`experts` puts requests together whose prompts used similar experts, so that the tokens of a step share more of them
(the idea of ELDR, arXiv 2607.00466). It changes no answer, only who waits for how long.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from moetool.base import validation as check
from moetool.base.errors import MismatchError, unknown_name
from moetool.base.types import ForwardInfo, ModelSpec, Phase
from moetool.trace.events import to_forward
from moetool.trace.rows import TokenBatch

ORDERS = ("arrival", "experts")
KNOWN = ("prompt", "half")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How a replay forms batches.

    Attributes:
        order: which waiting request joins the batch next: the first by `arrival`, or the one whose prompt used the
            `experts` of those that run.
        batch: requests that decode together.
        queue: waiting requests to choose from. Their prompts have been computed.
        passed: how often a waiting request may be passed over before it is next.
        known: what is known of a request before it joins: its `prompt`, or the first `half` of its rows, for traces
            that did not record prompts. The rest is replayed as new tokens.
        shuffle: seed of a random order of arrival; None for the order of the trace.
    """

    order: str = "arrival"
    known: str = "prompt"
    batch: int = 4
    queue: int = 16
    passed: int = 64
    shuffle: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("order", ORDERS), ("known", KNOWN)):
            if getattr(self, name) not in known:
                raise unknown_name(f"batching.{name}", getattr(self, name), known)
        for name, least in (("batch", 1), ("queue", 1), ("passed", 0)):
            check.require_whole(f"batching.{name}", getattr(self, name), least)
        if self.shuffle is not None:
            check.require_whole("batching.shuffle", self.shuffle, 0)


@dataclass(eq=False, slots=True)
class _Request:
    """A request: the rows that are known of it, its new tokens, and the experts that the known rows used."""

    prompt: TokenBatch
    new: TokenBatch
    used_F: np.ndarray
    passed: int = 0
    step: int = 0


def batched_forwards(
    spec: ModelSpec, requests: Iterable[TokenBatch], batching: Batching
) -> Iterator[tuple[ForwardInfo, TokenBatch]]:
    """Yield forwards of requests that all have arrived: prompts one by one, new tokens in batches.

    Args:
        requests: the rows of each request, in the order of arrival. They are held in memory.

    Raises:
        MismatchError: a request has no prompt, and `known` is the prompt.
    """
    arrivals = list(requests)
    if batching.shuffle is not None:
        order = np.random.default_rng(batching.shuffle).permutation(len(arrivals))
        arrivals = [arrivals[i] for i in order]
    coming = deque(arrivals)
    waiting: list[_Request] = []
    running: list[_Request] = []
    forward_ids = itertools.count()
    while coming or waiting or running:
        while coming and len(waiting) < batching.queue:
            request = _split(spec, coming.popleft(), batching)
            yield _forward([request.prompt], Phase.PREFILL, next(forward_ids))
            if len(request.new):
                waiting.append(request)
        while waiting and len(running) < batching.batch:
            at = _next(waiting, running, batching)
            for request in waiting[:at]:
                request.passed += 1
            running.append(waiting.pop(at))
        if running:
            steps = [request.new.select(slice(request.step, request.step + 1)) for request in running]
            yield _forward(steps, Phase.DECODE, next(forward_ids))
        for request in running:
            request.step += 1
        running = [request for request in running if request.step < len(request.new)]


def _forward(parts: list[TokenBatch], phase: Phase, forward_id: int) -> tuple[ForwardInfo, TokenBatch]:
    rows = TokenBatch.concatenate(parts)
    rows.phase_T = np.full(len(rows), phase, np.uint8)
    rows.forward_T = np.full(len(rows), forward_id, np.int32)
    return to_forward(rows, forward_id), rows


def _split(spec: ModelSpec, rows: TokenBatch, batching: Batching) -> _Request:
    """Split a request into what is known of it and its new tokens."""
    length = (len(rows) + 1) // 2
    if batching.known == "prompt":
        length = int((rows.phase_T == Phase.PREFILL).sum())
        if not length:
            raise MismatchError(
                f"request {rows.request_T[0]} has no recorded prompt, by whose experts batches could be formed; use "
                f"batching.known=half"
            )
    prompt = rows.select(slice(0, length))
    return _Request(prompt, rows.select(slice(length, None)), _used(spec, prompt))


def _used(spec: ModelSpec, rows: TokenBatch) -> np.ndarray:
    """Return the use of each expert by the rows, as a float32 vector of unit length over the experts of all layers."""
    layer_S = np.repeat(np.arange(spec.num_layers), spec.top_k_L)
    keys = layer_S * spec.num_experts + rows.experts_TS
    counts = np.bincount(keys.reshape(-1), minlength=spec.num_layers * spec.num_experts).astype(np.float32)
    return counts / max(float(np.linalg.norm(counts)), 1.0)


def _next(waiting: list[_Request], running: list[_Request], batching: Batching) -> int:
    """Return which request joins the batch: the oldest, unless another is more like those that run."""
    if batching.order == "arrival" or not running or waiting[0].passed >= batching.passed:
        return 0
    together_F = np.sum([request.used_F for request in running], axis=0)
    return int(np.argmax([request.used_F @ together_F for request in waiting]))  # the first of equals
