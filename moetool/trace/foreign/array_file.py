"""Files of arrays (`.npy`, `.npz`, `.safetensors`, `.pt`), by content, without running their code.

A layer's router gives an array for its tokens. Files hold one array for all layers, a list with one array for each
layer, or one entry for each layer, named by its number.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, first_line
from moetool.trace.foreign import torch_file

BARE = ""
"""Name of the content of a file without names."""

_LAYER = re.compile(r"(?:.*[._/-])?(?:layers?|l|h|block)[._-]?(\d{1,6})(?:[._-].*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArrays:
    """The arrays of all layers.

    Attributes:
        values: [T, L, X], or [B, T, L, X] of a batch; or [T, X] of a file without layers.
        layers: absolute layers, if the file names them.
    """

    values: np.ndarray
    layers: tuple[int, ...] | None
    entry: str


def is_array_file(head: bytes) -> bool:
    """Return whether a file begins like one of arrays."""
    named = len(head) > 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 27
    return head.startswith((b"\x93NUMPY", b"PK\x03\x04")) or named


def load(path: Path) -> dict[str, Any]:
    """Return the arrays (and numbers and lists) of a file by name.

    Raises:
        MismatchError: it is damaged, or needs more than arrays, such as objects of Python.
    """
    with path.open("rb") as file:
        head = file.read(16)
    try:
        if head.startswith(b"\x93NUMPY"):
            return {BARE: np.load(path, allow_pickle=False)}
        if head.startswith(b"PK") and all(name.endswith(".npy") for name in zipfile.ZipFile(path).namelist()):
            with np.load(path, allow_pickle=False) as packed:
                return {name: packed[name] for name in packed.files}
        if not head.startswith(b"PK"):
            from safetensors.numpy import load_file

            return dict(load_file(path))
    except Exception as error:  # damaged archives raise many types, some of them in the zip reader
        raise MismatchError(
            f"{path} is not a complete file of arrays ({first_line(error)[:200]}); download it again"
        ) from None
    found = _plain(torch_file.load_any(path))
    return found if isinstance(found, dict) else {BARE: found}


def _plain(value: Any) -> Any:
    """Return arrays instead of tensors, and lists instead of tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return torch_file.to_array(value)


def find(pack: Mapping[str, Any], names: str) -> str | None:
    """Return the first of these entries (case-insensitive)."""
    folded = {name.casefold(): name for name in pack}
    return next((folded[name] for name in names.split() if name in folded), None)


def by_layer(path: Path, pack: Mapping[str, Any], names: str, kinds: str) -> LayerArrays | None:
    """Return the arrays of all layers under one of these names, or of a file with one entry; None without.

    One entry of another name must have three or four dimensions: any table of numbers has two.

    Args:
        kinds: accepted NumPy kinds, such as `iu`.

    Raises:
        MismatchError: the layers' arrays differ in shape.
    """
    entry = find(pack, names)
    named_so = entry is not None
    if entry is None and len(arrays := [name for name, value in pack.items() if _kind(value)]) == 1:
        entry = arrays[0] if not re.search("logical|physical", arrays[0]) else None
    layers: tuple[int, ...] | None = None
    value: Any = None if entry is None else pack[entry]
    if entry is None or isinstance(value, Mapping):
        inner = pack if value is None else value
        named = {int(found[1]): array for key, array in inner.items() if (found := _LAYER.fullmatch(key))}
        if not named or len(named) < sum(_kind(array) != "" for array in inner.values()):
            return None
        layers = tuple(sorted(named))
        value, entry = [named[layer] for layer in layers], entry or f"layers {layers[0]} to {layers[-1]}"
    if isinstance(value, list):
        value = _stacked(path, entry, value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.ndim < 2 or not value.size:
        return None
    if not named_so and value.ndim not in (3, 4):
        return None
    return LayerArrays(values=value, layers=layers, entry=entry)


def _kind(value: Any) -> str:
    """Return the kind of an array's or a list of arrays' numbers; empty for anything else."""
    first = value[0] if isinstance(value, list) and value else value
    return first.dtype.kind if isinstance(first, np.ndarray) and first.ndim > 1 else ""


def _stacked(path: Path, entry: str, values: Sequence[Any]) -> np.ndarray | None:
    """Return [..., T, L, X] of a list with [..., T, X] of each layer."""
    if not values or not all(isinstance(one, np.ndarray) and one.ndim > 1 for one in values):
        return None
    if len(shapes := {one.shape for one in values}) > 1:
        raise MismatchError(f"{path} has {entry} of {sorted(shapes)[:3]}, expected one shape for all layers")
    return np.stack(values, axis=-2)
