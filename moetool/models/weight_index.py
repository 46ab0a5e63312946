"""The weights of a checkpoint by the names that an unquantized one has for them, and the tensors that store each."""

from pathlib import Path
from typing import NamedTuple

from moetool.models.quantization_config import Quantization
from moetool.models.tensor_index import FileStamp, TensorIndex
from moetool.models.weight_format import StoredWeight, as_dense


class WeightIndex(NamedTuple):
    """The weights of a checkpoint.

    Attributes:
        files, stamps: those that `Tensor.file` counts.
        weights: by name.
        quantization: how they are stored; None where all are plain numbers.
    """

    files: tuple[Path, ...]
    stamps: tuple[FileStamp, ...]
    weights: dict[str, StoredWeight]
    quantization: Quantization | None

    def file_of(self, weight: StoredWeight) -> Path:
        """The file that holds a weight, or its first tensor."""
        return self.files[next(iter(weight.tensors.values())).file]


def index_weights(index: TensorIndex, quantization: Quantization | None) -> WeightIndex:
    """Put one weight in the place of the tensors that store it, once they have been found to agree.

    Raises:
        MismatchError: they contradict one another or the config.
        UsageError: weights are stored in a way that is not read.
    """
    if quantization is None:
        weights = {name: as_dense(name, tensor) for name, tensor in index.tensors.items()}
        return WeightIndex(index.files, index.stamps, weights, None)
    weights = quantization.claim(index.tensors, index.files, index.read)
    return WeightIndex(index.files, index.stamps, weights, quantization)
