"""Small traces: a model with three different layers, and rows of synthetic requests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.base.types import ModelSpec, Phase
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP, SIGNALS, TokenBatch
from moetool.trace.writer import TraceWriter

SPEC = ModelSpec(
    name="tiny",
    revision="0" * 64,
    layer_ids_L=(1, 2, 4),
    num_experts_L=(8, 8, 6),
    top_k_L=(2, 2, 3),
    has_logits_L=(True, True, True),
    num_shared_experts=0,
    num_groups=1,
    hidden_size=4,
    expert_bytes_L=(64, 64, 96),
    score_function="softmax",
    renormalize=True,
)
AHEAD = 2
EVERY = tuple(dict.fromkeys((*KEEP, *SIGNALS)))
SEQUENTIAL = {"kind": "sequential"}


def rows(request: int, forward: int, iteration: int, positions: Sequence[int], spec: ModelSpec = SPEC) -> TokenBatch:
    """Tokens of one request in one forward, with every column; equal arguments give equal rows."""
    draw = np.random.default_rng([request, forward, iteration])
    count = len(positions)
    width = spec.num_layers * spec.hidden_size

    def full(value: int, dtype: type = np.int32) -> np.ndarray:
        return np.full(count, value, dtype)

    return TokenBatch(
        request_T=full(request),
        forward_T=full(forward),
        phase_T=full(Phase.PREFILL if iteration == 0 else Phase.DECODE, np.uint8),
        iteration_T=full(iteration),
        position_T=np.asarray(positions, np.int32),
        token_id_T=draw.integers(0, 4096, count).astype(np.int32),
        experts_TS=np.concatenate(
            [
                np.argsort(draw.random((count, experts)))[:, :k]
                for experts, k in zip(spec.num_experts_L, spec.top_k_L, strict=True)
            ],
            axis=1,
        ).astype(np.uint16),
        weights_TS=draw.random((count, sum(spec.top_k_L))).astype(np.float16),
        logits_TF=draw.normal(size=(count, sum(spec.num_experts_L))).astype(np.float16),
        hidden_TH=draw.normal(size=(count, width)).astype(np.float16),
        ahead_TR=draw.normal(size=(count, spec.num_layers * AHEAD * spec.num_experts)).astype(np.float16),
        resident_TW=draw.normal(size=(count, spec.num_layers * spec.num_experts)).astype(np.float16),
        scores_TF=draw.random((count, sum(spec.num_experts_L))).astype(np.float16),
        logits32_TF=draw.normal(size=(count, sum(spec.num_experts_L))).astype(np.float32),
        norms_TS=draw.random((count, sum(spec.top_k_L))).astype(np.float16),
    )


def alone(lengths: Sequence[tuple[int, int]]) -> list[TokenBatch]:
    """Forwards of requests (prompt tokens, new tokens) that ran one after the other."""
    forwards: list[TokenBatch] = []
    for request, (prompt, new) in enumerate(lengths):
        forwards.append(rows(request, len(forwards), 0, range(prompt)))
        for iteration in range(1, new):  # the last new token is sampled but never forwarded
            forwards.append(rows(request, len(forwards), iteration, [prompt + iteration - 1]))
    return forwards


def together(lengths: Sequence[tuple[int, int]]) -> list[TokenBatch]:
    """Forwards of the same requests as one batch, request i from forward i on."""
    forwards = []
    for forward in range(max(i + new for i, (_, new) in enumerate(lengths))):
        parts = []
        for request, (prompt, new) in enumerate(lengths):
            iteration = forward - request
            if 0 <= iteration < new:
                positions = range(prompt) if iteration == 0 else [prompt + iteration - 1]
                parts.append(rows(request, forward, iteration, positions))
        forwards.append(TokenBatch.concatenate(parts))
    return forwards


def fill(
    writer: TraceWriter, forwards: Iterable[TokenBatch], lengths: Sequence[tuple[int, int]], composition: dict[str, str]
) -> None:
    """Write forwards and their requests, and finish the trace."""
    for forward in forwards:
        writer.append(forward)
    for request, (prompt, new) in enumerate(lengths):
        writer.add_request(
            request, dataset="d", task=f"t{request}", prompt_id=str(request), prompt_tokens=prompt, new_tokens=new
        )
        for iteration in range(new):
            writer.add_embedding(request, iteration, np.full(SPEC.hidden_size, request + iteration / 8, np.float32))
    writer.finish(composition=composition, provenance={"made by": "a test"})


def write(
    out: Path,
    forwards: Iterable[TokenBatch],
    lengths: Sequence[tuple[int, int]],
    *,
    keep: Iterable[str] = EVERY,
    composition: dict[str, str] = SEQUENTIAL,
    resident: float = 0.5,
) -> Trace:
    """A finished trace at `out`."""
    with durable.staged_directory(out) as folder:
        writer = TraceWriter(folder, SPEC, keep, AHEAD, resident=resident)
        try:
            fill(writer, forwards, lengths, composition)
        finally:
            writer.abort()
    return Trace(out)
