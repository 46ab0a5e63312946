"""llama.cpp's `moe-trace` example: CSV without a header, a row `layer,expert` for each expert that a token uses.

Rows come forward by forward, layer by layer, token by token, best expert first. The file marks neither tokens nor
prompts (`moetool.trace.foreign.layer_runs` recovers them). Expert numbers are those of the model.

The first version of the example read a strided view as if it were contiguous. For a forward of several tokens it wrote
the ranking of all experts for the first token instead of the other tokens' experts. Such a forward lists each expert
once in every layer. Its first token is correct and kept; the others are left out.

Source: github.com/ggml-org/llama.cpp, pull request 28544, examples/moe-trace.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign.file_sample import FileSample, read_numbers
from moetool.trace.foreign.layer_runs import LayerRows, TokenRows, by_token
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes, whole_requests
from moetool.trace.reader import Trace

_LOG_CHANCE = -15.0  # a file counts as the first version if chance would produce it less than once in 3 million


def recognize(sample: FileSample) -> str | None:
    """Recognize rows of two whole numbers."""
    lines = sample.lines
    if lines and all(len(cells := line.split(",")) == 2 and all(c.strip().isdigit() for c in cells) for line in lines):
        return "rows of two whole numbers without a header: layer,expert"
    return None


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, not such a file, or of another model than the given one.
        UsageError: the number of experts or their bytes are not given.
    """
    rows_R2 = read_numbers(path, 2, "layer,expert")
    layer_R, expert_R = rows_R2.T
    runs = np.diff(np.append(np.flatnonzero(np.diff(layer_R, prepend=layer_R[0] - 1)), len(layer_R)))
    top_k = facts.known("top_k") or int(runs.min())
    if len(wrong := np.flatnonzero(runs % top_k)):
        raise MismatchError(
            f"{path} has {runs[wrong[0]]} rows in a run of one layer, expected a multiple of top_k {top_k}; name the "
            f"right one with --set top_k, or the file is cut off"
        )
    rows = LayerRows(layer_R=layer_R[::top_k], experts_RK=expert_R.reshape(-1, top_k))
    tokens, dropped = _whole(by_token(path, rows))
    notes = [
        "top-k only: no weights, no scores over all experts, no embeddings, no token ids",
        "the prompt is not marked in the file: forwards of several tokens count as prompts",
    ]
    if facts.known("top_k") is None:
        notes.append(f"top_k {top_k} is the length of the shortest run of rows of one layer")
    if dropped:
        notes.append(
            f"{dropped} prompt tokens are left out: the file has the ranking of another token in their place, by an "
            f"error of early versions of moe-trace"
        )
    return tokens.routes(path, facts, notes)


def _whole(tokens: TokenRows) -> tuple[TokenRows, int]:
    """Return the tokens except wrong prompt tokens of early moe-trace versions, and the number of those."""
    size_F = np.bincount(tokens.forward_T)
    end_F = np.cumsum(size_F)
    spans = [slice(int(end_F[f] - size_F[f]), int(end_F[f])) for f in np.flatnonzero(size_F > 1).tolist()]
    log_chances = [_log_chance_of_one_ranking(tokens.experts_TLK[span]) for span in spans]
    if not log_chances or sum(log_chances) > _LOG_CHANCE:
        return tokens, 0
    keep_T = np.ones(len(tokens.forward_T), bool)
    for span in spans:
        keep_T[span.start + 1 : span.stop] = False
    kept_before_T = np.concatenate([[0], np.cumsum(keep_T)])
    prompts = [
        None if prompt is None else int(keep_T[start : start + prompt].sum())
        for start, prompt in zip(tokens.starts, tokens.prompt_tokens, strict=True)
    ]
    whole = replace(
        tokens,
        experts_TLK=tokens.experts_TLK[keep_T],
        forward_T=tokens.forward_T[keep_T],
        starts=kept_before_T[tokens.starts].tolist(),
        prompt_tokens=prompts,
    )
    return whole, int((~keep_T).sum())


def _log_chance_of_one_ranking(experts_TLK: np.ndarray) -> float:
    """Return the log probability that independent tokens list distinct experts as these do; infinite if they do not.

    The last layer is left out: it may hold a single token.
    """
    top_k, num_experts = experts_TLK.shape[2], int(experts_TLK.max()) + 1
    num_tokens = min(len(experts_TLK), num_experts // top_k)
    listed_LR = experts_TLK[:num_tokens, :-1].swapaxes(0, 1).reshape(-1, num_tokens * top_k)
    ordered_LR = np.sort(listed_LR, axis=1)
    if (ordered_LR[:, 1:] == ordered_LR[:, :-1]).any():
        return math.inf
    free = 1 - np.arange(num_tokens * top_k) / num_experts
    return float(len(listed_LR) * (np.log(free).sum() - num_tokens * np.log(free[:top_k]).sum()))


def write_routes(trace: Trace, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a trace, each request a prompt in one forward and then a forward for each new token."""
    spec = trace.spec
    cuts = np.cumsum(spec.top_k_L)[:-1]
    with out.open("w", encoding="ascii", newline="\n") as file:
        for _, rows in whole_requests(trace):
            edges = np.flatnonzero(np.diff(rows.iteration_T)) + 1
            for forward in np.split(rows.experts_TS, edges):
                for layer, part in zip(spec.layer_ids_L, np.split(forward, cuts, axis=1), strict=True):
                    file.write("".join(f"{layer},{expert}\n" for expert in part.ravel().tolist()))
    return ["llamacpp_layer_expert has layers and experts only; it does not separate tokens or requests"]
