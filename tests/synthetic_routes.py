"""Small traces with learnable routing: each layer mostly follows from the previous one and the task."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.base.types import ModelSpec
from moetool.simulation.workload import Route
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter
from tests import synthetic

TASKS = ("arithmetic", "code", "chat")


def make_spec(num_layers: int = 4, num_experts: int = 8, top_k: int = 2, revision: str = "a" * 64) -> ModelSpec:
    """The spec of a synthetic model."""
    made = synthetic.make_spec(num_layers, num_experts, top_k, expert_bytes=(1024,) * num_layers)
    return replace(made, revision=revision, hidden_size=16)


def make_routes(spec: ModelSpec, num_tokens: int, task: int, rng: np.random.Generator) -> np.ndarray:
    """Return experts_TLK int64: layer 0 prefers the task's experts, later experts shift by a step of the layer."""
    experts, top_k = spec.num_experts, spec.top_k_L[0]
    gumbel_TLE = rng.gumbel(size=(num_tokens, spec.num_layers, experts))
    gumbel_TLE[:, 0, task % experts] += 2
    routes_TLK = np.empty((num_tokens, spec.num_layers, top_k), np.int64)
    for layer in range(spec.num_layers):
        if layer:
            followed_TK = (routes_TLK[:, layer - 1] + layer) % experts
            np.put_along_axis(gumbel_TLE[:, layer], followed_TK, rng.gumbel(4, 1, followed_TK.shape), axis=1)
        routes_TLK[:, layer] = np.argsort(-gumbel_TLE[:, layer], axis=1)[:, :top_k]
    return routes_TLK


AHEAD = 3


def make_signals(spec: ModelSpec, routes_TLK: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Noisy signals of the routers: the columns logits_TF, hidden_TH, ahead_TR and resident_TW, in float16.

    The hidden states of a layer encode its own experts; the gates of the next layers are right more often than not.
    """
    num_tokens, num_layers, _ = routes_TLK.shape
    E, D = spec.num_experts, spec.hidden_size
    chosen_TLE = np.zeros((num_tokens, num_layers, E))
    np.put_along_axis(chosen_TLE, routes_TLK, 1.0, axis=2)
    hidden_TLD = rng.normal(0, 0.3, (num_tokens, num_layers, D))
    hidden_TLD[..., : min(D, E)] += chosen_TLE[..., : min(D, E)]
    ahead_TLAE = rng.normal(size=(num_tokens, num_layers, AHEAD, E))
    for a in range(min(AHEAD, num_layers - 1)):
        ahead_TLAE[:, : num_layers - 1 - a, a] += 2 * chosen_TLE[:, a + 1 :]
    logits_TLE = rng.normal(size=chosen_TLE.shape) + 8 * chosen_TLE
    resident_TLE = ahead_TLAE[:, :, 0] + np.roll(chosen_TLE, -1, axis=1)
    resident_TLE[:, -1] = 0
    made = {
        "logits_TF": logits_TLE,
        "hidden_TH": hidden_TLD,
        "ahead_TR": ahead_TLAE,
        "resident_TW": resident_TLE,
    }
    return {name: column.reshape(num_tokens, -1).astype(np.float16) for name, column in made.items()}


def make_rows(
    spec: ModelSpec, prompt_tokens: int, new_tokens: int, *, request: int, first_forward: int, rng: np.random.Generator
) -> TokenBatch:
    """The tokens of one request with every column."""
    length = prompt_tokens + new_tokens
    iteration_T = np.maximum(np.arange(length) - prompt_tokens + 1, 0)
    routes_TLK = make_routes(spec, length, request % len(TASKS), rng)
    return TokenBatch(
        request_T=np.full(length, request, np.int32),
        forward_T=(first_forward + iteration_T).astype(np.int32),
        phase_T=(iteration_T > 0).astype(np.uint8),
        iteration_T=iteration_T.astype(np.int32),
        position_T=np.arange(length, dtype=np.int32),
        token_id_T=routes_TLK[:, 0, 0].astype(np.int32),  # the token determines its first expert
        experts_TS=routes_TLK.reshape(length, -1).astype(np.uint16),
        weights_TS=np.full((length, sum(spec.top_k_L)), 0.5, np.float16),
        **make_signals(spec, routes_TLK, rng),
    )


def make_embedding(spec: ModelSpec, request: int, rng: np.random.Generator) -> np.ndarray:
    """Return embedding_D float32 of an iteration of a request, which encodes the task."""
    embedding_D = rng.normal(0, 0.3, spec.hidden_size)
    embedding_D[request % len(TASKS)] += 1
    return embedding_D.astype(np.float32)


def write_trace(
    path: Path,
    spec: ModelSpec | None = None,
    *,
    num_requests: int = 20,
    prompt_tokens: int = 12,
    new_tokens: int = 8,
    seed: int = 0,
    first_prompt: int = 0,
    keep: Collection[str] = ("topk",),
) -> Path:
    """Write a trace of sequential requests; prompts are numbered from `first_prompt`."""
    spec = spec or make_spec()
    rng = np.random.default_rng(seed)
    with durable.staged_directory(path) as staged:
        writer = TraceWriter(staged, spec, keep, AHEAD)
        for request in range(num_requests):
            writer.add_request(
                request,
                dataset="synthetic",
                task=TASKS[request % len(TASKS)],
                prompt_id=str(first_prompt + request),
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
            )
            first = request * (new_tokens + 1)
            rows = make_rows(spec, prompt_tokens, new_tokens, request=request, first_forward=first, rng=rng)
            writer.append(rows)
            if "embeddings" in keep:
                for iteration in range(new_tokens + 1):
                    writer.add_embedding(request, iteration, make_embedding(spec, request, rng))
        writer.finish(composition={"kind": "sequential"}, provenance={"made_by": "tests"})
    return path


def route_of(spec: ModelSpec, prompt_TS: np.ndarray, reply_TS: np.ndarray) -> Route:
    """The route of a simulated request, without token ids."""
    return Route(spec=spec, prompt_TS=prompt_TS, reply_TS=reply_TS, token_id_T=np.zeros(0, np.int32))
