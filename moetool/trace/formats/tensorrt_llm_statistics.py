"""TensorRT-LLM's expert statistics: how many tokens used each expert, by iteration and layer.

The input is the folder (contents: `moetool.trace.foreign.tensorrt_statistics`). Ranks are summed, as in TensorRT-LLM's
own reader.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign import tensorrt_statistics as _statistics
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, require_even

READS_FOLDERS = True
FOLDER_MARK = _statistics.META


def recognize(sample: FileSample) -> str | None:
    """Recognize a folder with the model's numbers and counts of ranks."""
    return _statistics.recognized(sample.path, raw=False)


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return the iterations of each folder, summed over its ranks, one folder after the other.

    Raises:
        MismatchError: a folder is damaged, the folders differ in shape, or a layer is zero.
        UsageError: one is not a folder, or the bytes of an expert are not given.
    """
    passes = []
    shapes = set()
    for folder in paths:
        num_experts, top_k = _statistics.read_meta(folder)
        ranks = _statistics.read_ranks(folder, raw=False)
        keys = sorted({key for arrays in ranks.values() for key in arrays})
        layers = tuple(sorted({layer for _, layer in keys}))
        shapes.add((num_experts, top_k, layers))
        for rank, arrays in ranks.items():
            for (iteration, layer), counts_E in arrays.items():
                if counts_E.shape != (num_experts,):
                    raise MismatchError(
                        f"{folder}, rank {rank}, {iteration}_{layer} has the shape {counts_E.shape}, expected "
                        f"{(num_experts,)} by {_statistics.META}"
                    )
        numbers = {iteration: w for w, iteration in enumerate(sorted({iteration for iteration, _ in keys}))}
        counts_WLE = np.zeros((len(numbers), len(layers), num_experts), np.int64)
        for arrays in ranks.values():
            for (iteration, layer), counts_E in arrays.items():
                counts_WLE[numbers[iteration], layers.index(layer)] += counts_E
        passes.append(counts_WLE[counts_WLE.any(axis=(1, 2))])
    if len(shapes) > 1:
        raise MismatchError(f"{', '.join(map(str, paths))} are of different models (experts, top-k, layers)")
    ((num_experts, top_k, layers),) = shapes
    spec = facts.spec_of(paths[0], layers=layers, num_experts=num_experts, top_k_L=[top_k] * len(layers))
    return Counted(spec=spec, counts_WLE=np.concatenate(passes))


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write counts as those of one rank, into a folder; layers are absolute: `num_hidden_layers` is not needed.

    Raises:
        MismatchError: the layers differ in shape.
    """
    require_even(counted.spec, "tensorrt_llm_statistics")
    _statistics.write_meta(out, counted.spec.num_experts, counted.spec.top_k_L[0])
    _statistics.write_counts(out, counted.counts_WLE, counted.spec.layer_ids_L)
    return ["one rank; iterations count from 0"]
