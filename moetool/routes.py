"""What a foreign file of routes comes to: which experts a model used, token by token.

A module of `moetool.formats` that reads such files exports `read_routes(path) -> Routes`; `moetool.trace_import`
writes the trace.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moetool.errors import MismatchError
from moetool.types import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSequence:
    """The routes of one sequence of tokens, from its first token on.

    Attributes:
        name: tells it from the other sequences of its task.
        prompt_tokens: how many of its tokens were the prompt; None where the file does not tell (teacher-forced).

    Shapes:
        experts_TS uint16, weights_TS float16, with S = sum of top_k_L, layer-major, the experts in the file's order.
    """

    name: str
    prompt_tokens: int | None
    experts_TS: np.ndarray
    weights_TS: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The content of one file.

    Attributes:
        spec: the model, as far as the file tells; `revision` is by `revision_of`.
        task: what the sequences are about.
        notes: a sentence for each thing that the file lacks or that is not as in the file, for the provenance.
    """

    spec: ModelSpec
    task: str
    sequences: list[RouteSequence]
    notes: list[str] = field(default_factory=list)


def revision_of(model: str, header: dict[str, Any]) -> str:
    """A revision for a model of which there are only routes: equal for equal names and headers.

    It never equals that of a checkpoint (`moetool.models.spec.revision`): nothing shows that the weights are the same.
    """
    return hashlib.sha256(json.dumps(["routes", model, header], sort_keys=True).encode()).hexdigest()


def check(path: object, spec: ModelSpec, experts_TS: np.ndarray, weights_TS: np.ndarray) -> None:
    """Refuse rows that no router can have given. Weights may be zero, but not in every token of a layer.

    Raises:
        MismatchError: the first layer that is wrong, with what was found and expected.
    """
    start = 0
    for layer, (top_k, num_experts) in enumerate(zip(spec.top_k_L, spec.num_experts_L, strict=True)):
        name = f"{path}: MoE layer {spec.layer_ids_L[layer]}"
        experts, weights = experts_TS[:, start : start + top_k], weights_TS[:, start : start + top_k]
        start += top_k
        if not experts.any() and not weights.any():
            raise MismatchError(f"{name} is all zero, expected its experts; get the file again")
        if experts.min() < 0 or experts.max() >= num_experts:
            wrong = experts[(experts < 0) | (experts >= num_experts)][0]
            raise MismatchError(f"{name} uses expert {wrong}, expected 0 to {num_experts - 1}; get the file again")
        ordered = np.sort(experts, axis=1)
        if len(twice := np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))):
            found = experts[twice[0]].tolist()
            raise MismatchError(
                f"{name} gives row {twice[0]} the experts {found}, expected {top_k} different ones; get the file again"
            )
        if not np.isfinite(weights).all() or weights.min() < 0:
            raise MismatchError(f"{name} has weights below 0 or not finite, expected neither; get the file again")
        if not weights.any():
            raise MismatchError(f"{name} has no weight above 0, expected those of its experts; get the file again")
