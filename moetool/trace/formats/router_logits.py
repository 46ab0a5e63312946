"""Router logits or probabilities of each token as an array: `.npy`, `.npz`, `.safetensors` or `.pt` of floats [T, L, E]
or [B, T, L, E].

The entry is `router_logits`, `gate_logits`, `router_probs` or similar, or the only one of its file. A list of arrays,
as transformers returns with `output_router_logits`, or an entry for each layer (`layer_3`) hold [T, E] or [B, T, E].
The experts are the `top_k` highest (`topk` in the file, or --set top_k), the lower number first among equals. Values
that are 0 except for as many experts of every token are the weights of the chosen ones. Rows that add up to 1 are
probabilities; the trace holds their logarithms. Rows of zeros are padding, or of layers without experts: left out.
"""

from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import array_file
from moetool.trace.foreign.array_routes import ArrayRoutes, batched, routes
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes

GENERIC = True
_LOGITS = "router_logits gate_logits logits router_probs router_probabilities gate_probs probs scores router_scores"
_TOP_K = "topk top_k num_experts_per_tok moe_router_topk"


def recognize(sample: FileSample) -> str | None:
    """Recognize floats for tokens, layers and experts."""
    found = array_file.by_layer(sample.path, sample.arrays, _LOGITS, "f")
    return None if found is None else f"an array of router logits{found.entry and f' ({found.entry})'}"


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file.

    Raises:
        MismatchError: it is damaged, has no array of logits, or a logit is not a number.
        UsageError: top-k is neither in the file nor given.
    """
    pack = array_file.load(path)
    found = array_file.by_layer(path, pack, _LOGITS, "f")
    if found is None:
        raise MismatchError(
            f"{path} has no array of router logits, expected {_LOGITS.split()[0]} or one array [T, L, E]"
        )
    values, layers, notes = batched(path, found.values, found.layers, facts)
    arrays, more = chosen(path, values.astype(np.float32), layers, _top_k(pack), facts)
    return routes(path, pack, arrays, facts, [*notes, *more])


def _top_k(pack: dict[str, Any]) -> int | None:
    if (name := array_file.find(pack, _TOP_K)) is None:
        return None
    value = np.asarray(pack[name])
    return int(value) if value.size == 1 and value.dtype.kind in "iu" and value > 0 else None


def chosen(
    path: Path, values_BTLE: np.ndarray, layers: tuple[int, ...], told: int | None, facts: ModelFacts
) -> tuple[ArrayRoutes, list[str]]:
    """Return the chosen experts of logits, probabilities or sparse weights, and notes.

    Args:
        told: top-k in the file.
    """
    num_experts = values_BTLE.shape[3]
    if not np.isfinite(values_BTLE.max(axis=3, initial=-np.inf)).all():  # a masked expert has -inf
        raise MismatchError(f"{path} has router logits that are not numbers, expected finite ones; record again")
    used_BTL = np.count_nonzero(values_BTLE, axis=3)
    sparse = int(used_BTL.max())
    if 0 < sparse < num_experts and values_BTLE.min() >= 0 and np.isin(used_BTL, (0, sparse)).all():
        experts, weights = _top(values_BTLE, sparse)
        experts[used_BTL == 0] = -1
        arrays = ArrayRoutes(layers=layers, experts_BTLK=experts, weights_BTLK=weights, num_experts=num_experts)
        return arrays, [f"top-{sparse} only: the values of all other experts are 0 in the file"]
    top_k = told or facts.said(path, "top_k")
    if top_k > num_experts:
        raise MismatchError(f"{path} has {num_experts} logits per layer, expected at least top_k {top_k}")
    experts, highest = _top(values_BTLE, top_k)
    blank_BTL = used_BTL == 0
    experts[blank_BTL] = -1
    notes = [f"the experts of a token are the {top_k} with the highest logits"]
    if values_BTLE.min() >= 0 and np.abs(values_BTLE.sum(axis=3) - 1)[~blank_BTL].max(initial=0) < 0.02:
        with np.errstate(divide="ignore"):
            logits = np.log(values_BTLE)
        notes.append("the file holds probabilities; the logits are their logarithms")
        return (
            ArrayRoutes(
                layers=layers, experts_BTLK=experts, weights_BTLK=highest, logits_BTLE=logits, num_experts=num_experts
            ),
            notes,
        )
    logits = values_BTLE
    if np.abs(logits[np.isfinite(logits)]).max(initial=0) > np.finfo(np.float16).max:
        raise MismatchError(f"{path} has router logits beyond 65,504, which a trace cannot hold; record again")
    arrays = ArrayRoutes(layers=layers, experts_BTLK=experts, logits_BTLE=logits, num_experts=num_experts)
    return arrays, [*notes, "no weights"]


def _top(values_BTLE: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts with the highest values, highest first, and these values."""
    experts = np.argsort(-values_BTLE, axis=3, kind="stable")[..., :top_k]
    return experts, np.take_along_axis(values_BTLE, experts, axis=3)
