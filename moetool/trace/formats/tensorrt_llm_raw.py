"""TensorRT-LLM's raw expert statistics: the experts of each token, by iteration and layer.

The input is the folder (contents: `moetool.trace.foreign.tensorrt_statistics`). Requests, positions and prompts are
unknown, so each iteration of each rank becomes one request whose tokens are forwarded together. The events are those of
the engine, but no request has a next token.
"""

from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import count_experts
from moetool.trace.foreign import tensorrt_statistics as _statistics
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, require_even
from moetool.trace.foreign.routes import Routes, RouteSequence, check
from moetool.trace.reader import Trace

READS_FOLDERS = True
FOLDER_MARK = _statistics.META


def recognize(sample: FileSample) -> str | None:
    """Recognize a folder with the model's numbers and the experts of each token."""
    return _statistics.recognized(sample.path, raw=True)


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check a folder.

    Raises:
        MismatchError: it is damaged, or the layers of an iteration have different numbers of tokens.
        UsageError: it is not a folder, or the bytes of an expert are not given.
    """
    num_experts, top_k = _statistics.read_meta(path)
    ranks = _statistics.read_ranks(path, raw=True)
    layers = tuple(sorted({layer for arrays in ranks.values() for _, layer in arrays}))
    spec = facts.spec_of(path, layers=layers, num_experts=num_experts, top_k_L=[top_k] * len(layers))
    forwards = sorted({(iteration, rank) for rank, arrays in ranks.items() for iteration, _ in arrays})
    sequences: list[RouteSequence] = []
    for iteration, rank in forwards:
        where = f"{path}, iteration {iteration} of rank {rank}"
        found = [ranks[rank].get((iteration, layer)) for layer in layers]
        parts = [part for part in found if part is not None]
        if len(parts) < len(layers) or len({part.shape for part in parts}) > 1 or parts[0].shape[1:] != (top_k,):
            raise MismatchError(
                f"{where} has experts of the shapes {sorted({part.shape for part in parts})} in {len(parts)} layers, "
                f"expected (tokens, {top_k}) in {len(layers)}"
            )
        if not len(parts[0]):
            continue
        experts_TS = np.concatenate(parts, axis=1)
        check(where, spec, experts_TS, None)
        sequences.append(
            RouteSequence(
                name=f"{iteration}.{rank}",
                prompt_tokens=len(experts_TS),
                experts_TS=experts_TS.astype(np.uint16),
                forward_T=np.full(len(experts_TS), len(sequences), np.int32),
                new_tokens=0,
            )
        )
    return Routes(
        spec=spec,
        task=path.name,
        sequences=sequences,
        notes=[
            "top-k only: no weights, no scores over all experts, no embeddings, no token ids",
            "the files lack requests, positions and prompts: each iteration of a rank is one request",
        ],
    )


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace into a folder, each forward as an iteration of one rank, and the counts as the engine does.

    Layers are absolute: `num_hidden_layers` is not needed.

    Raises:
        MismatchError: the layers differ in shape.
    """
    from safetensors.numpy import save_file

    spec = trace.spec
    require_even(spec, "tensorrt_llm_raw")
    arrays: dict[str, np.ndarray] = {}
    counts = []
    for iteration, rows in enumerate(trace.recorded_forwards([])):
        experts_TLK = rows.experts_TS.reshape(len(rows), spec.num_layers, -1).astype(np.int32)
        for i, layer in enumerate(spec.layer_ids_L):
            arrays[f"{iteration}_{layer}"] = np.ascontiguousarray(experts_TLK[:, i])
        counts.append(count_experts(spec, rows.experts_TS))
    _statistics.write_meta(out, spec.num_experts, spec.top_k_L[0])
    save_file(arrays, out / "rank0_raw.safetensors")
    _statistics.write_counts(out, np.array(counts), spec.layer_ids_L)
    return ["tensorrt_llm_raw has no weights, requests, positions or phases"]
