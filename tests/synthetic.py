"""Small synthetic models, gate streams and traces."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import durable
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.caching.devices import Pool
from moetool.caching.residency import Residency, Step
from moetool.runtime.sizing import Footprint
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter

AHEAD = 3  # layers that synthetic events look ahead
DEEPSEEK_V2_LITE = Footprint(
    dense_bytes=0,
    slot_bytes=17_301_504,
    num_experts=1664,
    min_slots=2,
    kv_token_bytes=331_776,
    token_bytes=107_776,
    max_context=163_840,
    token_experts=156,
    context_bytes=24_576,
)
"""DeepSeek-V2-Lite in bfloat16, without its dense weights."""


def make_spec(
    layers: int = 3, experts: int = 8, top_k: int = 2, *, expert_bytes: Sequence[int] | None = None
) -> ModelSpec:
    """A model of `layers` equal MoE layers; `expert_bytes` gives the layers experts of different size."""
    return ModelSpec(
        name="synthetic",
        revision=f"{layers}x{experts}x{top_k}",
        layer_ids_L=tuple(range(layers)),
        num_experts_L=(experts,) * layers,
        top_k_L=(top_k,) * layers,
        has_logits_L=(True,) * layers,
        num_shared_experts=0,
        num_groups=1,
        hidden_size=4,
        expert_bytes_L=tuple(expert_bytes or (1000,) * layers),
        score_function="softmax",
        renormalize=True,
    )


def make_forward(
    spec: ModelSpec,
    experts_TLK: np.ndarray,
    *,
    forward_id: int = 0,
    request: int = 0,
    phase: Phase = Phase.DECODE,
    rng: np.random.Generator | None = None,
) -> tuple[ForwardInfo, list[GateEvent]]:
    """One forward of one request and its events, from the experts of each token in each layer.

    All optional fields are filled with random values, except scores, under which those experts are the most likely.
    """
    num_tokens = len(experts_TLK)
    rng = rng or np.random.default_rng([forward_id, request, num_tokens])
    width = spec.hidden_size
    info = ForwardInfo(
        forward_id=forward_id,
        request_T=(request,) * num_tokens,
        phase_T=(phase,) * num_tokens,
        position_T=tuple(range(num_tokens)),
        embedding_TD=np.repeat(rng.normal(size=(1, width)).astype(np.float32), num_tokens, axis=0),
    )
    events = []
    for layer in range(spec.num_layers):
        experts_TK = experts_TLK[:, layer]
        scores_TE = rng.random((num_tokens, spec.num_experts_L[layer])).astype(np.float32)
        ranked_TK = np.arange(experts_TK.shape[1], 0, -1, dtype=np.float32).repeat(num_tokens).reshape(-1, num_tokens).T
        np.put_along_axis(scores_TE, experts_TK, ranked_TK, axis=1)
        scores_TE /= scores_TE.sum(axis=1, keepdims=True)
        following = min(AHEAD, spec.num_layers - 1 - layer)
        events.append(
            GateEvent(
                forward=info,
                layer=layer,
                experts_TK=tuple(map(tuple, experts_TK.tolist())),
                weights_TK=np.take_along_axis(scores_TE, experts_TK, axis=1),
                scores_TE=scores_TE,
                hidden_TD=rng.normal(size=(num_tokens, width)).astype(np.float32),
                ahead_ATE=rng.random((following, num_tokens, spec.num_experts)).astype(np.float32),
            )
        )
    return info, events


def random_experts(spec: ModelSpec, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Experts [T, L, K] of random tokens: distinct within a layer, with skewed popularity."""
    chance_E = 1.0 / np.arange(1, spec.num_experts + 1)
    shape = (num_tokens, spec.num_layers, spec.num_experts)
    return np.argsort(rng.random(shape) ** (1.0 / chance_E), axis=-1)[..., ::-1][..., : spec.top_k_L[0]].copy()


def run_forwards(residency: Residency, forwards: Iterable[tuple[ForwardInfo, list[GateEvent]]]) -> list[Step]:
    """Put forwards and their events through a residency; returns its steps."""
    steps: list[Step] = []
    for info, events in forwards:
        steps += residency.begin_forward(info)
        for event in events:
            steps += residency.event(event)
        residency.end_forward(info)
    return steps


def slots_of(pool: Pool) -> dict[int, int]:
    """The slot of each resident expert."""
    every = range(pool.policy.spec.total_experts)
    return {key: slot for key in every if (slot := pool.slot(key)) is not None}


def random_stream(
    spec: ModelSpec, *, num_requests: int, prompt_tokens: int, new_tokens: int, seed: int, signals: bool = False
) -> Iterator[tuple[ForwardInfo, list[GateEvent]]]:
    """Sequential requests: the prompt in one forward, then a forward per new token.

    Args:
        signals: fill the optional fields too.
    """
    rng = np.random.default_rng(seed)
    other = np.random.default_rng(seed) if signals else None
    forward_id = 0
    for request in range(num_requests):
        lengths = [(prompt_tokens, Phase.PREFILL)] * bool(prompt_tokens) + [(1, Phase.DECODE)] * new_tokens
        for num_tokens, phase in lengths:
            experts = random_experts(spec, num_tokens, rng)
            yield make_forward(spec, experts, forward_id=forward_id, request=request, phase=phase, rng=other)
            forward_id += 1


def write_trace(
    folder: Path,
    spec: ModelSpec,
    *,
    num_requests: int = 4,
    prompt_tokens: int = 5,
    new_tokens: int = 6,
    batch_size: int = 1,
    composition: str = "sequential",
    seed: int = 0,
) -> Trace:
    """Write and open a trace of random tokens; `batch_size` requests at a time share forwards."""
    rng = np.random.default_rng(seed)
    with durable.staged_directory(folder) as partial:
        writer = TraceWriter(partial, spec, ["topk"])
        forward_id = 0
        for first in range(0, num_requests, batch_size):
            members = range(first, min(first + batch_size, num_requests))
            for request in members:
                writer.add_request(
                    request,
                    dataset="synthetic",
                    task="none",
                    prompt_id=f"p{request}",
                    prompt_tokens=prompt_tokens,
                    new_tokens=new_tokens,
                )
            for iteration in range(new_tokens + 1):
                length = 1 if iteration else prompt_tokens
                start = prompt_tokens + iteration - 1 if iteration else 0
                request_T = np.repeat(np.array(members, np.int32), length)
                num_tokens = len(request_T)
                experts = random_experts(spec, num_tokens, rng)
                writer.append(
                    TokenBatch(
                        request_T=request_T,
                        forward_T=np.full(num_tokens, forward_id, np.int32),
                        phase_T=np.full(num_tokens, Phase.DECODE if iteration else Phase.PREFILL, np.uint8),
                        iteration_T=np.full(num_tokens, iteration, np.int32),
                        position_T=np.tile(np.arange(start, start + length, dtype=np.int32), len(members)),
                        token_id_T=np.full(num_tokens, -1, np.int32),
                        experts_TS=experts.reshape(num_tokens, -1).astype(np.uint16),
                        weights_TS=np.full((num_tokens, sum(spec.top_k_L)), 0.5, np.float16),
                    )
                )
                forward_id += 1
        writer.finish(composition={"kind": composition}, provenance={})
    return Trace(folder)


class MadeUpPredictor:
    """A `moetool.training.predictor.Predictor` that scores by the observed experts only."""

    needs = frozenset({"experts"})
    remembers = False

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.lookahead = spec.num_layers
        self.num_observed = 0
        self._event: GateEvent | None = None

    def observe(self, event: GateEvent) -> None:
        assert self._event is None or event.layer in (0, self._event.layer + 1)
        self.num_observed += 1
        self._event = event

    def scores(self, layer: int) -> Any:
        assert self._event is not None and self._event.layer < layer < self.spec.num_layers
        seeds = [hash((layer, row)) & 0xFFFF for row in self._event.experts_TK]
        return np.stack([np.random.default_rng(s).random(self.spec.num_experts) for s in seeds]).astype(np.float32)
