"""Experts of each token as an array: `.npy`, `.npz`, `.safetensors` or `.pt` of whole numbers [T, L, K] or
[B, T, L, K].

The entry is `routed_experts`, `topk_ids`, `selected_experts` or similar (then also [T, K] of one layer), or the only
one of its file. A list of arrays or an entry for each layer (`layer_3`) hold [T, K] or [B, T, K] each. A mask of bools
[T, L, E] is read too. -1 marks blanks: layers and tokens without experts, which are left out. Beside it: weights
(`topk_weights`), `input_ids`, `attention_mask` and `prompt_lengths`.
"""

from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign import array_file
from moetool.trace.foreign.array_routes import ArrayRoutes, batched, routes
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts
from moetool.trace.foreign.routes import Routes

GENERIC = True
_IDS = (
    "routed_experts topk_ids topk_idx topk_indices selected_experts expert_ids expert_indices router_indices experts "
    "indices"
)
_WEIGHTS = "topk_weights topk_weight routing_weights selected_probs weights gate_weights"


def recognize(sample: FileSample) -> str | None:
    """Recognize whole numbers, or a mask of bools, for tokens, layers and experts."""
    found = array_file.by_layer(sample.path, sample.arrays, _IDS, "iub")
    return None if found is None else f"an array of expert numbers{found.entry and f' ({found.entry})'}"


def read_routes(path: Path, facts: ModelFacts) -> Routes:
    """Read and check the whole file. Raises: MismatchError: it is damaged, or has no array of expert numbers."""
    pack = array_file.load(path)
    found = array_file.by_layer(path, pack, _IDS, "iub")
    if found is None:
        raise MismatchError(f"{path} has no array of expert numbers, expected {_IDS.split()[0]} or one array [T, L, K]")
    values, layers, notes = batched(path, found.values, found.layers, facts)
    num_experts = None
    if values.dtype.kind == "b":
        num_experts, values = values.shape[3], _chosen(path, values)
    weights = None
    if (name := array_file.find(pack, _WEIGHTS)) is not None and found.values.dtype.kind != "b":
        given = array_file.by_layer(path, pack, name.casefold(), "f")
        if given is None or given.values.shape != found.values.shape:
            raise MismatchError(f"{path} has {name} of another shape than {found.entry or 'its experts'}")
        weights = batched(path, given.values, given.layers, facts)[0]
    else:
        notes.append("top-k only: no weights, no scores over all experts")
    arrays = ArrayRoutes(layers=layers, experts_BTLK=values, weights_BTLK=weights, num_experts=num_experts)
    return routes(path, pack, arrays, facts, notes)


def _chosen(path: Path, mask_BTLE: np.ndarray) -> np.ndarray:
    """Return the experts of a mask; -1 in blank places."""
    count_BTL = mask_BTLE.sum(axis=3)
    top_k = int(count_BTL.max())
    if not top_k or not np.isin(count_BTL, (0, top_k)).all():
        raise MismatchError(f"{path} masks {count_BTL.min()} to {top_k} experts per token, expected as many for each")
    experts_BTLK = np.argsort(~mask_BTLE, axis=3, kind="stable")[..., :top_k]
    experts_BTLK[count_BTL == 0] = -1
    return experts_BTLK
