"""Weights of a checkpoint by their names in an unquantized one, with the stored tensors of each."""

from pathlib import Path
from typing import NamedTuple

from moetool.models.files.tensor_index import FileStamp, TensorIndex
from moetool.models.weights.format import StoredWeight, as_dense
from moetool.models.weights.quantization_config import Quantization


class WeightIndex(NamedTuple):
    """Weights of a checkpoint.

    Attributes:
        files, stamps: the files that `Tensor.file` indexes.
        quantization: weight formats; None if all are plain numbers.
    """

    files: tuple[Path, ...]
    stamps: tuple[FileStamp, ...]
    weights: dict[str, StoredWeight]
    quantization: Quantization | None

    def file_of(self, weight: StoredWeight) -> Path:
        """The file that holds a weight, or its first tensor."""
        return self.files[next(iter(weight.tensors.values())).file]


def index_weights(index: TensorIndex, quantization: Quantization | None) -> WeightIndex:
    """Replace stored tensors by their weights, after checking that they agree.

    Raises:
        MismatchError: they contradict one another or the config.
        UsageError: the storage format of a weight is not supported.
    """
    if quantization is None:
        weights = {name: as_dense(name, tensor) for name, tensor in index.tensors.items()}
        return WeightIndex(index.files, index.stamps, weights, None)
    weights = quantization.claim(index.tensors, index.files, index.read)
    return WeightIndex(index.files, index.stamps, weights, quantization)
