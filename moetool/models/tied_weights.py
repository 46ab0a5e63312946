"""Parameters that a model's config ties to another, such as the output head to the input embedding.

The rule is transformers' own: a tied parameter whose files hold it with other values keeps them. If the files hold only
one of the two, both share it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moetool.models.conversion import TensorSource
from moetool.models.files.tensor_index import Tensor
from moetool.models.weight_index import WeightIndex

_log = logging.getLogger(__name__)
_PIECE_BYTES = 16 << 20


def head_is_tied(model: Any) -> bool:
    """Whether a model's output head shares the weight of its input embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def untie_stored(model: Any, sources: Mapping[str, TensorSource], weights: WeightIndex, path: Path) -> None:
    """Untie the parameters of a model on the meta device whose files hold values of their own.

    Args:
        sources: sources of its parameters.
        path: path of the checkpoint, for a warning.

    Effects: reads both tensors of a tied pair up to their first difference. A warning names each pair that differs.
    """
    for tied, other in dict(model.all_tied_weights_keys).items():
        pair = [sources.get(name) for name in (tied, other)]
        one, two = pair
        if one is None or two is None or _are_equal(one, two, weights):
            continue
        owner, _, leaf = tied.rpartition(".")
        empty = torch.empty_like(model.get_parameter(tied))
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=False))
        del model.all_tied_weights_keys[tied]
        _log.warning(
            "the config of %s ties %s to %s (tie_word_embeddings), but its files hold both, with different values: "
            "each is used as it is stored, as transformers does; set tie_word_embeddings to false if that is intended",
            path,
            tied,
            other,
        )


def _are_equal(one: TensorSource, two: TensorSource, index: WeightIndex) -> bool:
    """Whether two parameters are stored as the same bytes. Others may still be equal; untied, they compute the same."""
    if one.converter is not None or two.converter is not None:
        return False
    first, second = (index.weights[source.tensor_names[0]] for source in (one, two))
    if first.codec != second.codec or first.tensors.keys() != second.tensors.keys():
        return False
    return all(_same_bytes(tensor, second.tensors[role], index) for role, tensor in first.tensors.items())


def _same_bytes(one: Tensor, two: Tensor, index: WeightIndex) -> bool:
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    with index.files[one.file].open("rb") as first, index.files[two.file].open("rb") as second:
        first.seek(one.offset)
        second.seek(two.offset)
        for done in range(0, one.num_bytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, one.num_bytes - done)
            if first.read(count) != second.read(count):
                return False
    return True
