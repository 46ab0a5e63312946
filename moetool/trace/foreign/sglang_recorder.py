"""Common parts of SGLang's three expert recorder formats, all `.pt` files (`moetool.trace.foreign.torch_file`)."""

from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.foreign.model_facts import require_dense
from moetool.trace.foreign.torch_file import array


def records_of(pack: dict[str, Any]) -> str | None:
    """Return the mode of a `.pt` file's records: `per_pass` or `per_token`."""
    held = pack.get("records")
    first = held[0] if isinstance(held, list) and held else None
    if not isinstance(first, dict):
        return None
    return "per_token" if "topk_ids_of_layer" in first else "per_pass"


def records(path: Path, pack: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the modes per_pass and per_token. Raises: MismatchError: there are none."""
    found = pack.get("records")
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise MismatchError(f"{path} has no records, expected those of per_pass or per_token; use sglang_stat for stat")
    if not found:
        raise MismatchError(
            f"{path} has no records: the recorder was off; start it with /start_expert_distribution_record"
        )
    return found


def logical_map(path: Path, pack: dict[str, Any]) -> np.ndarray:
    """Return logical_HP int64: the expert in each physical slot of each layer.

    Raises:
        MismatchError: it is missing, or an expert has no slot in a layer.
    """
    logical_HP = array(path, pack, "last_physical_to_logical_map", 2)
    num_experts = int(logical_HP.max(initial=-1)) + 1
    if num_experts > logical_HP.shape[1]:
        raise MismatchError(
            f"{path} maps {logical_HP.shape[1]} slots per layer to {num_experts} experts, expected each expert "
            f"at least once; record again"
        )
    for layer, slots in enumerate(logical_HP):
        if slots.min(initial=0) < 0 or not np.array_equal(np.unique(slots), np.arange(num_experts)):
            raise MismatchError(
                f"{path}: the slots of layer {layer} do not hold each of the experts 0 to {num_experts - 1}; is "
                f"last_physical_to_logical_map SGLang's?"
            )
    if not num_experts:
        raise MismatchError(f"{path} has an empty last_physical_to_logical_map; record again")
    return logical_HP


def map_notes(logical_HP: np.ndarray) -> list[str]:
    """Return notes about the mapping."""
    num_experts = int(logical_HP.max()) + 1
    if np.array_equal(logical_HP, np.tile(np.arange(logical_HP.shape[1]) % num_experts, (len(logical_HP), 1))):
        return []
    return ["slots became experts by the last mapping of the run; some are wrong if it was rebalanced while recording"]


def trivial_map(num_hidden_layers: int, num_experts: int) -> np.ndarray:
    """Return the mapping of a run where slot e holds expert e."""
    return np.tile(np.arange(num_experts), (num_hidden_layers, 1))


def counts_with_dense(counts_WLE: np.ndarray, layers: tuple[int, ...], num_hidden_layers: int) -> np.ndarray:
    """Return counts_WHE int32 (int64 if too large), zero in the layers without experts."""
    dtype = np.int32 if counts_WLE.max(initial=0) < 2**31 else np.int64
    counts_WHE = np.zeros((len(counts_WLE), num_hidden_layers, counts_WLE.shape[2]), dtype)
    counts_WHE[:, list(layers)] = counts_WLE
    return counts_WHE


def counts_without_dense(path: object, counts_WHE: np.ndarray, layers: tuple[int, ...]) -> np.ndarray:
    """Return counts_WLE of the layers with experts, without passes that have no tokens.

    Raises:
        MismatchError: a layer given as dense has tokens.
    """
    require_dense(path, np.asarray(counts_WHE.any(axis=(0, 2))), layers)
    counts_WLE = counts_WHE[:, list(layers)]
    return counts_WLE[counts_WLE.any(axis=(1, 2))]
