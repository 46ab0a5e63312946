"""Small traces whose routing can be learned: each layer mostly follows from the one before it and from the task."""

from pathlib import Path

import numpy as np

from moetool import durable
from moetool.trace import TokenBatch
from moetool.trace_writer import TraceWriter
from moetool.types import ModelSpec

TASKS = ("arithmetic", "code", "chat")


def make_spec(num_layers: int = 4, num_experts: int = 8, top_k: int = 2, revision: str = "a" * 64) -> ModelSpec:
    """The spec of a model that need not exist."""
    return ModelSpec(
        name="synthetic",
        revision=revision,
        layer_ids_L=tuple(range(num_layers)),
        num_experts_L=(num_experts,) * num_layers,
        top_k_L=(top_k,) * num_layers,
        has_logits_L=(True,) * num_layers,
        num_shared_experts=0,
        num_groups=1,
        hidden_size=16,
        expert_bytes_L=(1024,) * num_layers,
        score_function="softmax",
        renormalize=True,
    )


def make_routes(spec: ModelSpec, num_tokens: int, task: int, rng: np.random.Generator) -> np.ndarray:
    """experts_TLK int64: layer 0 leans to the task's experts, and each later expert shifts by a step of the layer."""
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


def write_trace(
    path: Path,
    spec: ModelSpec | None = None,
    *,
    num_requests: int = 20,
    prompt_tokens: int = 12,
    new_tokens: int = 8,
    seed: int = 0,
    first_prompt: int = 0,
) -> Path:
    """Write a trace of sequential requests; prompts are numbered from `first_prompt`."""
    spec = spec or make_spec()
    rng = np.random.default_rng(seed)
    length = prompt_tokens + new_tokens
    iteration_T = np.maximum(np.arange(length) - prompt_tokens + 1, 0)
    with durable.staged_directory(path) as staged:
        writer = TraceWriter(staged, spec, ["topk"])
        for request in range(num_requests):
            task = request % len(TASKS)
            routes_TLK = make_routes(spec, length, task, rng)
            writer.add_request(
                request,
                dataset="synthetic",
                task=TASKS[task],
                prompt_id=str(first_prompt + request),
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
            )
            writer.append(
                TokenBatch(
                    request_T=np.full(length, request, np.int32),
                    forward_T=(request * (new_tokens + 1) + iteration_T).astype(np.int32),
                    phase_T=(iteration_T > 0).astype(np.uint8),
                    iteration_T=iteration_T.astype(np.int32),
                    position_T=np.arange(length, dtype=np.int32),
                    token_id_T=np.full(length, -1, np.int32),
                    experts_TS=routes_TLK.reshape(length, -1).astype(np.uint16),
                    weights_TS=np.full((length, sum(spec.top_k_L)), 0.5, np.float16),
                )
            )
        writer.finish(composition={"kind": "sequential"}, provenance={"made_by": "tests"})
    return path
