"""Identity of a checkpoint: distinguishes its weights and config from others without reading all bytes."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moetool.base.types import REVISION_KIND
from moetool.models.files.tensor_index import Tensor, TensorIndex

SAMPLE_BYTES = 1024
_THREADS, _BATCH = 8, 512


def revision_of(config: bytes, index: TensorIndex) -> str:
    """Revision of a checkpoint: its kind, and a sha256 over the config and a digest of each tensor.

    The digest of a tensor covers name, data type, shape, and the first, middle and last KiB of its bytes. Tensors of
    three dimensions or more are sampled so in every slice over three KiB, since a slice may be an expert. The split of
    tensors over files does not matter.

    It misses a change of a few values between samples, such as new rows in the middle of an embedding table.
    """
    digests: dict[str, bytes] = {}
    by_file: list[list[tuple[str, Tensor]]] = [[] for _ in index.files]
    for name, tensor in sorted(index.tensors.items(), key=lambda item: item[1].offset):
        by_file[tensor.file].append((name, tensor))
    work = [
        (index.files[number], tensors[start : start + _BATCH])
        for number, tensors in enumerate(by_file)
        for start in range(0, len(tensors), _BATCH)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        for part in threads.map(lambda one: _digests(*one), work):
            digests.update(part)
    whole = hashlib.sha256(config)
    for name in sorted(digests):
        whole.update(digests[name])
    return REVISION_KIND + whole.hexdigest()


def config_revision(config: bytes) -> str:
    """Identity of a model from its config only; never equal to a checkpoint's."""
    return hashlib.sha256(config).hexdigest()


def _digests(file: Path, tensors: list[tuple[str, Tensor]]) -> dict[str, bytes]:
    found = {}
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: samples are far apart
        for name, tensor in tensors:
            digest = hashlib.sha256(json.dumps([name, tensor.dtype, tensor.shape]).encode())
            for offset, num_bytes in _samples(tensor):
                digest.update(os.pread(descriptor, num_bytes, offset))
            found[name] = digest.digest()
    finally:
        os.close(descriptor)
    return found


def _samples(tensor: Tensor) -> list[tuple[int, int]]:
    """Offset and length of the sampled byte ranges of a tensor."""
    slices = tensor.shape[0] if len(tensor.shape) > 2 else 1
    if tensor.num_bytes <= slices * 3 * SAMPLE_BYTES:
        slices = 1
    size = tensor.num_bytes // slices
    if size <= 3 * SAMPLE_BYTES:
        return [(tensor.offset, tensor.num_bytes)]
    within = (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES)
    starts = range(tensor.offset, tensor.offset + tensor.num_bytes, size)
    return [(start + offset, SAMPLE_BYTES) for start in starts for offset in within]
