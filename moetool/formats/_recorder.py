"""Common parts of SGLang's three expert recorder formats: `.pt` files, read without running their code.

`torch.load(weights_only=True)` builds only tensors, numbers, lists and dictionaries; a file that needs more is refused.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from moetool.errors import MismatchError, first_line


def load(path: Path) -> dict[str, Any]:
    """Load the dictionary of a `.pt` file.

    Raises:
        MismatchError: it is damaged, needs more than tensors, or holds something else.
    """
    import pickle

    import torch

    try:
        pack = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises many types, some of them in the zip reader
        if isinstance(error, pickle.UnpicklingError) and (asked := re.search(r"GLOBAL (\S+)", str(error))):
            raise MismatchError(
                f"{path} needs {asked[1]}, expected only tensors, lists and numbers, since moetool runs no code of "
                f"a file; record again with SGLang"
            ) from None
        reason = "not made by torch.save" if isinstance(error, pickle.UnpicklingError) else first_line(error)[:200]
        raise MismatchError(f"{path} is not a complete .pt file ({reason}); record again") from None
    if not isinstance(pack, dict):
        raise MismatchError(f"{path} holds a {type(pack).__name__}, expected a dictionary of SGLang's recorder")
    return pack


def array(where: object, holder: dict[str, Any], key: str, dimensions: int) -> np.ndarray:
    """Return a tensor of whole numbers as int64.

    Raises:
        MismatchError: it is missing, has other dimensions, or is not of whole numbers.
    """
    import torch

    value = holder.get(key)
    if not isinstance(value, torch.Tensor):
        raise MismatchError(f"{where} has no tensor {key!r}, expected one; is it of another mode of the recorder?")
    if value.dim() != dimensions or value.is_floating_point() or value.is_complex() or value.is_sparse:
        raise MismatchError(
            f"{where} has {key} of {value.dtype} {list(value.shape)}, expected whole numbers in {dimensions} dimensions"
        )
    found: np.ndarray = value.to(torch.int64).numpy()
    return found


def records_of(pack: dict[str, Any]) -> str | None:
    """Return the mode of a `.pt` file's records: `per_pass` or `per_token`."""
    held = pack.get("records")
    first = held[0] if isinstance(held, list) and held else None
    if not isinstance(first, dict):
        return None
    return "per_token" if "topk_ids_of_layer" in first else "per_pass"


def records(path: Path, pack: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of the modes per_pass and per_token.

    Raises:
        MismatchError: there are none.
    """
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


def trivial_map(num_hidden_layers: int, num_experts: int) -> Any:
    """Return the mapping of a run where slot e holds expert e, as a tensor."""
    import torch

    return torch.arange(num_experts).repeat(num_hidden_layers, 1)


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
    for layer in sorted(set(range(counts_WHE.shape[1])) - set(layers)):
        if counts_WHE[:, layer].any():
            raise MismatchError(
                f"{path}: layer {layer} has tokens, expected none; name the layers with experts with --set model=PATH, "
                f"first_k_dense=N or moe_layers=1..26"
            )
    counts_WLE = counts_WHE[:, list(layers)]
    return counts_WLE[counts_WLE.any(axis=(1, 2))]
