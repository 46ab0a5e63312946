"""Checks before a replica is made: finite weights, and finite activations on the calibration text."""

from collections.abc import Iterable
from pathlib import Path

import torch

from moetool.base.errors import MoetoolError
from moetool.models.files.tensor_index import FLOATS
from moetool.models.shards import Shards


def require_finite_weights(shards: Shards, path: Path) -> None:
    """Read all weights in file order, one tensor in memory at a time.

    Raises:
        MoetoolError: a weight is NaN or infinite.
        MismatchError: a weight has an unsupported data type.
    """
    tensors = {name: weight.tensors["weight"] for name, weight in shards.weights.items()}
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
        if tensor.dtype not in FLOATS:
            continue  # integers
        weight = shards.load(name)
        # A finite sum shows that all values are finite; an infinite one may be an overflow.
        if weight.sum(dtype=torch.float32).isfinite():
            continue
        if bad := int((~weight.isfinite()).sum()):
            raise MoetoolError(
                f"{bad:,} of {weight.numel():,} weights of {name} in {shards.files[tensor.file]} are NaN or infinite, "
                f"expected none; download {path.name} again, or give the model that it was made from"
            )


def require_finite(hidden: Iterable[torch.Tensor], where: str) -> None:
    """Raise MoetoolError if a hidden state is NaN or infinite."""
    states = list(hidden)
    bad = sum(int((~state.isfinite()).any(dim=-1).sum()) for state in states)
    if bad:
        tokens = sum(state.shape[-2] for state in states)
        if states[0].dtype == torch.float16:
            advice = "this data type is too narrow for them; try --set dtype=float32"
        else:  # bfloat16 is as wide as float32
            advice = "the text gives activations that overflow; try other --data"
        raise MoetoolError(
            f"{bad:,} of {tokens:,} tokens have activations that are NaN or infinite {where}, expected none: the "
            f"weights are finite, but {advice}"
        )
