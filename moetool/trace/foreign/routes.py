"""Routes between a foreign file and a trace: the experts of each token.

A module of `moetool.trace.formats` may have these functions, for `importing` and `exporting` of this package:

    recognize(sample) -> reason | None                      whether a file has the format (`file_sample`, `detection`)
    read_routes(path, facts) -> Routes                      a file as sequences of tokens
    read_counts(paths, facts) -> Counted                    files that only count (`moetool.trace.expert_counts`)
    write_routes(trace, out, num_hidden_layers) -> notes    a trace as a file (a folder where the module says so)
    write_counts(counts, out, num_hidden_layers) -> notes   counts as a file

`TAKES_MAP`: readers also take `mapping`, the column of each field. `GENERIC`: the format applies only where no other
recognizes the file. `READS_FOLDERS` and `FOLDER_MARK`: the file is a folder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec, Phase
from moetool.trace.expert_counts import unrecorded
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch

_ROWS = 1 << 16  # rows of float32 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSequence:
    """The routes of one sequence of tokens, in their order.

    Attributes:
        name: name, unique within its task.
        prompt_tokens: number of prompt rows; None where the file does not mark them (teacher-forced); 0 where it holds
            new tokens only, since the prompt was not recorded.
        new_tokens: number of generated tokens (default: the rows after the prompt). An engine counts one more, which it
            samples and never forwards.
        task: task of this sequence, if a file has several.

    Shapes:
        experts_TS uint16; weights_TS float16 or None, with S = sum of top_k_L, layer-major, the experts in the file's
        order; logits_TF float16 or None, with F = sum of num_experts_L; token_id_T int32 or None; position_T int32 or
        None (from 0 on); forward_T int32, the forward that each token ran in, or None (one sequence after the other,
        each prompt in one forward).
    """

    name: str
    prompt_tokens: int | None
    experts_TS: np.ndarray
    weights_TS: np.ndarray | None = None
    logits_TF: np.ndarray | None = None
    token_id_T: np.ndarray | None = None
    position_T: np.ndarray | None = None
    forward_T: np.ndarray | None = None
    new_tokens: int | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The content of one file. Its sequences have the same columns.

    Attributes:
        spec: the model, from the file and the user's facts; without a local model `revision` is by
            `moetool.trace.foreign.model_facts.spec_from_routes`.
        task: task of the sequences.
        notes: one sentence for each fact that the file lacks or that was changed, for the provenance.
    """

    spec: ModelSpec
    task: str
    sequences: list[RouteSequence]
    notes: list[str] = field(default_factory=list)


def one_task(trace: Trace, format: str) -> str:
    """Return the only task of a trace. Raises: MismatchError: it has several."""
    tasks = sorted(set(trace.requests["task"].to_pylist()))
    if len(tasks) != 1:
        raise MismatchError(
            f"{format} has one task per file, but {trace.path} has {len(tasks)}; split it with: moetool trace split "
            f"{trace.path} --by task --out DIR"
        )
    return str(tasks[0])


def whole_requests(trace: Trace, columns: Sequence[str] = ()) -> Iterator[tuple[dict[str, Any], TokenBatch]]:
    """Yield each request of a trace that has tokens: its row of requests.parquet and its rows of tokens/."""
    facts = {row["request"]: row for row in trace.requests.to_pylist()}
    for rows in trace.whole_requests(columns):
        yield facts[int(rows.request_T[0])], rows


def prompt_rows(rows: TokenBatch) -> int:
    """Return the number of prompt rows of a request."""
    return int(np.count_nonzero(rows.phase_T == Phase.PREFILL))


def prompt_length(where: str, decode_T: np.ndarray) -> int:
    """Return the number of prompt rows of a sequence; 0 where its prompt was not recorded.

    Args:
        where: file and sequence, for messages.
        decode_T: whether each row is a new token.

    Raises:
        MismatchError: prompt rows come after new tokens.
    """
    prompt = int(np.count_nonzero(~decode_T))
    if decode_T[:prompt].any():
        raise MismatchError(
            f"{where} has prompt rows after new tokens, expected them before; rows are missing or mixed"
        )
    return prompt


def run_order(num_layers: int, prompt: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (token, layer) in execution order: the prompt layer by layer, then new tokens one by one."""
    yield from ((token, layer) for layer in range(num_layers) for token in range(prompt))
    yield from ((token, layer) for token in range(prompt, num_tokens) for layer in range(num_layers))


def renormalized(spec: ModelSpec, facts: ModelFacts, weights_TS: np.ndarray | None) -> ModelSpec:
    """Return the spec with `renormalize` set if weights sum to 1 per token and layer; a given spec unchanged."""
    if facts.spec is not None or weights_TS is None:
        return spec
    return replace(spec, renormalize=bool((np.abs(weight_sums(spec, weights_TS) - 1) < 0.01).all()))


def weight_sums(spec: ModelSpec, weights_TS: np.ndarray) -> np.ndarray:
    """Return sums_TL float32 of each token's weights in a layer."""
    starts = np.cumsum([0, *spec.top_k_L[:-1]])
    parts = np.array_split(weights_TS, 1 + len(weights_TS) // _ROWS)
    return np.concatenate([np.add.reduceat(part.astype(np.float32), starts, axis=1) for part in parts])


def check(
    path: object, spec: ModelSpec, experts_TS: np.ndarray, weights_TS: np.ndarray | None, *, all_layers: bool = False
) -> None:
    """Check the rows. Weights may be zero, but not for every token of a layer.

    Args:
        all_layers: whether the file holds all layers of the model, so that facts name those with experts.

    Raises:
        MismatchError: a layer is invalid.
    """
    if not len(experts_TS):
        raise MismatchError(f"{path} has no tokens, expected some; record again")
    starts = np.cumsum([0, *spec.top_k_L])
    idle = [
        layer
        for layer, (begin, end) in enumerate(pairwise(starts))
        if not (experts_TS[:, begin:end].any() or (weights_TS is not None and weights_TS[:, begin:end].any()))
    ]
    if len(idle) == spec.num_layers:
        raise MismatchError(f"{path} is all zero, expected experts: the recorder was off; record again")
    if idle:
        remedy = unrecorded(spec.layer_ids_L, idle) if all_layers else "the recorder was off there; record again"
        raise MismatchError(
            f"{path}: MoE layer {spec.layer_ids_L[idle[0]]} is all zero, expected its experts: {remedy}"
        )
    for layer, (top_k, num_experts) in enumerate(zip(spec.top_k_L, spec.num_experts_L, strict=True)):
        name = f"{path}: MoE layer {spec.layer_ids_L[layer]}"
        columns = slice(starts[layer], starts[layer + 1])
        experts = experts_TS[:, columns]
        weights = None if weights_TS is None else weights_TS[:, columns]
        if experts.min() < 0 or experts.max() >= num_experts:
            wrong = experts[(experts < 0) | (experts >= num_experts)][0]
            raise MismatchError(
                f"{name} uses expert {wrong}, expected 0 to {num_experts - 1}; give the right num_experts, or record "
                "again"
            )
        ordered = np.sort(experts, axis=1)
        if len(twice := np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))):
            found = experts[twice[0]].tolist()
            raise MismatchError(
                f"{name} gives token {twice[0]} the experts {found}, expected {top_k} different ones; record again"
            )
        if weights is None:
            continue
        if not np.isfinite(weights).all() or weights.min() < 0:
            raise MismatchError(f"{name} has weights below 0 or not finite, expected neither; download the file again")
        if not weights.any():
            raise MismatchError(f"{name} has no weight above 0, expected those of its experts; download the file again")
