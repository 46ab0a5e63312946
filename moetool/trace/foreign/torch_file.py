"""`.pt` files, read without running their code: the only module of the core that needs torch, and only for them.

`torch.load(weights_only=True)` builds only tensors, numbers, lists and dictionaries; a file that needs more is refused.
"""

import re
from pathlib import Path
from typing import IO, Any

import numpy as np

from moetool.base.errors import MismatchError, first_line


def load(path: Path) -> dict[str, Any]:
    """Load the dictionary of a `.pt` file.

    Raises:
        MismatchError: it is damaged, needs more than tensors, or holds something else.
    """
    pack = load_any(path)
    if not isinstance(pack, dict):
        raise MismatchError(f"{path} holds a {type(pack).__name__}, expected a dictionary of SGLang's recorder")
    return pack


def load_any(path: Path) -> Any:
    """Load a `.pt` file: tensors, numbers, lists and dictionaries.

    Raises:
        MismatchError: it is damaged, or needs more.
    """
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive raises many types, some of them in the zip reader
        if isinstance(error, pickle.UnpicklingError) and (asked := re.search(r"GLOBAL (\S+)", str(error))):
            raise MismatchError(
                f"{path} needs {asked[1]}, expected only tensors, lists and numbers, since moetool runs no code of "
                f"a file; save plain tensors"
            ) from None
        reason = "not made by torch.save" if isinstance(error, pickle.UnpicklingError) else first_line(error)[:200]
        raise MismatchError(f"{path} is not a complete .pt file ({reason}); record again") from None


def to_array(value: Any) -> Any:
    """Return a dense tensor as an array (bfloat16 as float32), and anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or value.is_sparse or value.is_quantized:
        return value
    return (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()


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
    return value.to(torch.int64).numpy()


def save(pack: dict[str, Any], out: Path | IO[bytes]) -> None:
    """Write a dictionary of values, lists and dictionaries; arrays become tensors."""
    import torch

    def tensors(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value.copy(order="C"))  # a view would drag its whole storage into the file
        if isinstance(value, dict):
            return {key: tensors(item) for key, item in value.items()}
        return [tensors(item) for item in value] if isinstance(value, list) else value

    torch.save(tensors(pack), out)
