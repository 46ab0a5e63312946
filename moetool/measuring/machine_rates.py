"""Quick measurements of this machine's rates, in about a second: memory, products, disk, and a GPU's link."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from moetool.base.errors import MoetoolError
from moetool.base.tables import count
from moetool.costing.estimates import CPU_MISS_LAYER_S, GPU_LAYER_S, GPU_MISS_LAYER_S, LAYER_NORMS, LOAD_PASSES, Rates
from moetool.kernels.cpu.matmul import RowLinear
from moetool.measuring.probes.disk import DiskProbe, scratch_shards
from moetool.measuring.probes.expert_compute import random, synchronize
from moetool.measuring.probes.host_copies import copy_costs
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.shards import Shards

Fact = tuple[str, str, str]
"""Name of a rate, its value, and its source."""
_ROUNDS = 5
_COLD_BYTES = 192 * 10**6  # more than the caches of most processors hold
_FILE_BYTES, _READ_BYTES, _READERS = 64 * 10**6, 4 * 2**20, 2
_WIDTH, _PROMPT = 2048, 256
_COPY_BYTES = 32 * 2**20


def measured_rates(
    device: str, folder: Path, disk_bytes_s: float | None = None, files: ExpertFiles | None = None
) -> tuple[Rates, tuple[Fact, ...]]:
    """Measure a device of this machine and the disk of a folder.

    Args:
        device: `cpu` or `cuda`.
        disk_bytes_s: known rate of the disk, which is then not measured.
        files: experts whose loads are measured, instead of the disk of the folder.

    Effects: writes and removes a file of 64 MB, unless the rate of the disk is known or there are `files`.
    """
    memory, flops = _products(device)
    facts = [("memory bandwidth", f"{count(memory, 'B')}/s in products of one token", "measured here")]
    link, layer_s, miss_layer_s = 0.0, GPU_LAYER_S, GPU_MISS_LAYER_S
    if device == "cuda":
        pinned = next(costs for costs in copy_costs(_COPY_BYTES, 0.2) if costs.tier == "pinned")
        link = _COPY_BYTES / pinned.seconds(_COPY_BYTES)
        facts.append(("link to the GPU", f"{count(link, 'B')}/s", "measured here"))
        facts.append(("fixed time per layer", f"{layer_s * 1e3:.2g} ms", "measured on an H100 (moetool guide speed)"))
    else:
        layer_s, miss_layer_s = LAYER_NORMS * _norm_s(), CPU_MISS_LAYER_S
        facts.append(("fixed time per layer", f"{layer_s * 1e3:.2g} ms", "measured here, by small operations"))
    disk_bytes_s, load_bytes_s, origin = disk_rates(folder, disk_bytes_s, files)
    facts.append(("disk", f"{count(disk_bytes_s, 'B')}/s", origin))
    if device == "cpu":
        measured = "measured here" if load_bytes_s else f"assumed: {LOAD_PASSES} passes over memory"
        load_bytes_s = load_bytes_s or memory / LOAD_PASSES
        facts.append(("loads", f"{count(load_bytes_s, 'B')} in a processor second", measured))
    rates = Rates(
        device=device,
        memory_bytes_s=memory,
        flops=flops,
        layer_s=layer_s,
        miss_layer_s=miss_layer_s,
        link_bytes_s=link,
        disk_bytes_s=disk_bytes_s,
        load_bytes_s=load_bytes_s,
    )
    return rates, tuple(facts)


def disk_rates(folder: Path, given: float | None = None, files: ExpertFiles | None = None) -> tuple[float, float, str]:
    """Return bytes of reads per second in a folder, those of loads per processor second, and the rate's origin.

    Args:
        given: known rate of the disk.
        files: experts to load; else a file of random bytes in the folder, unless the rate is given.

    Returns:
        The rate of loads is 0 if nothing was loaded.

    Effects: as `measured_rates`.
    """
    if given is not None and files is None:
        return given, 0.0, "as given"
    where = (folder if files is None else files.shards.files[0].parent).resolve()
    try:
        if files is None:
            with scratch_shards(folder, _FILE_BYTES) as shards:
                rates = _disk_rates(shards, _READ_BYTES, None)
        else:
            rates = _disk_rates(files.shards, files.stored_bytes, files)
    except (OSError, MoetoolError):
        if given is not None:
            return given, 0.0, "as given"
        return 1e9, 0.0, f"assumed: {where} cannot be {'written' if files is None else 'read'}"
    return (given, rates[1], "as given") if given is not None else (*rates, f"measured in {where}")


def _fastest(parts: Sequence[Callable[[], object]], device: str) -> float:
    """Seconds of all parts, each in its fastest round: other processes only add to them. The first is a warm-up."""
    rounds = []
    for _ in range(_ROUNDS):
        seconds = []
        for part in parts:
            synchronize(device)
            began = time.perf_counter()
            part()
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        rounds.append(seconds)
    return sum(map(min, zip(*rounds[1:], strict=True)))


def _products(device: str) -> tuple[float, float]:
    """Bytes of bfloat16 weights per second in products of one row, and operations per second of many rows."""
    weights = []
    for _ in range(_COLD_BYTES // (2 * _WIDTH * _WIDTH)):
        linear = RowLinear(_WIDTH, _WIDTH, bias=False, device="meta")
        weight = random(torch.bfloat16, device, 64, _WIDTH).repeat(_WIDTH // 64, 1)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        weights.append(linear)
    row, rows = random(torch.bfloat16, device, 1, _WIDTH), random(torch.bfloat16, device, _PROMPT, _WIDTH)
    with torch.inference_mode():
        if device == "cpu":  # busy processes rarely leave a core for the time of all products
            one_s = _fastest([partial(linear, row) for linear in weights], device)
        else:  # launches overlap with products
            one_s = _fastest([lambda: [linear(row) for linear in weights]], device)
        many_s = _fastest([partial(linear, rows) for linear in weights[:4]], device)
    return 2 * _WIDTH * _WIDTH * len(weights) / one_s, 2 * 4 * _PROMPT * _WIDTH * _WIDTH / many_s


def _norm_s() -> float:
    """Processor seconds of one RMS norm in six operations of torch: the fixed cost of small operations."""
    hidden, weight = random(torch.bfloat16, "cpu", 1, _WIDTH), torch.ones(_WIDTH, dtype=torch.bfloat16)

    def norms(number: int) -> float:
        began = time.process_time()
        for _ in range(number):
            wide = hidden.to(torch.float32)
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            weight * scaled.to(torch.bfloat16)
        return (time.process_time() - began) / number

    with torch.inference_mode():
        return min(norms(100) for _ in range(_ROUNDS))


def _disk_rates(shards: Shards, num_bytes: int, files: ExpertFiles | None) -> tuple[float, float]:
    """Bytes of reads per second on some threads, and per processor second of one."""
    probe = DiskProbe(shards, num_bytes, _READERS, files)
    try:
        seconds = min(probe.seconds(num_bytes) for _ in range(4))
        return num_bytes / seconds, num_bytes / min(probe.processor_s(num_bytes) for _ in range(4))
    finally:
        probe.close()
