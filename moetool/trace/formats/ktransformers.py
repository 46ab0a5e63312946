"""KTransformers' frequency table: a `.pt` file with `logical_count` [num_hidden_layers, E], like SGLang's recorder.

It is one pass of counts, and SGLang's `--init-expert-location` takes it too. KTransformers keeps the experts with the
highest counts of the whole table on its GPU.
Deviation: the reader in `sglang-kt` was not tested.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moetool.base.errors import MismatchError
from moetool.trace.expert_counts import Counted
from moetool.trace.foreign import torch_file
from moetool.trace.foreign.file_sample import FileSample
from moetool.trace.foreign.model_facts import ModelFacts, hidden_layers
from moetool.trace.formats import sglang_stat


def recognize(sample: FileSample) -> str | None:
    """Recognize a `.pt` file with `logical_count` of one pass."""
    shape = getattr(sample.tensors.get("logical_count"), "shape", ())
    return "a .pt file with one table logical_count" if len(shape) == 2 else None


def read_counts(paths: Sequence[Path], facts: ModelFacts) -> Counted:
    """Return each file as a pass.

    Raises:
        MismatchError: a file is damaged or of another form, the files differ in shape, or a layer with experts is zero.
        UsageError: the layers are not those of the given model.
    """
    found = [torch_file.array(path, torch_file.load(path), "logical_count", 2)[None] for path in paths]
    return sglang_stat.counted(paths, found, facts)


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write the sum of all passes; return notes on the additions.

    Raises:
        MismatchError: the layers differ in width.
        UsageError: `num_hidden_layers` is too small.
    """
    spec = counted.spec
    if len(set(spec.num_experts_L)) > 1:
        raise MismatchError(f"KTransformers needs one width for all layers, but {spec.name} has several")
    count_LE = np.zeros((hidden_layers(spec, num_hidden_layers), spec.num_experts))
    count_LE[list(spec.layer_ids_L)] = counted.counts_WLE.sum(axis=0)
    out.write_bytes(table(count_LE))
    return [f"{len(count_LE)} layers, zeros in those without experts; KTransformers keeps the highest counts of all"]


def table(count_LE: np.ndarray) -> bytes:
    """Return the file's bytes: counts by layer, dense ones included, and expert."""
    dtype = np.int32 if count_LE.max(initial=0) < 2**31 else np.int64
    buffer = io.BytesIO()
    torch_file.save({"logical_count": count_LE.astype(dtype)}, buffer)
    return buffer.getvalue()
