"""Timings of expert reads from disk, bypassing the page cache, on several threads."""

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from moetool.base.errors import CapacityError
from moetool.costing.costs import LoadCosts
from moetool.measuring.probes.repeat import Timings, repeat
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.files.tensor_index import read_index
from moetool.models.shards import Shards
from moetool.models.weight_index import index_weights

THREADS = (1, 2, 4, 8)
_SHARES = (16, 4, 2, 1)  # sizes to read, as parts of an expert
_BYTES_EACH = 2**20  # least bytes per thread in a timing, to hide the start of threads


@contextmanager
def scratch_shards(folder: Path, num_bytes: int) -> Iterator[Shards]:
    """Write a safetensors file of random bytes to the disk of `folder`; remove it at the end.

    Raises:
        CapacityError: the disk has no room for the file.
    """
    from safetensors.torch import save_file

    free = shutil.disk_usage(folder).free
    if free < 2 * num_bytes:
        raise CapacityError(
            f"{folder.resolve()} has {free:,} bytes free, expected {2 * num_bytes:,} to test its disk; run in a "
            "directory with more space"
        )
    with tempfile.TemporaryDirectory(prefix=".moetool-", dir=folder) as scratch:
        file = Path(scratch) / "model.safetensors"
        save_file({"bytes": torch.randint(256, (num_bytes,), dtype=torch.uint8)}, file)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        shards = Shards(index_weights(read_index(Path(scratch)), None))
        try:
            yield shards
        finally:
            shards.close()


class DiskProbe:
    """Reads from shards on a fixed number of threads, each into its own slot.

    Args:
        files: expert files of a model, to read whole experts as the server does; None for other shards.
    """

    def __init__(self, shards: Shards, slot_bytes: int, threads: int, files: ExpertFiles | None = None) -> None:
        self._shards = shards
        self._files = files
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        room = slot_bytes if files is None else max(slot_bytes, files.slot_bytes)
        self._slots = [torch.empty(room, dtype=torch.uint8) for _ in range(threads)]
        self._random = random.Random(0)
        self._sizes = [file.stat().st_size for file in shards.files]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds from one read of these bytes to the next, with every thread reading."""
        each = -(-_BYTES_EACH // num_bytes)
        places = [[self._place(num_bytes) for _ in range(each)] for _ in range(self._threads)]
        began = time.perf_counter()
        list(self._pool.map(self._read_all, self._slots, places, itertools.repeat(num_bytes)))
        return (time.perf_counter() - began) / (each * self._threads)

    def processor_s(self, num_bytes: int) -> float:
        """Return the processor seconds of a read of these bytes that is not the first of its place."""
        place = [self._place(num_bytes)]
        self._read_all(self._slots[0], place, num_bytes)  # keeps its checksum
        began = time.thread_time()
        self._read_all(self._slots[0], place, num_bytes)
        return time.thread_time() - began

    def _read_all(self, slot: torch.Tensor, places: list[tuple[int, int]], num_bytes: int) -> None:
        for file, offset in places:
            if self._files is not None and num_bytes == self._files.stored_bytes:
                self._files.read_into(offset, slot)
            else:
                data = torch.frombuffer(self._shards.read(file, offset, num_bytes), dtype=torch.uint8)
                slot[:num_bytes].copy_(data)

    def _place(self, num_bytes: int) -> tuple[int, int]:
        """Return a random place to read: a file and an offset, or 0 and an expert's key for whole experts."""
        if self._files is not None and num_bytes == self._files.stored_bytes:
            spec = self._files.spec
            layer = self._random.randrange(spec.num_layers)
            return 0, spec.expert_key(layer, self._random.randrange(spec.num_experts_L[layer]))
        fitting = [i for i, size in enumerate(self._sizes) if size >= num_bytes]
        file = self._random.choice(fitting)
        return file, self._random.randrange(self._sizes[file] - num_bytes + 1)


def disk_costs(
    shards: Shards, expert_bytes: int, seconds: float, files: ExpertFiles | None = None
) -> tuple[LoadCosts, ...]:
    """Return load costs of the disk for reads up to an expert's size, on 1 to 8 threads."""
    sizes = sorted({max(1, expert_bytes // share) for share in _SHARES})
    probes = {threads: DiskProbe(shards, expert_bytes, threads, files) for threads in THREADS}
    timings = {threads: Timings() for threads in THREADS}

    def measure(threads: int, num_bytes: int) -> None:
        timings[threads].add(num_bytes, probes[threads].seconds(num_bytes))

    try:
        repeat([partial(measure, threads, num_bytes) for num_bytes in sizes for threads in THREADS], seconds)
    finally:
        for probe in probes.values():
            probe.close()
    return tuple(
        LoadCosts(tier="disk", threads=threads, direct=shards.direct, seconds=timings[threads].curve())
        for threads in THREADS
    )
